"""Run the captured graph on the inputs of autotuning, and compare it with the model.

Code that checks whether it is traced takes another branch under torch.export, so the compiled code computes something
else than the model. transformers 5.17 leaves out masks that mask nothing, except while it is traced: a model for which
no mask means "not causal" becomes causal when traced. torch's fast path of attention gives zeros for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from aotc.compiler.capture.checks.captured_graph import call_captured
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.errors import BuildError
from aotc.models.calls import call_model, names_of
from aotc.records import Dims, Signature
from aotc.tensors.rounding import Result, first_difference


def check_traced(
    module: nn.Module,
    signature: Signature,
    captured: Capture,
    kept: KeptObjects,
    leaves: Sequence[Any],
    result: Result,
    sizes: Dims,
) -> None:
    """Raises BuildError where the graph's outputs, or its writes to inputs and state, differ from `result`, which
    `call_model` gave for these leaves, which are of `sizes`.

    Errors of the graph are ignored here: the smoke run reports them. Rounding and random numbers make no difference,
    see `aotc.tensors.rounding`. Afterwards the module's state and `kept` are restored.
    """
    values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        given, _ = call_captured(module, captured, values, captured.mutated_state, sizes)
    except Exception:  # whatever operators raise
        return

    def run(seed: int) -> Result:
        return call_model(module, signature, captured.mutated_state, leaves, seed=seed)

    try:
        problem = _problem(signature, captured, given, result, run)
    finally:
        kept.put_back()
    if problem:
        raise _traced(problem)


def _problem(
    signature: Signature, captured: Capture, given: Result, result: Result, run: Callable[[int], Result]
) -> str:
    if len(given) != len(result):
        behind = len(signature.leaves) + len(captured.mutated_state)
        return f"it returns {len(given) - behind} values when traced, {len(result) - behind} in eager"
    position = first_difference(result, given, run)
    if position is None:
        return ""
    return f"{names_of(result, signature, captured.mutated_state)[position]} differs from eager"


def _traced(problem: str) -> BuildError:
    return BuildError(
        f"the model computes something else while torch.export traces it: {problem}",
        hint="look for code that checks whether it is traced (`is_compiling`, `is_exporting`, `is_tracing`). For "
        "transformers: a newer version, or `attn_implementation: eager` in the configuration. For "
        "nn.TransformerEncoder and nn.MultiheadAttention: torch.backends.mha.set_fastpath_enabled(False) in the "
        "factory",
        stage="export",
    )
