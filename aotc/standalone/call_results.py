"""From what a library gave to the model's own result."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aotc.call_table.dispatch import DimReader
from aotc.call_table.strided_results import StridedForm, TensorLibrary, ViewLie, view_maker
from aotc.errors import CorruptError
from aotc.records import Output, ResultContainer, StridedView, Variant
from aotc.standalone.array_views import Give
from aotc.standalone.cpu_environment import open_cpu
from aotc.standalone.unsupported import member_names


class RunCall(NamedTuple):
    """A call whose library has run. `given` are the caller's own arguments, `leaves` tensors over them, `ran` those
    that the code ran with, `state` the module's, `outputs` the library's; `give` makes an array for the caller."""

    given: Sequence[Any]
    leaves: Sequence[Any]
    ran: Sequence[Any]
    state: Sequence[Any]
    outputs: Sequence[Any]
    give: Give


class ResultMaker:
    """Makes a variant's result. `names` has the places of the module's tensors."""

    def __init__(self, variant: Variant, names: Mapping[str, int], dims: DimReader) -> None:
        self._build = _builder(variant.output_tree)
        self._parts = [_part(output, names, dims) for output in variant.outputs]

    def __call__(self, call: RunCall) -> Any:
        return self._build([part(call) for part in self._parts])


def _part(output: Output, names: Mapping[str, int], dims: DimReader) -> Callable[[RunCall], Any]:
    index, leaf, axis, constant = output.index, output.leaf, output.axis, output.constant
    if output.view:
        return _view_part(output, names, dims)
    if index is not None:
        return lambda call: call.give(call.outputs[index])
    if leaf is not None and axis is not None:
        return lambda call: call.leaves[leaf].size(axis)
    if leaf is not None:  # a `default` stands for None
        return lambda call: call.give(call.leaves[leaf]) if call.given[leaf] is None else call.given[leaf]
    if output.state is None:
        return lambda call: constant
    place = names[output.state]
    return lambda call: call.give(call.state[place])


def _view_part(output: Output, names: Mapping[str, int], dims: DimReader) -> Callable[[RunCall], Any]:
    """Of an argument or of a tensor of the module, in the same memory."""

    def owners(call: RunCall) -> tuple[Any, Any]:
        if output.leaf is not None:
            return call.leaves[output.leaf], call.ran[output.leaf]
        own = call.state[names[str(output.state)]]
        return own, own

    if not isinstance(output.view, StridedView):
        return lambda call: call.give(owners(call)[0])
    make = view_maker(output, output.view, lambda leaves: dims.named(dims.read(leaves)), _library())
    return lambda call: call.give(make(*owners(call), call.leaves, call.ran))


@functools.cache
def _library() -> TensorLibrary:
    core = open_cpu()

    def form(tensor: Any) -> StridedForm:
        return StridedForm(tensor.shape, tensor.strides, tensor.itemsize)

    def itemsize(dtype: str) -> int:
        return int(core.placed(b"", 0, dtype, (0,), (1,)).itemsize)

    def viewed(tensor: Any, view: StridedView, lie: ViewLie) -> Any:
        try:
            return core.strided(tensor, lie.shape, lie.stride, lie.offset, view.dtype)
        except ValueError as error:
            raise CorruptError(
                f"the record's {view} does not fit a tensor of shape {list(tensor.shape)}: {error}"
            ) from error

    return TensorLibrary(form, itemsize, viewed, core.copied)


def _builder(tree: int | ResultContainer) -> Callable[[list[Any]], Any]:
    if isinstance(tree, int):
        return lambda outputs: outputs[tree]
    parts = [_builder(item) for item in tree.items]
    keys = member_names(tree) if tree.type not in ("tuple", "list", "dict", "collections.OrderedDict") else tree.keys

    def build(outputs: list[Any]) -> Any:
        items = [part(outputs) for part in parts]
        if tree.type == "list":
            return items
        if tree.type == "tuple":
            return tuple(items)
        kind = OrderedDict if tree.type == "collections.OrderedDict" else dict
        return kind(zip(keys or (), items, strict=True))

    return build
