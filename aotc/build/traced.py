"""The captured graph, run beside the model on the inputs that it is tuned for.

Code that asks whether somebody traces it goes another way while torch.export does, and what is compiled computes what
the model does not. transformers 5.17 leaves out masks that mask nothing where nobody traces; a model that takes no mask
for "not causal" is causal when it is traced. torch's fast path of attention gives zeros for what is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from aotc.build.edges import run_graph
from aotc.build.kept_objects import KeptObjects
from aotc.build.lifting import Capture
from aotc.build.second_call import Result, call_model, unlike
from aotc.errors import BuildError
from aotc.records import Signature
from aotc.snapshot import named_state


def check_traced(
    module: nn.Module,
    signature: Signature,
    captured: Capture,
    kept: KeptObjects,
    leaves: Sequence[Any],
    result: Result,
) -> None:
    """Raises BuildError where the graph does not return what the model does, as `call_model` gave it for these leaves.

    A graph that fails is left alone: the smoke run says so. So is a model that does not repeat itself. Afterwards the
    module's state is as before, and what it keeps is as `kept` says.
    """
    state = named_state(module)
    before = {name: state[name].detach().clone() for name in captured.mutated_state}
    values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        given, _ = run_graph(captured, values, state)
    except Exception:  # whatever operators raise
        return
    finally:
        for name, saved in before.items():
            state[name].detach().copy_(saved)
    returned = result[: len(result) - len(leaves) - len(before)]
    if problem := _problem(captured, given, returned):
        again = call_model(module, signature, captured.mutated_state, leaves)
        kept.put_back()
        if not any(map(unlike, result, again)):
            raise _traced(problem)


def _problem(captured: Capture, given: Sequence[Any], returned: Sequence[Any]) -> str:
    if len(returned) != len(captured.outputs):
        return f"it gives {len(captured.outputs)} values then, and {len(returned)} when it is called"
    for number, (output, want) in enumerate(zip(captured.outputs, returned, strict=True)):
        if output.index is not None and unlike(want, given[output.index]):
            return f"its output {number} is another one than when it is called"
    return ""


def _traced(problem: str) -> BuildError:
    return BuildError(
        f"the model computes something else while torch.export traces it: {problem}",
        hint="look for what asks whether it is traced (`is_compiling`, `is_exporting`, `is_tracing`). Of transformers "
        "take a newer version, or `attn_implementation: eager` in the configuration. nn.TransformerEncoder and "
        "nn.MultiheadAttention: torch.backends.mha.set_fastpath_enabled(False) in the factory",
        stage="export",
    )
