"""The compilers that a unit runs: less for them to do, side by side, and once where the code is equal.

In the order in which a unit meets the modules:

- `triton_compilers`: Inductor's processes that compile Triton kernels, begun before the model is made.
- `unit_toolchain`: all of the rest, in force around AOTInductor's call; and what the units of a build have in common.
- `compile_cache`: files by the digest of all that decides them, kept for the machine or for one build; what the next
  three use.
- `wrapper_split`: the part of AOTInductor's wrapper that is the same in every library, compiled apart.
- `precompiled_headers`: torch's headers, for builds of many units.
- `object_cache`: kernels of equal source, compiled by one unit of a build.
- `parallel_compile`: the C++ compiles of a unit, side by side: wrapper, kernels, and the link that waits for both.

None of it changes the code: where a torch or a compiler is not as it is known here, things are compiled as torch does.
"""
