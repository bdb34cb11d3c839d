"""Caches of keys and values as results: those of transformers, taken apart into plain data and tensors, and made again.

Such a cache is an object with layers, which are objects. torch's pytree does not know them. What they hold is a tensor,
a number, a text, a container of these, a dtype, a device or a class of layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.tensors.result_classes import find_class

PREFIX = "cache:"
"""What precedes the class's name in a record: a service may have registered the class with pytree by another rule."""

Context = list[list[Any]]
"""The names of the items, and `[name, kind, text]` of each member that is a dtype, a device or a class."""


_ITEMS = Tensor, bool, int, float, str, torch.SymInt, list, tuple, dict


def is_cache(kind: type) -> bool:
    """Whether the class is a cache of transformers, a layer of one, or derived from these."""
    return not issubclass(kind, nn.Module | dict) and any(
        base.__module__.partition(".")[0] == "transformers"
        and base.__name__.endswith(("Cache", "CacheLayerMixin", "DummyLayer"))
        for base in kind.__mro__
    )


def register_caches(module: nn.Module) -> None:
    """Let torch's pytree take apart the caches that the module may return, in this process."""
    names = {"transformers.cache_utils", *(type(part).__module__ for part in module.modules())}
    homes = [vars(sys.modules[name]) for name in names if name in sys.modules]
    for kind in _with_subclasses(kind for home in homes for kind in home.values() if isinstance(kind, type)):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                take_apart,
                partial(make_cache, kind),
                serialized_type_name=f"{PREFIX}{kind.__module__}.{kind.__qualname__}",
                flatten_with_keys_fn=_take_apart_with_names,
            )


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found: set[type] = set()
    left = [kind for kind in kinds if is_cache(kind)]
    while left:
        if (kind := left.pop()) not in found:
            found.add(kind)
            left += kind.__subclasses__()
    return found


def take_apart(cache: Any) -> tuple[list[Any], Context]:
    """What a cache or a layer holds, and the context with which `make_cache` makes it again. Raises TypeError where
    a record could not hold it."""
    items: dict[str, Any] = {}
    others: list[Any] = []
    for name, value in vars(cache).items():
        if isinstance(value, torch.dtype):
            others.append([name, "dtype", str(value).removeprefix("torch.")])
        elif isinstance(value, torch.device):
            others.append([name, "device", value.type])
        elif isinstance(value, type):
            others.append([name, "class", f"{value.__module__}.{value.__qualname__}"])
        elif value is None or isinstance(value, _ITEMS) or is_cache(type(value)):
            items[name] = value
        else:
            what = f"a {type(cache).__name__} is returned whose `{name}` is a {type(value).__name__}"
            raise TypeError(f"{what}; no record can hold it")
    return list(items.values()), [list(items), others]


def _take_apart_with_names(cache: Any) -> tuple[list[tuple[Any, Any]], Context]:
    items, context = take_apart(cache)
    return [(pytree.GetAttrKey(name), item) for name, item in zip(context[0], items, strict=True)], context


def make_cache(kind: type, items: Iterable[Any], context: Context) -> Any:
    """The cache that was taken apart. Its device is that of its tensors; no code of the class runs."""
    names, others = context
    made: Any = object.__new__(kind)
    members = vars(made)
    members.update(zip(names, items, strict=True))
    for name, what, text in others:
        members[name] = _other_member(what, text, members.values())
    return made


def _other_member(what: str, text: str, members: Iterable[Any]) -> Any:
    if what == "dtype":
        return getattr(torch, text)
    if what == "device":
        return next((tensor.device for tensor in _tensors(members)), torch.device(text))
    if (found := find_cache(text)) is None:
        raise LookupError(f"no class of layers is called {text}")
    return found


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def find_cache(name: str) -> type | None:
    """The class of caches or of their layers that has that name, in a module that is imported already."""
    return find_class(name, is_cache)
