"""Find tensors of a module, and values of a graph, that share memory."""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from aotc.tensors.layouts import has_memory
from aotc.tensors.overlaps import extent, overlapping

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Types of tensors that hold their own elements: a subclass may hold them in other tensors."""


def sharing_memory(state: Mapping[str, Tensor], tensor: Tensor) -> str | None:
    """The name of a tensor that shares elements with `tensor`; preferably of one with the same address and shape."""
    sharing = [
        name
        for name, each in state.items()
        if type(each) in PLAIN and has_memory(each) and each.device == tensor.device and share_elements(each, tensor)
    ]
    alike = [
        name for name in sharing if (state[name].data_ptr(), state[name].shape) == (tensor.data_ptr(), tensor.shape)
    ]
    return next(iter(alike or sharing), None)


def share_elements(one: Tensor, other: Tensor) -> bool:
    (first, end), (other_first, other_end) = extent(one), extent(other)
    if end <= other_first or other_end <= first:
        return False
    if (has_no_gaps(one) and first <= other_first) or (has_no_gaps(other) and other_first <= first):
        return True
    return any(overlapping([one, other], {0}))  # by a mask of all their bytes


def has_no_gaps(tensor: Tensor) -> bool:
    first, end = extent(tensor)
    return end - first == tensor.numel() * tensor.element_size()


def is_parameters(tensor: Tensor) -> bool:
    """Whether the tensor is in a parameter's memory: export records an unregistered parameter as a plain tensor."""
    memory = tensor.untyped_storage().data_ptr()
    parameters = (each for each in gc.get_objects() if issubclass(type(each), nn.Parameter))
    return any(
        type(each) in PLAIN and has_memory(each) and each.untyped_storage().data_ptr() == memory for each in parameters
    )


def base_of(value: Any) -> fx.Node | None:
    """The placeholder or constant behind a value, which is this node or a view of it."""
    *_, last = (None, *views_of(value))
    return last if last is not None and last.op in ("placeholder", "get_attr") else None


def views_of(value: Any) -> Iterator[fx.Node]:
    """A value, the value of which it is a view, and so on: values in the same storage. By storage, since schemas do not
    suffice: those of `atleast_1d` and `type_as` have no alias, and `to` gives a view or a copy. (`torch.tensor([1, 2])`
    in forward is a copy of a constant, which export records as the constant itself.)"""
    from torch._inductor.fx_utils import get_node_storage as storage_of

    while isinstance(value, fx.Node):
        yield value
        if value.target is torch.ops.aten.lift_fresh_copy.default:
            return
        storage = storage_of(value)
        source = value.args[0] if value.target is operator.getitem else value
        given = source.all_input_nodes if isinstance(source, fx.Node) and storage is not None else []
        value = next((each for each in given if storage_of(each) == storage), None)


def share_storage(one: Any, other: Any) -> bool:
    """Whether two values of a graph are tensors in one storage."""
    from torch._inductor.fx_utils import get_node_storage as storage_of

    storages = [storage_of(each) if isinstance(each, fx.Node) else None for each in (one, other)]
    return storages[0] is not None and storages[0] == storages[1]


def leaves_gaps(view: fx.Node) -> bool:
    """Whether the windows of `unfold` leave out some elements, or may at some size of a range: torch's compiler
    rebuilds the whole tensor from written windows, and puts zeros there."""
    if view.target is not torch.ops.aten.unfold.default:
        return False
    whole, axis, size, step = cast("tuple[fx.Node, int, int, int]", view.args)
    length = whole.meta["val"].shape[axis]
    return step > 1 and (step > size or not isinstance(length, int) or (length - size) % step > 0)


def is_expanded(value: fx.Node) -> bool:
    """Whether several elements share one place in memory, as after `expand`, or may at some size of a range."""
    tensor = value.meta.get("val")
    return isinstance(tensor, Tensor) and any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def has_elements(value: fx.Node) -> bool:
    """Whether a value has memory at all; a size of a range counts as one above 0."""
    tensor = value.meta.get("val")
    return isinstance(tensor, Tensor) and not any(isinstance(size, int) and size == 0 for size in tensor.shape)


def itself(value: Any) -> Any:
    """The node whose tensor an in-place operator returns: `x` for `x.add_(1)`, if shape and strides are the same."""
    while (
        isinstance(value, fx.Node) and value.op == "call_function" and isinstance(value.target, torch._ops.OpOverload)
    ):
        schema = value.target._schema
        aliases = [item.alias_info for item in (*schema.arguments[:1], *schema.returns)]
        if len(aliases) != 2 or not all(alias is not None and alias.is_write for alias in aliases):
            break
        given = value.args[0]
        if not isinstance(given, fx.Node) or form_of(given) != form_of(value):
            break
        value = given
    return value


def form_of(node: fx.Node) -> tuple[str, str] | None:
    """Shape and strides as text: comparing symbolic sizes would make torch specialise them."""
    tensor = node.meta.get("val")
    return (str(tensor.shape), str(tensor.stride())) if isinstance(tensor, Tensor) else None
