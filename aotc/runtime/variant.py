"""One variant with its open library, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import increment_version

from aotc.errors import CorruptError, LibraryError
from aotc.records import Output, ResultContainer, StridedView, Variant
from aotc.runtime.state.call_state import State

if TYPE_CHECKING:
    from aotc.call_table.dispatch import DimReader, Plan
    from aotc.runtime.libraries.library_protocol import Library

Launch = Callable[[list[Any], State], list[Tensor]]
"""From leaves at the bucket's sizes and the module's tensors to the library's outputs."""


class Attached:
    """Takes a call's leaves and the module's tensors; pads, launches, crops, and gives the model's own outputs."""

    def __init__(
        self,
        variant: Variant,
        launch: Launch,
        state_names: Sequence[str],
        *,
        plain: bool = False,
        dims: DimReader | None = None,
    ) -> None:
        """`plain`: where the class of a result is not imported, give a dict or a tuple. `dims` are the call's."""
        self.variant = variant
        self.launch = self.direct = launch
        self.has_run = False
        """Whether its kernels are loaded: the first run loads them, which a capture cannot hold."""
        positions = {name: position for position, name in enumerate(state_names)}
        self._written = [positions[name] for name in variant.mutated_state if name in positions]
        self._assemble = make_assembler(variant, positions, plain=plain, dims=dims)

    def run(self, leaves: list[Any], state: State, plan: Plan, given: list[Any], launch: Launch | None = None) -> Any:
        """`given` are the caller's own leaves, of which `leaves` may be views or copies in the compiled layout.
        `launch` is another one than the variant's own."""
        ran = leaves
        if plan.pads:
            from aotc.runtime.padding.padded_tensors import apply_pad

            ran = list(leaves)
            for pad in plan.pads:
                ran[pad.leaf] = apply_pad(ran[pad.leaf], pad)
        if self._written or self.variant.mutated_leaves:
            self._mark_written(state, given)
        if plan.crops:
            from aotc.runtime.padding.padded_tensors import cropped

            launch = cropped(launch or self.launch, plan.crops)
        raw = (launch or self.launch)(ran, state)
        self.has_run = True
        if ran is not given and self.variant.mutated_leaves:
            from aotc.runtime.conversions.written import write_back

            write_back(ran, given, self.variant.mutated_leaves)
        try:
            return self._assemble(raw, given, state, ran)
        except IndexError as error:
            raise LibraryError(f"the library gave {len(raw)} outputs, the record names more") from error

    def _mark_written(self, state: State, given: list[Any]) -> None:
        """Let autograd know of what compiled code writes to, before it does: a backward pass that needs the old values
        raises. A call that fails may have written, too."""
        written = [given[index] for index in self.variant.mutated_leaves]
        increment_version([*written, *(state[position] for position in self._written)])


def direct_launch(variant: Variant, library: Library, state_names: Sequence[str], leaf_count: int) -> Launch:
    """Launch a library by calling it."""
    position_of = {name: position for position, name in enumerate(state_names)}
    positions = [
        argument.leaf if argument.leaf is not None else leaf_count + position_of[str(argument.state)]
        for argument in variant.arguments
    ]
    run = library.run
    if len(positions) < 2:
        return lambda leaves, state: run([(leaves + state)[position] for position in positions])
    take = itemgetter(*positions)
    return lambda leaves, state: run(take(leaves + state))


# -- from outputs to the result ----------------------------------------------------------------------------------------

Assemble = Callable[..., Any]
Get = Callable[[list[Tensor], Sequence[Any], Sequence[Tensor], Sequence[Any]], Any]


def make_assembler(
    variant: Variant, state_index: Mapping[str, int], *, plain: bool = False, dims: DimReader | None = None
) -> Assemble:
    """A function `(library outputs, leaves, state, ran) -> the model's own structure`. `ran` are the leaves with which
    the library ran, where they are others than the caller's.

    An output that is an input or a tensor of the module is given back as that very object, a view of one as a view of
    that very object, and constants as they are, as eager does. With `plain`, containers whose class is not imported
    become dicts and tuples. Raises CorruptError for a tree that cannot be read.
    """
    outputs = variant.outputs
    build = result_builder(variant.output_tree, len(outputs), plain=plain)
    in_order = all(output.index == position for position, output in enumerate(outputs))
    getters = [_getter(output, state_index, dims) for output in outputs]

    def assemble(
        raw: list[Tensor], leaves: Sequence[Any], state: Sequence[Tensor], ran: Sequence[Any] | None = None
    ) -> Any:
        if not in_order:
            return build([get(raw, leaves, state, ran or leaves) for get in getters])
        if len(raw) != len(getters):
            raise LibraryError(f"the library gave {len(raw)} outputs, the record names {len(getters)}")
        return build(raw)

    return assemble


def result_builder(tree: int | ResultContainer, count: int, *, plain: bool) -> Callable[[list[Any]], Any]:
    """A function from flat outputs to the structure. Raises CorruptError where it does not hold each of them once."""
    used = list(_positions(tree))
    if sorted(used) != list(range(count)):
        raise CorruptError(f"the record names {count} outputs, its structure has the outputs {used[:20]}")
    if isinstance(tree, ResultContainer) and tree.items == tuple(range(count)):
        return _maker(tree, plain)
    return _part_builder(tree, plain)


def _positions(tree: int | ResultContainer) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for item in tree.items:
            yield from _positions(item)


def _part_builder(tree: int | ResultContainer, plain: bool) -> Callable[[list[Any]], Any]:
    if isinstance(tree, int):
        return itemgetter(tree)
    make = _maker(tree, plain)
    parts = [_part_builder(item, plain) for item in tree.items]
    return lambda outputs: make([part(outputs) for part in parts])


def _maker(tree: ResultContainer, plain: bool) -> Callable[[Sequence[Any]], Any]:
    """A function from a container's items to the container."""
    if tree.type == "tuple":
        return tuple
    if tree.type == "list":
        return list
    if tree.type == "dict" and len(set(tree.keys)) == len(tree.keys) == len(tree.items):
        keys = tree.keys
        return lambda items: dict(zip(keys, items, strict=True))
    from aotc.runtime.conversions.result_containers import maker

    return maker(tree, plain=plain)


def _getter(output: Output, state_index: Mapping[str, int], dims: DimReader | None) -> Get:
    index, leaf, axis, constant = output.index, output.leaf, output.axis, output.constant
    if output.view:
        given = _getter(Output(leaf=leaf, state=output.state), state_index, dims)
        if not isinstance(output.view, StridedView):
            return lambda raw, leaves, tensors, ran: given(raw, leaves, tensors, ran).detach()
        from aotc.tensors.strided_views import make_view

        view = make_view(output, output.view, lambda leaves: dims.named(dims.read(leaves)) if dims else {})
        return lambda raw, leaves, tensors, ran: view(
            given(raw, leaves, tensors, ran), given(raw, ran, tensors, ran), leaves, ran
        )
    if index is not None:
        return lambda raw, leaves, tensors, ran: raw[index]
    if leaf is not None and axis is not None:
        return lambda raw, leaves, tensors, ran: leaves[leaf].shape[axis]
    if leaf is not None:
        return lambda raw, leaves, tensors, ran: leaves[leaf]
    if output.state is not None:
        position = state_index[output.state]
        return lambda raw, leaves, tensors, ran: tensors[position]
    return lambda raw, leaves, tensors, ran: constant
