"""The builds for a module that is compiled as it is used.

- `builds`: when code is built, and by which process. `while_waiting`: how far that is, and what it costs.
- `build_process`: the process that builds, which alone imports the compiler.
- `counting_attributes`: numbers that calls add to, found by trying.
"""
