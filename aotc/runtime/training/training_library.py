"""A variant for training: its two libraries as one function of autograd.

What is saved for the backward is saved with autograd's own means, so hooks on saved tensors, gradient checkpointing and
the check of versions work as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from aotc.errors import BindError, CorruptError, GradientError, Issue
from aotc.reads.tensors import dtype_name, named_state
from aotc.records import Artifact, Saved, Variant, bucket_name
from aotc.runtime.libraries.library import calls_back, open_library
from aotc.runtime.padding.padded_tensors import take_crops
from aotc.runtime.training.results import Pass, RunBackward, separated
from aotc.store.layout.check_record import backward_issues
from aotc.tensors.layouts import has_memory

if TYPE_CHECKING:
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.runtime.libraries.library_protocol import Library
    from aotc.runtime.options import Graphs


_WITHOUT = "tensors require gradients that the backward was not compiled for"
_WITHOUT_HINT = (
    "call requires_grad_(False) of them; or let the factory's module have them require gradients, and build again"
)


def check_trainable(artifact: Artifact, module: nn.Module | None, graphs: Graphs | None) -> None:
    """Raises BindError where there are no parameters that could get gradients, or an option does not suit training."""
    if module is None:
        raise BindError(
            f"`{artifact.model}` was built to be trained, and no module was given whose parameters get the gradients",
            hint="aotc.load(ref, module)",
        )
    if graphs is not None and (graphs.use == "always" or graphs.outputs == "view"):
        raise BindError(
            f"`{artifact.model}` was built to be trained, and its halves are not captured as CUDA graphs",
            hint="leave out `graphs`: aotc.TrainingStep captures the whole step",
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
        given = {each.output for each in record.gradients} | {each.output for each in record.totals}
        expected = len(record.saved), len(given)
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
        self.differentiable = record.differentiable
        self.not_differentiable = tuple(set(range(record.results)) - set(record.differentiable))
        self.gradients: list[int | None] = [None] * len(variant.arguments)
        self._results_of: list[frozenset[int]] = [frozenset()] * len(variant.arguments)
        for each in record.gradients:
            self.gradients[each.argument] = each.output
            self._results_of[each.argument] = frozenset(each.results or record.differentiable)
        self._totals = {each.result: each for each in record.totals}
        depends = [sum(index in each.of for each in record.totals) for index in range(record.results)]
        self._order = sorted(record.differentiable, key=depends.__getitem__) if len(record.differentiable) > 1 else []
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
        inner = [each for each in arguments if each.grad_fn is not None]
        link = [_Link.apply(*inner)] if inner else []  # type: ignore[no-untyped-call]
        if not self._order:
            return list(_Step.apply(self, link, None, *arguments))  # type: ignore[no-untyped-call]
        own = Pass(self._totals, self.results)
        results = _Step.apply(self, link, own, *arguments)  # type: ignore[no-untyped-call]
        if not results[self._order[0]].requires_grad:
            return list(results)
        own.crops = take_crops()
        return separated(results, self._order, self._totals, own, _once_only)

    def runner(self, step: Any) -> RunBackward:
        return lambda gradients: _outputs(step, gradients)

    def outputs_for(self, missing: Collection[int]) -> list[int | None]:
        """For each argument the backward's output that is its gradient. As in eager, it is None for an argument on
        which only the results in `missing` depend: those that got no gradient."""
        if not missing:
            return self.gradients
        pairs = zip(self.gradients, self._results_of, strict=True)
        return [None if results.issubset(missing) else output for output, results in pairs]

    def _refuse(self, arguments: Sequence[Tensor]) -> None:
        names = [self._names[place] for place in self._frozen if arguments[place].requires_grad]
        raise GradientError(
            _WITHOUT,
            issues=tuple(Issue("requires a gradient, and did not at build", where=name) for name in names),
            hint=_WITHOUT_HINT,
        )


class _Form(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _form_of(tensor: Tensor) -> _Form:
    return _Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _form_of_gradient(result: Tensor) -> _Form:
    """A result's, without axes along which elements share memory, or gaps between them."""
    form = _form_of(result)
    return form if result.is_contiguous() else form._replace(strides=torch.empty_like(result, device="meta").stride())


_hooks_on_saved: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks


class _Step(Function):
    """The forward and the backward of one call."""

    @staticmethod
    def forward(
        ctx: Any, code: TrainingLibrary, link: list[Tensor], own: Pass | None, *arguments: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = code.forward.run(arguments)
        ctx.code, ctx.link, ctx.own = code, link, own
        kept = [_kept(each, arguments, outputs) for each in code.kept]
        ctx.save_for_backward(*kept)
        ctx.kept = None if _hooks_on_saved(False) is None else list(map(_form_of, kept))
        results = tuple(outputs[: code.results])
        ctx.forms = list(map(_form_of_gradient, results))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(results[index] for index in code.not_differentiable))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        code: TrainingLibrary = ctx.code
        outputs = ctx.own.take_outputs(gradients) if ctx.own is not None else None
        if outputs is None:
            outputs = _outputs(ctx, gradients, last=True)
        else:
            ctx.maybe_clear_saved_tensors()
        if ctx.own is not None:
            ctx.own.unpacked = None
        missing = [index for index in code.differentiable if gradients[index] is None]
        found = [None if output is None else outputs[output] for output in code.outputs_for(missing)]
        if missing:
            _quiet_hooks(ctx, found)
        return None, None, None, *(_once_only(ctx, found, gradients) if torch.is_grad_enabled() else found)


def _quiet_hooks(ctx: Any, found: Sequence[Tensor | None]) -> None:
    """Silence the hooks of parameters that get no gradient: autograd would call them with None."""
    for (node, _), gradient in zip(ctx.next_functions, found, strict=True):
        leaf = getattr(node, "variable", None) if gradient is None else None
        if leaf is not None and (leaf._backward_hooks or leaf._post_accumulate_grad_hooks):
            from aotc.runtime.training.hooks import only_with_gradients

            only_with_gradients(leaf)


def _outputs(ctx: Any, gradients: Sequence[Tensor | None], *, last: bool = False) -> list[Tensor]:
    """Run the backward's library. After the `last` run the saved tensors are freed, unless `retain_graph=True`."""
    code: TrainingLibrary = ctx.code
    with torch.no_grad():
        kept = ctx.saved_tensors if ctx.kept is None else _unpacked(ctx)
        given = [
            kept[code.places[each]]
            if each.gradient is None
            else _cotangent(gradients[each.gradient], ctx.forms[each.gradient])
            for each in code.saved
        ]
        del kept
        if last:
            ctx.maybe_clear_saved_tensors()
        return code.backward(given)


def _kept(source: Saved, arguments: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    return arguments[source.argument] if source.argument is not None else outputs[source.output or 0]


def _unpacked(ctx: Any) -> Sequence[Tensor]:
    """The results of hooks on saved tensors. Each runs once in a pass: a checkpoint computes nothing twice."""
    if ctx.own is None:
        return tuple(map(_from_hook, ctx.saved_tensors, ctx.kept))
    if ctx.own.unpacked is None:
        ctx.own.unpacked = tuple(map(_from_hook, ctx.saved_tensors, ctx.kept))
        torch.autograd.Variable._execution_engine.queue_callback(ctx.own.forget_unpacked)
    kept: Sequence[Tensor] = ctx.own.unpacked
    return kept


def _from_hook(tensor: Tensor, form: _Form) -> Tensor:
    """The result of a hook on saved tensors. Raises GradientError for another dtype, shape or device than saved."""
    given = f"{dtype_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
    saved = f"{dtype_name(form.dtype)} {list(form.shape)} on {form.device}"
    if given != saved:
        raise GradientError(
            f"a hook on saved tensors gave back {given}, and was given {saved}",
            hint="let the hook restore dtype, shape and device",
        )
    return _laid_out(tensor, form)


def _cotangent(gradient: Tensor | None, form: _Form) -> Tensor:
    """The gradient of a result, as the backward takes it: zeros where none came."""
    if gradient is not None:
        return _laid_out(gradient, form)
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=form.device).zero_()


def _laid_out(tensor: Tensor, form: _Form) -> Tensor:
    """The tensor in memory, with the strides for which the backward was compiled."""
    if has_memory(tensor) and tensor.stride() == form.strides and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    shape = [1 if stride == 0 else size for size, stride in zip(form.shape, form.strides, strict=True)]
    laid = torch.empty_strided(shape, form.strides, dtype=form.dtype, device=form.device)
    try:
        return laid.copy_(dense[tuple(map(slice, shape))]).expand(form.shape)
    except RuntimeError as error:
        raise GradientError(
            f"a gradient has no memory of its own, and compiled code cannot take it: {error}",
            hint="compute one gradient at a time, without torch.func, `is_grads_batched=True` or `vectorize=True`; or "
            "call this model in eager",
        ) from error


def _once_only(step: Any, found: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a backward, whose own derivative raises an error (with `create_graph=True`). They depend on the
    leaves, on the links of inputs that were computed, and on the gradients of the results."""
    leaves = (getattr(node, "variable", None) for node, _ in step.next_functions)
    sources = [each for each in (*leaves, *step.link, *gradients) if each is not None]
    dense = iter(_NoSecond.apply(len(sources), *sources, *(each for each in found if each is not None)))  # type: ignore[no-untyped-call]
    return [None if each is None else next(dense) for each in found]


class _NoSecond(Function):
    """Returns tensors that depend on others, and whose derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(
            "a compiled training step has no second derivative",
            hint="leave out `create_graph=True`; for gradient penalties, run this model eagerly",
        )


class _Link(Function):
    """An empty tensor with a `grad_fn` that depends on other tensors, and keeps none of them in memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(None for _ in ctx.next_functions)
