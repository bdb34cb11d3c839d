"""Make the compilers of a unit faster: smaller inputs, parallel compiles, and what is equal in all units compiled once.

In the order in which a unit meets the modules:

- `triton_compilers`: Inductor's processes that compile Triton kernels, started before the model is built.
- `pattern_warmup`: Inductor's patterns, built before the processes of units are forked.
- `unit_toolchain`: activates all of the following around AOTInductor's call; the folder that units of a build share.
- `wrapper_split`: the part of AOTInductor's wrapper that is the same in every library, compiled separately, and kept by
  `aotc.store.compile_cache` for the machine or for one build.
- `precompiled_headers`: torch's headers, for builds of many units.
- `parallel_compile`: the C++ compiles of a unit in parallel: wrapper, kernels, and the link that waits for both.

None of these changes the code. With an unknown version of torch or an unknown compiler, units are compiled as torch
does.
"""
