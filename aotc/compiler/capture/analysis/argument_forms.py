"""Find out whether a model behaves the same with tuples in place of lists and the reverse, with mappings in another
order of keys, and with an empty dict in place of None.

The graph is captured with the manifest's lists and tuples, with keys in sorted order, and with its None and `{}`. So
the model itself is run with the other forms, and its operators are compared (`operator_trace`). If all are equal, calls
may use any of these forms; otherwise a call in another form than the captured one is a miss.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.module_objects import KeptObjects
from aotc.compiler.capture.operator_trace import OperatorTrace
from aotc.manifest.inputs import InputTree
from aotc.models.calls import arguments_of, state_put_back
from aotc.reads.tensors import named_state, plain_state
from aotc.records import TUPLE, ConstantLeaf, Parameter, Signature
from aotc.tensors.rounding import uncompiled

MOST_KEYS = 24
"""Mappings with more keys are accepted in the captured order only; no other order is tried."""
ALL_ORDERS = 3
"""Up to this many keys, every order is tried; for more, orders that bring each key to each place and swap each pair."""

ContainerGroup = tuple[str, int]
"""Containers that are changed together: those of one parameter at one depth. `**kwargs` has the name ""."""
Order = tuple[int, ...]
_EXTRAS: ContainerGroup = ("", 0)


class Forms(NamedTuple):
    """Forms of arguments for which the model behaves the same; the fields of `aotc.records.Variant`."""

    any_sequence: bool = False
    any_order: bool = False
    empty_is_none: tuple[str, ...] = ()


def other_forms(
    module: nn.Module, signature: Signature, written: Collection[str], kept: KeptObjects, leaves: Sequence[Any]
) -> Forms:
    """Run the model on the example `leaves`, once for each form; not at all if its inputs are in no containers and no
    parameter that may be a dict is None or empty.

    `written` names the state that it writes to. Afterwards the state and the objects of `kept` are restored.
    """
    lengths, places, empty = _sequences(signature), _mappings(signature), _empty(module, signature)
    if not lengths and not places and not empty:
        return Forms()
    run = _Runs(module, signature, written, kept, leaves)
    built = run(_Form())
    if built is None:
        return Forms()
    others = [_Form(swapped_sequences={place}) for place in lengths]
    others += [_Form(swapped_sequences=lengths)] * (len(lengths) > 1)
    orders = [_Form(orders={place: order}) for place, count in places.items() for order in _orders(count)]
    alike = tuple(name for name in empty if run(_Form(swapped={name})) == built)
    return Forms(
        any_sequence=bool(lengths) and all(run(form) == built for form in others),
        any_order=bool(places) and max(places.values()) <= MOST_KEYS and all(run(form) == built for form in orders),
        empty_is_none=alike if len(alike) < 2 or run(_Form(swapped=alike)) == built else (),
    )


class _Form(NamedTuple):
    swapped_sequences: Collection[ContainerGroup] = ()
    """Where lists become tuples, and tuples lists."""
    orders: Mapping[ContainerGroup, Order] = {}
    swapped: Collection[str] = ()
    """The parameters that get an empty dict in place of None, and None in place of an empty dict."""


class _Runs:
    """The model's behaviour with its arguments in one form, as a comparable value; None where the model fails."""

    def __init__(
        self,
        module: nn.Module,
        signature: Signature,
        written: Collection[str],
        kept: KeptObjects,
        leaves: Sequence[Any],
    ) -> None:
        self._module, self._signature, self._written = module, signature, written
        self._kept, self._leaves = kept, leaves

    def __call__(self, form: _Form) -> object:
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = arguments_of(self._signature, leaves)
        names = [parameter.name for parameter in self._signature.parameters]
        args = tuple(_put(value, (name, 0), form) for name, value in zip(names, args, strict=False))
        kwargs = {name: _put(value, (name, 0), form) for name, value in kwargs.items()}
        left_out = set(form.swapped) - set(names[: len(args)]) - kwargs.keys()
        kwargs |= {name: {} for name in left_out}  # their default is None
        extras = _extras(self._signature)
        own = {name: value for name, value in kwargs.items() if name not in extras}
        try:
            with (
                state_put_back(self._module, self._written),
                uncompiled(),
                OperatorTrace(leaves, {**named_state(self._module), **plain_state(self._module)}) as trace,
            ):
                torch.manual_seed(0)
                result = self._module(
                    *args, **own, **{name: kwargs[name] for name in _ordered(extras, form.orders.get(_EXTRAS))}
                )
            return pytree.tree_structure(result), trace.digest(result)
        except Exception:  # whatever the model raises
            return None
        finally:
            self._kept.put_back()


def _put(value: Any, place: ContainerGroup, form: _Form) -> Any:
    """The value with its containers in the given form."""
    if place[0] in form.swapped:
        return {} if value is None else None
    inner = (place[0], place[1] + 1)
    if isinstance(value, list | tuple):
        items = [_put(item, inner, form) for item in value]
        return tuple(items) if isinstance(value, tuple) is not (place in form.swapped_sequences) else items
    if isinstance(value, dict):
        return {key: _put(value[key], inner, form) for key in _ordered(list(value), form.orders.get(place))}
    return value


def _sequences(signature: Signature) -> list[ContainerGroup]:
    return list(dict.fromkeys(place for place, tree in _containers(signature) if isinstance(tree, list)))


def _mappings(signature: Signature) -> dict[ContainerGroup, int]:
    """The places of mappings with two keys or more, with the number of keys of the largest."""
    places: dict[ContainerGroup, int] = {}
    for place, tree in _containers(signature):
        if isinstance(tree, Mapping) and len(tree) > 1:
            places[place] = max(places.get(place, 0), len(tree))
    extras = len(_extras(signature))
    return {**places, _EXTRAS: extras} if extras > 1 else places


def _empty(module: nn.Module, signature: Signature) -> list[str]:
    """The parameters that are an empty dict, or None where forward's annotation or the name says that it may be a dict.

    Not every None: a tensor that is left out is not an empty dict, and each form costs a run.
    """
    declared = inspect.signature(module.forward).parameters
    return [each.name for each in signature.parameters if each.tree == {} or _may_be_dict(each, signature, declared)]


def _may_be_dict(parameter: Parameter, signature: Signature, declared: Mapping[str, inspect.Parameter]) -> bool:
    leaf = signature.leaves[parameter.tree] if isinstance(parameter.tree, int) else None
    if not isinstance(leaf, ConstantLeaf) or leaf.value is not None:
        return False
    own = declared.get(parameter.name)
    annotation = str(own.annotation).lower() if own is not None else ""
    return parameter.name.endswith("kwargs") or "dict" in annotation or "mapping" in annotation


def _extras(signature: Signature) -> list[str]:
    """The arguments that go through `**kwargs` and have an order there."""
    return [each.name for each in signature.parameters if each.kind == "extra" and each.default is msgspec.UNSET]


def _containers(signature: Signature) -> Iterator[tuple[ContainerGroup, InputTree]]:
    for parameter in signature.parameters:
        yield from _within(parameter.tree, (parameter.name, 0))


def _within(tree: InputTree, place: ContainerGroup) -> Iterator[tuple[ContainerGroup, InputTree]]:
    if isinstance(tree, int):
        return
    yield place, tree
    for subtree in tree.values() if isinstance(tree, Mapping) else (part for part in tree if part != TUPLE):
        yield from _within(subtree, (place[0], place[1] + 1))


def _orders(count: int) -> Iterator[Order]:
    """Other orders of `count` keys; a mapping with fewer keys skips the indices beyond its own."""
    places = tuple(range(count))
    if count <= ALL_ORDERS:
        yield from itertools.islice(itertools.permutations(places), 1, None)
        return
    yield places[::-1]
    for step in range(1, count):
        yield (*places[step:], *places[:step])
        yield (*places[: step - 1], step, step - 1, *places[step + 1 :])


def _ordered(keys: Sequence[str], order: Order | None) -> list[str]:
    return list(keys) if order is None else [keys[index] for index in order if index < len(keys)]
