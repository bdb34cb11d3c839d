"""The evaluator of a call, in C++: may this call run this code, on this module, now; and the call itself.

- `tensors.h`: how a tensor lies in memory, whatever library made it, and what a door to such a library gives.
- `torch_door.cpp`: the door to torch. It reads `torch.Tensor` through exported functions of torch, and is compiled
  without a header of torch, so that one file serves every torch and every Python that aotc supports.
- `facts.h`, `facts.cpp`: what the module and the process have to be, compared by identity: one object, swapped whole.
- `binding.h`, `binding.cpp`: from arguments to leaves.
- `evaluator.cpp`: the extension module `aotc.core._evaluator`.

`aotc.runtime.native` opens it, and writes the tables. It knows no Python package of ours.
"""
