"""A variant for training: its two libraries as one function of autograd.

What is saved for the backward is saved with autograd's own means, so hooks on saved tensors, gradient checkpointing and
the check of versions work as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from aotc.errors import BindError, CorruptError, GradientError, Issue
from aotc.records import Artifact, Saved, Variant, bucket_name
from aotc.runtime.libraries.library import Library, calls_back, open_library
from aotc.snapshot.tensors import named_state
from aotc.store.layout.check_record import backward_issues

if TYPE_CHECKING:
    from aotc.runtime.cuda.options import GraphOptions
    from aotc.runtime.libraries.files import LibraryFiles


_WITHOUT = "tensors require gradients that the backward was not compiled for"
_WITHOUT_HINT = (
    "call requires_grad_(False) of them; or let the factory's module have them require gradients, and build again"
)


def check_trainable(artifact: Artifact, module: nn.Module | None, graphs: GraphOptions | None) -> None:
    """Raises BindError where there are no parameters that could get gradients, or an option does not suit training."""
    if module is None:
        raise BindError(
            f"`{artifact.model}` was built to be trained, and no module was given whose parameters get the gradients",
            hint="aotc.load(ref, module)",
        )
    if graphs is not None and (graphs.use == "always" or graphs.outputs == "view"):
        raise BindError(
            f"`{artifact.model}` was built to be trained, and its halves are not captured as CUDA graphs",
            hint="leave out `cuda_graphs` and `outputs`: aotc.TrainingStep captures the whole step",
        )
    parts = [("", artifact)]
    if artifact.regions:
        parts = [(f"{path}.", part) for region, part in artifact.parts() for path in region.instances]
    named = named_state(module)
    frozen: dict[str, Issue] = {}
    for prefix, part in parts:
        untrained = {name for variant in part.variants for name in _without_gradients(variant)}
        for spec in part.state:
            name = prefix + spec.name
            tensor = named.get(name)
            if tensor is None or not tensor.requires_grad:
                continue
            if spec.name in untrained:
                frozen[name] = Issue("requires a gradient, and did not at build", where=name)
            elif tensor.stride() != spec.stride:
                raise BindError(
                    f"`{name}` has the strides {tensor.stride()}, and was built with {spec.stride}",
                    hint="make it contiguous: its gradient would be lost",
                )
    if frozen:
        raise BindError(_WITHOUT, issues=tuple(frozen.values()), hint=_WITHOUT_HINT)


def _without_gradients(variant: Variant) -> set[str | None]:
    """The names of the parameters and buffers that the code takes, and which required no gradient at build."""
    return {variant.arguments[place].state for place in _frozen(variant)}


def _frozen(variant: Variant) -> list[int]:
    """The places of the arguments that required no gradient at build."""
    record = variant.backward
    known = {each.argument for each in record.gradients} if record is not None else set()
    without = record.without if record is not None else ()
    return [place for place, each in enumerate(variant.arguments) if place not in known and each not in without]


def open_backward(files: LibraryFiles, device: torch.device, concurrency: int) -> Library:
    """A backward's library, where it can be one that frees what was saved as it is used. Raises LibraryError."""
    if device.type != "cuda" or calls_back(files) or files.constants(device) is not None:
        return open_library(files, device, concurrency)
    from aotc.runtime.libraries.cuda_library import open_cuda_library

    return open_cuda_library(files, device)


def with_backward(forward: Library, variant: Variant, backward: Library) -> TrainingLibrary:
    """Raises CorruptError where the record makes no sense, or a library takes or gives other tensors than it says."""
    record = variant.backward
    assert record is not None
    if issues := [Issue(message) for message in backward_issues(variant)]:
        raise CorruptError(
            f"the record of the backward of bucket {bucket_name(variant.bucket)} makes no sense",
            issues=tuple(issues),
            hint="it was not written by `aotc build`, or by a broken one: build it again",
        )
    if forward.counts is not None and backward.counts is not None:
        outputs = forward.counts[1]
        expected = len(record.saved), len({each.output for each in record.gradients})
        needed = max(record.results, *(each.output + 1 for each in record.saved if each.output is not None), 0)
        if backward.counts != expected or outputs < needed:
            raise CorruptError(
                f"the backward library of bucket {bucket_name(variant.bucket)} takes {backward.counts[0]} tensors and "
                f"gives {backward.counts[1]}; its record names {expected[0]} and {expected[1]}",
                hint="the record is another build's: build it again",
                expected=str(expected),
                actual=str(backward.counts),
            )
    return TrainingLibrary(forward, variant, backward)


class TrainingLibrary:
    """Runs the forward; its results have a `grad_fn` that runs the backward."""

    def __init__(self, forward: Library, variant: Variant, backward: Library) -> None:
        record = variant.backward
        assert record is not None
        self.forward = forward
        self.backward: Callable[[list[Tensor]], list[Tensor]] = getattr(backward, "consume", backward.run)
        self.results = record.results
        self.counts = forward.counts
        self.saved, self.held = record.saved, record.held
        self.kept = tuple(dict.fromkeys(each for each in (*record.saved, *record.held) if each.gradient is None))
        self.places = {each: place for place, each in enumerate(self.kept)}
        self.not_differentiable = tuple(set(range(record.results)) - set(record.differentiable))
        self.gradients: list[int | None] = [None] * len(variant.arguments)
        for each in record.gradients:
            self.gradients[each.argument] = each.output
        self._frozen = _frozen(variant)
        self._without = [place for place, each in enumerate(variant.arguments) if each in record.without]
        self._names = [argument.state or f"input {argument.leaf}" for argument in variant.arguments]

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        if not torch.is_grad_enabled():
            return self.forward.run(arguments)[: self.results]
        if any(arguments[place].requires_grad for place in self._frozen):
            self._refuse(arguments)
        if self._without:  # in eager, the graph of autograd does not lead to them either
            arguments = [each.detach() if place in self._without else each for place, each in enumerate(arguments)]
        return list(_Step.apply(self, *arguments))  # type: ignore[no-untyped-call]

    def _refuse(self, arguments: Sequence[Tensor]) -> None:
        names = [self._names[place] for place in self._frozen if arguments[place].requires_grad]
        raise GradientError(
            _WITHOUT,
            issues=tuple(Issue("requires a gradient, and did not at build", where=name) for name in names),
            hint=_WITHOUT_HINT,
        )


class _Step(Function):
    """The forward and the backward of one call."""

    @staticmethod
    def forward(ctx: Any, code: TrainingLibrary, *arguments: Tensor) -> tuple[Tensor, ...]:
        outputs = code.forward.run(arguments)
        ctx.code = code
        ctx.save_for_backward(*(_kept(each, arguments, outputs) for each in code.kept))
        results = tuple(outputs[: code.results])
        ctx.strides = [result.stride() for result in results]
        ctx.mark_non_differentiable(*(results[index] for index in code.not_differentiable))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        code: TrainingLibrary = ctx.code
        twice = torch.is_grad_enabled()
        with torch.no_grad():
            kept = ctx.saved_tensors
            given = [
                kept[code.places[each]] if each.gradient is None else _laid_out(gradients, each.gradient, ctx.strides)
                for each in code.saved
            ]
            inputs = [*kept, *gradients] if twice else []
            del kept
            ctx.maybe_clear_saved_tensors()  # unless `retain_graph=True`
            outputs = code.backward(given)
        found = [None if output is None else outputs[output] for output in code.gradients]
        return None, *(_once_only(found, inputs) if twice else found)


def _kept(source: Saved, arguments: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    return arguments[source.argument] if source.argument is not None else outputs[source.output or 0]


def _laid_out(gradients: Sequence[Tensor], index: int, strides: Sequence[tuple[int, ...]]) -> Tensor:
    """The gradient of a result in the result's layout, for which the backward was compiled."""
    gradient = gradients[index]
    if gradient.stride() == strides[index] and not gradient.is_neg() and not gradient.is_conj():
        return gradient
    laid = torch.empty_strided(gradient.shape, strides[index], dtype=gradient.dtype, device=gradient.device)
    return laid.copy_(gradient)


def _once_only(found: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients, of which no derivative can be taken (`create_graph=True`)."""
    dense = iter(_NoSecond.apply(len(inputs), *inputs, *(each for each in found if each is not None)))  # type: ignore[no-untyped-call]
    return [None if each is None else next(dense) for each in found]


class _NoSecond(Function):
    """Gives tensors back that depend on others, and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(
            "a compiled training step has no second derivative",
            hint="leave out `create_graph=True`; for gradient penalties, run this model eagerly",
        )
