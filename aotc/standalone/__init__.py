"""Compiled code in a process without torch.

- `loading`: from a reference to a `StandaloneModel`, over the same store, with the same checks of digests, signatures
  and this machine (`cpu_environment`, `gpu_environment`). `unsupported` names what an artifact has that does not run
  here; `misfits` also what its libraries call, by the record.
- `state_tensors`: weights from safetensors files or arrays. `shim_library`: a variant's library, opened over
  `aotc.core._cpu`, which has what it needs of torch.
- `standalone_model`: what a call is asked and what it gives. `aotc.core._cpu` decides and makes the call, by the rows
  of the call table, as in an exported folder, and says why one is a miss: `call_rows` writes them, with expressions in
  `prefix_notation`.
- `array_views`: arguments as tensors. `call_results`: the model's own result.
- `exporting`: a model as a folder that needs neither aotc nor Python.

Neither torch nor `aotc.runtime` is imported. numpy is not needed.
"""

from aotc.standalone.cpu_environment import set_num_threads
from aotc.standalone.loading import load
from aotc.standalone.standalone_model import StandaloneModel

__all__ = ["StandaloneModel", "load", "set_num_threads"]
