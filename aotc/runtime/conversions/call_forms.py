"""The form of a call that is not simply run: of a miss, of one of several forms, of one whose inputs are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aotc.call_table.bind import DoesNotBind, StructureMismatch
from aotc.call_table.refusals import equal_constant
from aotc.runtime.guards import PLAIN_TENSORS, Guards, transform

if TYPE_CHECKING:
    from aotc.call_table.dispatch import Shape
    from aotc.runtime.call import CompiledCall


def have_sizes(guards: Guards, leaves: Sequence[Any]) -> bool:
    """Whether the sizes of these leaves can be read at all: tensors of the signature's numbers of axes."""
    return not any(
        type(leaves[index]) not in PLAIN_TENSORS or leaves[index].is_nested or leaves[index].dim() != len(leaf.shape)
        for index, leaf, *_ in guards.tensors
    )


def has_form(call: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call binds, and has the tensors and constants that were compiled for, of any sizes."""
    try:
        return have_form(call._guards, call._bind(args, kwargs))
    except (DoesNotBind, StructureMismatch):
        return False


def have_form(guards: Guards, leaves: Sequence[Any]) -> bool:
    """Whether these are tensors of the dtypes and numbers of axes that were compiled for, and the constants."""
    return all(
        isinstance(leaves[index], Tensor) and leaves[index].dtype is dtype and leaves[index].dim() == len(leaf.shape)
        for index, leaf, dtype, _ in guards.tensors
    ) and all(equal_constant(leaves[index], leaf.value) for index, leaf in guards.constants)


def form_of(guards: Guards, leaves: Sequence[Any]) -> object:
    """The kind of a miss, as a hashable value without values of tensors or constants."""
    forms: list[object] = [torch.is_grad_enabled(), guards.ambient_holds(), transform() is None]
    forms.append(guards.module is None or guards.module.training)
    for leaf in leaves:
        plain = type(leaf) in PLAIN_TENSORS and not leaf.is_nested
        dense = plain and leaf.layout is torch.strided
        forms += (type(leaf), leaf.dtype, leaf.shape, leaf.device) if plain else (type(leaf),)
        forms += (leaf.stride(), leaf.requires_grad, leaf.is_neg(), leaf.is_conj()) if dense else ()
    return tuple(forms)


def in_compiled_layout(guards: Guards, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> list[Any] | None:
    """The leaves with every tensor in the compiled layout, if that is all that was wrong with them, else None."""
    if not guards.copies or guards.from_storage:  # copies have storages of their own
        return None
    copies = list(leaves)
    for index, _, _, memory_format in guards.tensors:
        tensor = copies[index]
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return None
        try:
            copies[index] = tensor.resolve_conj().resolve_neg().contiguous(memory_format=memory_format)
        except RuntimeError:
            return None
    if not guards.hold(copies, shapes):
        return None
    if guards.mutated:
        from aotc.runtime.aliases import input_alias_issues

        if input_alias_issues(guards, leaves):
            return None  # the copies of tensors that share memory do not
    return copies
