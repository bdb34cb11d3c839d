"""Compile for a GPU that this machine lacks: libraries that stand in for the CUDA runtime and the driver's library.

- `runtime.cpp`, `driver.cpp`: the two libraries. They answer what is asked of one GPU, and run nothing.
- `libraries`: compile them, for the time of a build.
- `stand_in`: load them in a process of a build, before torch, and say which GPU it is to be.
- `absent_gpu`: what Inductor runs on the GPU while it compiles.
- `capture`: a unit's graph for that GPU; what needs values runs on the CPU.
"""
