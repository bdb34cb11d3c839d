"""Convert the structure of a model's result for the record: from torch's TreeSpec to plain data."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from torch.utils import _pytree as pytree

from aotc.errors import BuildError
from aotc.records import ResultContainer
from aotc.tensors.result_classes import find_class, is_positional

_NAMES: dict[Any, str] = {
    tuple: "tuple",
    list: "list",
    dict: "dict",
    OrderedDict: "collections.OrderedDict",
    defaultdict: "collections.defaultdict",
    deque: "collections.deque",
}


def result_tree(spec: pytree.TreeSpec) -> int | ResultContainer:
    """The tree of a result. Raises BuildError for a container that a record cannot hold, such as a local class."""
    return _tree(spec, count())


def _tree(spec: pytree.TreeSpec, positions: Iterator[int]) -> int | ResultContainer:
    if spec.is_leaf():
        return next(positions)
    items = tuple(_tree(child, positions) for child in spec.children())
    kind: Any = spec.type
    context: Any = spec.context
    keys: Sequence[Any] = ()
    if kind is namedtuple:
        kind, context = spec.context, None
    elif kind is defaultdict:
        factory, keys = context
        context = factory.__qualname__
        if factory.__module__ != "builtins":
            raise _unkept(f"a defaultdict of {context}, which is not a built-in type", "let the model return a dict")
    elif kind in (dict, OrderedDict):
        keys, context = context, None
    if not all(key is None or type(key) in (bool, int, float, str) for key in keys):
        raise _unkept(f"the keys {keys!r:.200}, some of which are not strings or numbers", "use strings as keys")
    return ResultContainer(_NAMES.get(kind) or _name_of(kind), items, tuple(keys), _plain(kind, context))


def _name_of(kind: type) -> str:
    """The name by which a class is registered; for named tuples, and results of torch's operators, the class's own."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is not None and known.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        return str(known.serialized_type_name)
    if find_class(name) is kind:
        return name
    if pytree.is_namedtuple_class(kind):
        hint = "define it at the top of a module, under its own name"
        raise _unkept(f"a named tuple of {name}, a class that cannot be found by that name", hint)
    raise _unkept(
        f"an object of {name}, which is registered without a name",
        "register the class with a name: torch.utils._pytree.register_pytree_node(…, serialized_type_name=…)",
    )


def _plain(kind: type, context: Any) -> Any:
    """The context of a container (its data beside the items), as plain JSON."""
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is not None and known.to_dumpable_context is not None and kind not in _NAMES and not is_positional(kind):
        context = known.to_dumpable_context(context)
    try:
        return json.loads(json.dumps(context))
    except (TypeError, ValueError) as error:
        raise _unkept(
            f"an object of {kind.__qualname__} with a context that is not JSON: {error!s:.400}",
            "register the class with to_dumpable_context and from_dumpable_context",
        ) from error


def _unkept(what: str, hint: str) -> BuildError:
    return BuildError(f"the model returns {what}; a record cannot hold this", hint=hint, stage="export")
