"""Compiled code for CPUs in a process without torch.

- `loading`: from a reference to a `StandaloneModel`, over the same store, with the same checks of digests, signatures
  and this machine (`cpu_environment`). `unsupported` names what an artifact has that does not run here;
  `misfits` also what its libraries call, by the record.
- `state_tensors`: weights from safetensors files or arrays. `shim_library`: a variant's library, opened over
  `aotc.core._cpu`, which has what it needs of torch.
- `standalone_model`: the call, by the rows of the call table (`aotc.call_table`), over what `array_views` makes of its
  arguments. `written_memory`: whether what the model writes to is shared. `compiled_layout`: copies into the compiled
  layout, pads, crops and what is written back. `call_results`: the model's own result. `openmp_threads`: how many
  threads a call uses.
- `exporting`: a model as a folder that needs neither aotc nor Python.

Neither torch nor `aotc.runtime` is imported. numpy is not needed.
"""

from aotc.standalone.loading import load
from aotc.standalone.openmp_threads import set_num_threads
from aotc.standalone.standalone_model import StandaloneModel

__all__ = ["StandaloneModel", "load", "set_num_threads"]
