"""The captured graph, run beside the model on the inputs that it is tuned for.

Code that asks whether somebody traces it goes another way while torch.export does, and what is compiled computes what
the model does not. transformers 5.17 leaves out masks that mask nothing where nobody traces; a model that takes no mask
for "not causal" is causal when it is traced. torch's fast path of attention gives zeros for what is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aotc.build.edges import run_graph
from aotc.build.kept_objects import KeptObjects
from aotc.build.lifting import Capture
from aotc.build.second_call import Result, call_model
from aotc.errors import BuildError
from aotc.records import Output, Signature
from aotc.snapshot import named_state

TOLERANCE = 0.05
"""Of a result's size (rms), and of its elements that are not finite. Another way gives another result altogether; other
kernels round otherwise, also where a router of experts then chooses another one for a token."""


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

    A graph that fails is left alone: the smoke run says so. So is a model that does not repeat itself. Afterwards the
    module's state is as before, and what it keeps is as `kept` says.
    """
    state = named_state(module)
    before = {name: state[name].detach().clone() for name in captured.mutated_state}
    values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        given = _given(captured, values, state)
        problem = "" if given is None else _problem(signature, captured, given, result)
    finally:
        for name, saved in before.items():
            state[name].detach().copy_(saved)
    if not problem:
        return
    try:
        again = call_model(module, signature, captured.mutated_state, leaves)
    except Exception:  # whatever the model raises
        return
    finally:
        kept.put_back()
    if not any(map(_is_another, result, again)):
        raise _traced(problem)


def _given(captured: Capture, values: Sequence[Any], state: Mapping[str, Tensor]) -> Result | None:
    """What the graph gives, laid out as `call_model` does; None where it fails. Views of the state are still views."""
    try:
        computed, _ = run_graph(captured, values, state)
    except Exception:  # whatever operators raise
        return None
    outputs = (_output(output, computed, values, state) for output in captured.outputs)
    return [*outputs, *values, *(state[name] for name in captured.mutated_state)]


def _output(output: Output, computed: Sequence[Any], values: Sequence[Any], state: Mapping[str, Tensor]) -> Any:
    if output.index is not None:
        return computed[output.index]
    if output.leaf is not None:
        return values[output.leaf]
    return output.constant if output.state is None else state[output.state]


def _problem(signature: Signature, captured: Capture, given: Result, result: Result) -> str:
    written = len(signature.leaves) + len(captured.mutated_state)
    if len(given) != len(result):
        return f"it gives {len(given) - written} values then, and {len(result) - written} when it is called"
    pairs = zip(_names(signature, captured), given, result, strict=True)
    return next(
        (f"{name} is another than when it is called" for name, got, want in pairs if _is_another(want, got)), ""
    )


def _names(signature: Signature, captured: Capture) -> Iterator[str]:
    yield from (f"its output {number}" for number in range(len(captured.outputs)))
    yield from (f"what it leaves in the input `{leaf.path}`" for leaf in signature.leaves)
    yield from (f"what it writes to `{name}`" for name in captured.mutated_state)


def _is_another(want: Any, got: Any) -> bool:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return type(want) is not type(got) or bool(want != got)
    if any(getattr(want, form) != getattr(got, form) for form in ("shape", "dtype", "layout", "device")):
        return True
    if want.numel() == 0:
        return False
    numbers, others = _numbers(want), _numbers(got)
    finite = numbers.isfinite() & others.isfinite()
    same = (numbers == others) | (numbers.isnan() & others.isnan())
    odd = int((~finite & ~same).sum())
    if odd > TOLERANCE * numbers.numel():
        return True
    numbers, others = numbers[finite], others[finite]
    if numbers.numel() == 0:
        return False
    rounding = torch.finfo(want.dtype).eps ** 0.5 if want.is_floating_point() else 0.0
    return _rms(others - numbers) > TOLERANCE * _rms(numbers) + rounding


def _numbers(tensor: Tensor) -> Tensor:
    """In float64; of a complex tensor both parts."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _traced(problem: str) -> BuildError:
    return BuildError(
        f"the model computes something else while torch.export traces it: {problem}",
        hint="look for what asks whether it is traced (`is_compiling`, `is_exporting`, `is_tracing`). Of transformers "
        "take a newer version, or `attn_implementation: eager` in the configuration. nn.TransformerEncoder and "
        "nn.MultiheadAttention: torch.backends.mha.set_fastpath_enabled(False) in the factory",
        stage="export",
    )
