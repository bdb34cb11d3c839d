"""The evaluator of a call, in C++: may this call run this code, on this module, now; and the call itself.

- `tensors.h`: how a tensor lies in memory, whatever library made it, and what a door to such a library gives.
- `torch_door.cpp`: the door to torch. It reads `torch.Tensor` through exported functions of torch, and is compiled
  without a header of torch, so that one file serves every torch and every Python that aotc supports.
- `facts.h`, `facts.cpp`: what the module and the process have to be, compared by identity: one object, swapped whole.
- `binding.h`, `binding.cpp`: from arguments to leaves.
- `evaluator.cpp`: the extension module `aotc.core._evaluator`.

`aotc.runtime.native` opens it, and writes the tables. It knows no Python package of ours.

`cpu/` is the standalone runtime, the extension module `aotc.core._cpu`, without torch: its soname is `libaotc_cpu.so`.

- `tensor.h`, `tensor.cpp`: tensors behind the handles of torch's C shim; `floats.h`: numbers of 16 bits.
- `shim.cpp`: the shim's functions, without operators. `operators.cpp`: these; `gemm.cpp`: matrix products.
- `instructions.h`: for which CPUs arithmetic is compiled, of x86-64 and of aarch64.
- `sleef.h`, compiled for AVX2 and for AVX512: the vector functions that Inductor's code calls on x86-64, over glibc's
  libmvec.
- `call_table.h`, `call_table.cpp`: which bucket takes a call. `table_call.h`, `table_call.cpp`: the call itself.
  `cut_views.h`, `cut_views.cpp`: its outputs without their pads.
- `library.h`, `library.cpp`: a bucket's library, by the interface of AOTInductor.
- `c_api.cpp`: `libaotc.so` of exported folders, whose interface is `aotc.h`. `dlpack.h`: DLPack's structures.
- `../gpu/`: GPUs by the driver alone. `driver`: its library; `device`: a GPU's stream and memory, in which tensors may
  lie; `upload`: weights to it; `gpu_code`: a bucket's code, with CUDA graphs; `shared_copies`: of outputs that share
  memory; `cuda_functions.cpp`: what code for GPUs takes of torch and CUDA.
- `python/`: the extension module. `tensor_object`: `Tensor`, over any object's memory (`buffers`, DLPack's `capsules`),
  with `tensor_functions`; `table_object`: `Table`, which makes calls; `module`: the rest.
"""
