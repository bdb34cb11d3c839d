"""The captured graph, run beside the model on the inputs that it is tuned for.

Code that asks whether somebody traces it goes another way while torch.export does, and what is compiled computes what
the model does not. transformers 5.17 leaves out masks that mask nothing where nobody traces; a model that takes no mask
for "not causal" is causal when it is traced. torch's fast path of attention gives zeros for what is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from aotc.compiler.capture.lifting import Capture
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.compiler.capture.zero_one_check import results_of, run_graph
from aotc.errors import BuildError
from aotc.models.calls import call_model
from aotc.records import Signature
from aotc.snapshot import named_state
from aotc.tensors.comparison import Result, first_difference


def check_traced(
    module: nn.Module,
    signature: Signature,
    captured: Capture,
    kept: KeptObjects,
    leaves: Sequence[Any],
    result: Result,
) -> None:
    """Raises BuildError where the graph does not return, and write to inputs and to the state that it writes to, what
    the model does, as `call_model` gave it for these leaves.

    A graph that fails is left alone: the smoke run says so. Rounding and random numbers make no difference, see
    `aotc.tensors.comparison`. Afterwards the module's state is as before, and what it keeps is as `kept` says.
    """
    state = named_state(module)
    before = {name: state[name].detach().clone() for name in captured.mutated_state}
    values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    try:
        given = _given(captured, values, state)
    finally:
        for name, saved in before.items():
            state[name].detach().copy_(saved)

    def run(seed: int) -> Result:
        return call_model(module, signature, captured.mutated_state, leaves, seed=seed)

    try:
        problem = "" if given is None else _problem(signature, captured, given, result, run)
    finally:
        kept.put_back()
    if problem:
        raise _traced(problem)


def _given(captured: Capture, values: Sequence[Any], state: Mapping[str, Tensor]) -> Result | None:
    """What the graph gives; None where it fails."""
    try:
        computed, _ = run_graph(captured, values, state)
    except Exception:  # whatever operators raise
        return None
    return results_of(captured, computed, values, state)


def _problem(
    signature: Signature, captured: Capture, given: Result, result: Result, run: Callable[[int], Result]
) -> str:
    written = len(signature.leaves) + len(captured.mutated_state)
    if len(given) != len(result):
        return f"it gives {len(given) - written} values then, and {len(result) - written} when it is called"
    position = first_difference(result, given, run)
    if position is None:
        return ""
    return f"{list(_names(signature, captured))[position]} is another than when it is called"


def _names(signature: Signature, captured: Capture) -> Iterator[str]:
    yield from (f"its output {number}" for number in range(len(captured.outputs)))
    yield from (f"what it leaves in the input `{leaf.path}`" for leaf in signature.leaves)
    yield from (f"what it writes to `{name}`" for name in captured.mutated_state)


def _traced(problem: str) -> BuildError:
    return BuildError(
        f"the model computes something else while torch.export traces it: {problem}",
        hint="look for what asks whether it is traced (`is_compiling`, `is_exporting`, `is_tracing`). Of transformers "
        "take a newer version, or `attn_implementation: eager` in the configuration. nn.TransformerEncoder and "
        "nn.MultiheadAttention: torch.backends.mha.set_fastpath_enabled(False) in the factory",
        stage="export",
    )
