"""The errors of graphs that cannot be lifted: one for each reason, with the line of forward and a hint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from aotc.compiler.explain_failure import WRITE_IN_FUNC, line_named
from aotc.errors import BuildError
from aotc.reads.tensors import dtype_name


def unregistered(node: fx.Node, tensor: Tensor) -> BuildError:
    return _refused(
        f"forward uses a weight of shape {list(tensor.shape)} that is not registered with the module: no checkpoint "
        "holds it, and it would be a constant of the compiled code",
        hint="register the parameter, or the module that it belongs to: assign it to an attribute, or put it into an "
        "nn.ModuleList or nn.ParameterList. For a tensor that never changes, use a buffer or a detached tensor",
        source=line_of_use(node),
    )


def unregistered_adapter_scale(node: fx.Node) -> BuildError:
    return _refused(
        "the scale of an adapter is a tensor that its layer does not register: compiled code would take it for a "
        "constant",
        hint="let the factory, and the service before aotc.load, call aotc.adapters.prepare(module)",
        source=line_of_use(node),
    )


def reached_outside(name: str, node: fx.Node) -> BuildError:
    return _refused(
        f"the region uses the model's `{name}`, which is not registered with the region: compiled code gets only the "
        "tensors of each instance, by their names in it",
        hint="take the module around both as the region, or assign the tensor to an attribute of the region",
        source=line_of_use(node),
    )


def without_values(node: fx.Node) -> BuildError:
    return _refused(
        "torch.export took a tensor that forward computes for a constant, which has no values",
        hint=WRITE_IN_FUNC,
        source=line_of_use(node),
    )


def another_view(name: str, node: fx.Node) -> BuildError:
    return _refused(
        f"forward uses a tensor that shares memory with the module's `{name}`, a view that compiled code cannot take",
        hint="create the view in forward, from the parameter or buffer itself",
        source=line_of_use(node),
    )


def branch_returns_view(value: fx.Node) -> BuildError:
    return _refused(
        "a branch of `torch.cond` returns two tensors that share memory, which torch's compiler does not support",
        hint="return one of them, and make the view behind `torch.cond`; or return a copy, as `z[1:].clone()`",
        source=line_named(value.meta.get("stack_trace") or ""),
    )


def _refused(message: str, *, hint: str, source: str) -> BuildError:
    return BuildError(message, hint=hint, stage="export", source=source)


def line_of_use(node: fx.Node) -> str:
    """The line of the first user, or of the next node that has one: a higher-order operator has none."""
    user = next(iter(node.users))
    while user.op != "output" and not user.meta.get("stack_trace"):
        user = user.next
    return line_named(user.meta.get("stack_trace") or "")


def kind_of(node: fx.Node) -> tuple[torch.dtype, list[Any]]:
    tensor = node.meta["val"]
    return tensor.dtype, list(tensor.shape)


def becomes_another(name: str | None, buffer: fx.Node, assigned: fx.Node) -> BuildError:
    old, new = (f"{dtype_name(dtype)} {shape}" for dtype, shape in map(kind_of, (buffer, assigned)))
    return _refused(
        f"forward assigns a tensor of {new} to the buffer `{name}` of {old}: compiled code writes to the existing "
        "buffer, whose dtype and shape cannot change",
        hint="create the buffer in its final size, and write to a part of it; or let forward take and return it",
        source=line_named(assigned.meta.get("stack_trace") or ""),
    )


def writes_to_windows(node: fx.Node) -> BuildError:
    return _refused(
        "forward writes to windows of `unfold` that do not cover the whole tensor: torch's compiler would put zeros in "
        "the other elements",
        hint="unfold a slice that the windows cover, and write there: x[:, : n // size * size].unfold(1, size, size)",
        source=line_named(node.meta.get("stack_trace") or ""),
    )


def writes_to_expanded(node: fx.Node) -> BuildError:
    return _refused(
        "forward writes to an expanded tensor, whose elements share memory: torch's compiler would add them up",
        hint="write to the tensor before it is expanded, or to a copy: x.expand(…).clone()",
        source=line_named(node.meta.get("stack_trace") or ""),
    )


def view_of_written(whose: str, view: fx.Node) -> BuildError:
    return _refused(
        f"forward writes to {whose} and returns a view of it whose sizes or strides no expression over the dims gives: "
        "the caller would get a copy, in which later writes do not show",
        hint="return a copy, `….clone()`, or let the caller take the view",
        source=line_named(view.meta.get("stack_trace") or ""),
    )


def returns_frozen(name: str, value: fx.Node) -> BuildError:
    return _refused(
        f"forward returns the module's `{name}`, or a view of it; frozen weights are constants of the compiled code: "
        "the caller would get a copy, in which later writes do not show",
        hint="return a copy, `….clone()`, or use `weights: live`",
        source=line_named(value.meta.get("stack_trace") or ""),
    )


def returns_constant(named: str, value: fx.Node) -> BuildError:
    shape = list(map(str, value.meta["val"].shape))
    return _refused(
        f"forward returns {named}a tensor of shape [{', '.join(shape)}] that is kept from call to call and is not a "
        "buffer, or a view of it: it is a constant of the compiled code, and the caller would get a copy, in which "
        "later writes do not show",
        hint="return a copy, `….clone()`; or make it a buffer: register_buffer(name, tensor, persistent=False)",
        source=line_named(value.meta.get("stack_trace") or ""),
    )
