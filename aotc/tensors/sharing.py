"""Which tensors of a call share memory, element by element: results with one another, with inputs, and with the module.

Two calls of one model share alike where a later write to any of these tensors shows in the same elements of the same
others. That is told by addresses: nothing is written.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from aotc.tensors.layouts import has_memory
from aotc.tensors.overlaps import overlapping

Sharing = dict[tuple[str, str], tuple[int, ...]]
"""By the names of two tensors that have elements in common, which elements these are."""

MOST_ELEMENTS = 1 << 10
"""Of a tensor whose elements are compared one by one; of a larger one, the first and the last along each axis."""


def sharing(results: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Sharing:
    """What each of the results shares with the other results and with `others`, of tensors whose memory can be looked
    at."""
    own = [(name, tensor) for name, tensor in results.items() if _is_plain(tensor)]
    named = [*own, *((name, tensor) for name, tensor in others.items() if _is_plain(tensor))]
    pairs = overlapping([tensor for _, tensor in named], range(len(own)))
    found: Sharing = {}
    for one, other in pairs:
        (first, tensor), (second, shared) = named[one], named[other]
        found[first, second] = _common_elements(tensor, shared)
    return found


def kept_in_place(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's tensors whose memory a call has not replaced. An attribute that forward assigns anew is another
    tensor in eager after each call; compiled code writes to the one that there is."""
    return {name: tensor for name, tensor in before.items() if name in after and _same_memory(tensor, after[name])}


def differences(eager: Sharing, compiled: Sharing, apart: Container[str] = ()) -> list[str]:
    """How memory sharing differs between the compiled code's tensors and eager's: a sentence for each pair, lost
    sharing first.

    Results need not lie in the memory of the tensors named in `apart` where eager's do: weights that are constants of
    the code, say.
    """
    lost = [
        f"{one} lies in the memory of {other} in eager, and not in compiled code: a later write to one does not show "
        "in the other"
        for one, other in sorted(eager.keys() - compiled.keys())
        if other not in apart
    ]
    gained = [
        f"{one} lies in the memory of {other}, unlike in eager: what is returned must be the caller's own"
        for one, other in sorted(compiled.keys() - eager.keys())
    ]
    moved = [
        f"{one} has other elements of {other} in compiled code than in eager"
        for one, other in sorted(eager.keys() & compiled.keys())
        if eager[one, other] != compiled[one, other]
    ]
    return lost + moved + gained


def module_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's tensors by what a message calls them."""
    return {f"the module's `{name}`": tensor for name, tensor in state.items()}


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor.detach()) is Tensor and not tensor.is_nested and has_memory(tensor)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one is other or (_is_plain(one) and _is_plain(other) and one.data_ptr() == other.data_ptr())


def _common_elements(one: Tensor, other: Tensor) -> tuple[int, ...]:
    """A digest of which elements of both have equal addresses; the addresses themselves do not count."""
    places = torch.cat([_addresses(one), _addresses(other)])
    # Number the places in the order in which they are met: gaps between elements make no difference.
    first_met: dict[int, int] = {}
    met = [first_met.setdefault(place, len(first_met)) for place in places.tolist()]
    return len(met), hash(tuple(met))


def _addresses(tensor: Tensor) -> Tensor:
    """Of each byte of the tensor's elements, in their order."""
    at: Any = torch.full((), tensor.data_ptr(), device="cpu")
    each = max(2, int((MOST_ELEMENTS / tensor.element_size()) ** (1 / max(tensor.dim(), 1))))
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        indices = torch.arange(size, device="cpu")
        if tensor.numel() > MOST_ELEMENTS and size > each:
            indices = torch.cat([indices[: each - each // 2], indices[size - each // 2 :]])
        shape = [1] * axis + [len(indices)] + [1] * (tensor.dim() - axis - 1)
        at = at + (indices * step * tensor.element_size()).view(shape)
    places: Tensor = at.reshape(-1, 1) + torch.arange(tensor.element_size(), device="cpu")
    return places.flatten()
