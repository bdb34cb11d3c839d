"""What `uses.py` does around a step: before the load, after it, around each call and between the steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fuzzing.used import Run
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


def checkpointing(run: Run) -> None:
    # torch's own recursion does not end where forward returns a parameter, as `same` does.
    reentrant = run.random.random() < 0.2 and run.model.spec.name != "same"

    def wrap(call: Any) -> Any:
        def checkpointed(**batch: Any) -> Any:
            leaves, tree = pytree.tree_flatten(batch)
            return checkpoint(
                lambda *given: call(**pytree.tree_unflatten(given, tree)), *leaves, use_reentrant=reentrant
            )

        return checkpointed

    run.around.append(wrap)


def _other_strides(tensor: Tensor) -> Tensor:
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copied.copy_(tensor)


def _transposed_copy(tensor: Tensor) -> Tensor:
    return (
        tensor.detach().permute(*range(tensor.dim() - 1, -1, -1)).contiguous().permute(*range(tensor.dim() - 1, -1, -1))
    )


PACKINGS: tuple[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]], ...] = (
    (lambda tensor: tensor, lambda packed: packed),
    (lambda tensor: tensor.detach().clone(), lambda packed: packed),
    (lambda tensor: tensor.detach().numpy(force=True).copy(), torch.from_numpy),
    (_other_strides, lambda packed: packed),
    (_transposed_copy, lambda packed: packed),
    (lambda tensor: tensor.detach().to(torch.float64), lambda packed: packed),
)


def saved_tensor_hooks(run: Run) -> None:
    kind = run.random.randrange(len(PACKINGS) + 2)

    def wrap(call: Any) -> Any:
        def hooked(**batch: Any) -> Any:
            graph = torch.autograd.graph
            if kind < len(PACKINGS):
                hooks: Any = graph.saved_tensors_hooks(*PACKINGS[kind])
            else:
                hooks = graph.save_on_cpu() if kind == len(PACKINGS) else graph.disable_saved_tensors_hooks("disabled")
            with hooks:
                return call(**batch)

        return hooked

    run.around.append(wrap)


def hooks_on_inputs(run: Run) -> None:
    """Inputs that are results of other operators, whose gradient is changed by hooks."""

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        value = value * 1.0
        value.register_hook(lambda gradient: gradient * 0.5)
        return value

    run.around.append(lambda call: lambda **batch: call(**pytree.tree_map(changed, batch)))


def hooks_on_results(run: Run) -> None:
    def hooked(place: int, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return

        def seen(gradient: Tensor) -> None:
            if not torch._C._functorch.is_legacy_batchedtensor(gradient):
                run.note(f"gradient of result {place} of {tuple(value.shape)}", gradient)

        value.register_hook(lambda gradient: gradient * 2)
        value.register_hook(seen)

    def wrap(call: Any) -> Any:
        def called(**batch: Any) -> Any:
            result = call(**batch)
            for place, value in enumerate(pytree.tree_leaves(result)):
                hooked(place, value)
            return result

        return called

    run.around.append(wrap)


def hooks_on_parameters(run: Run) -> None:
    def halved(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def register() -> None:
        for each in run.some(run.parameters()):
            if run.random.random() < 0.5:
                each.register_hook(lambda gradient: gradient * 3)
            else:
                each.register_post_accumulate_grad_hook(halved)

    if run.random.random() < 0.5:
        run.later.append(register)
    else:
        register()


def _doubled(value: Any) -> Any:
    return pytree.tree_map(
        lambda each: each * 2 if isinstance(each, Tensor) and each.is_floating_point() else each, value
    )


MODULE_HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_hook": lambda module, args, result: _doubled(result),
    "register_forward_pre_hook": lambda module, args: None,
    "register_full_backward_hook": lambda module, inputs, results: _doubled(inputs),
    "register_full_backward_pre_hook": lambda module, results: _doubled(results),
}


def hooks_on_modules(run: Run) -> None:
    """On what is called, or on a part of the module."""
    name, of_part = run.random.choice([*MODULE_HOOKS]), run.random.random() < 0.5
    part = run.random.choice([name for name, _ in run.module.named_modules() if name] or [""])
    run.later.append(lambda: getattr(run.module.get_submodule(part) if of_part else run.call, name)(MODULE_HOOKS[name]))


def freezing(run: Run) -> None:
    """Parameters that are frozen before the load, after it or later, and may be thawed."""

    def freeze() -> None:
        for each in run.some(run.parameters()):
            each.requires_grad_(False)
            if run.random.random() < 0.5:
                run.between.append(partial(each.requires_grad_, True))

    run.random.choice((run.later.append, run.between.append, lambda act: act()))(freeze)


def earlier_gradients(run: Run) -> None:
    """Gradients to which those of the step are added: zeros of zero_grad(set_to_none=False), or of another step."""

    def begin() -> None:
        run.loss(run.forward()).backward()
        if run.random.random() < 0.5:
            run.module.zero_grad(set_to_none=run.random.random() < 0.3)

    run.later.append(begin)


def tied_weights(run: Run) -> None:
    """Two weights of the module become one."""
    places = [
        (module, name, each)
        for module in run.module.modules()
        for name, each in module.named_parameters(recurse=False)
        if each.dim()
    ]
    pairs = [
        (one, other)
        for place, one in enumerate(places)
        for other in places[place + 1 :]
        if one[2].shape == other[2].shape and one[2].requires_grad == other[2].requires_grad
    ]
    if pairs:
        one, other = run.random.choice(pairs)
        setattr(other[0], other[1], one[2])


def anomaly_mode(run: Run) -> None:
    run.later.append(lambda: torch.autograd.set_detect_anomaly(True))


def call_under_no_grad(run: Run) -> None:
    def look() -> None:
        with torch.no_grad():
            run.forward()

    run.later.append(look)


def other_autocast(run: Run) -> None:
    """The call within an autocast that the build did not have."""

    def wrap(call: Any) -> Any:
        def cast(**batch: Any) -> Any:
            with torch.autocast("cpu", torch.float16):
                return call(**batch)

        return cast

    if not run.wide:  # eager in float64 casts nothing: only a refusal is right, and what eager gives is not looked at
        run.around.append(wrap)


SETUPS: tuple[Callable[[Run], None], ...] = (
    *(checkpointing, saved_tensor_hooks, hooks_on_inputs, hooks_on_results, hooks_on_parameters, hooks_on_modules),
    *(freezing, earlier_gradients, tied_weights, anomaly_mode, call_under_no_grad, other_autocast),
)
