"""Containers of a model's result other than tuples, lists and dicts.

A record is untrusted text: no module is imported and nothing is called but a class's own constructor, or what the class
was registered with (`torch.utils._pytree.register_pytree_node`) in this process. Caches of transformers are made by
`aotc.tensors.caches`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from aotc.errors import CorruptError
from aotc.tensors.caches import PREFIX, find_cache, make_cache
from aotc.tensors.result_classes import find_class, is_positional

if TYPE_CHECKING:
    from aotc.records import ResultContainer

Make = Callable[[Any], Any]

_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str)}


def maker(container: ResultContainer, *, plain: bool) -> Make:
    """A function from the items to the container; with `plain`, a class that is not imported gives a dict or a tuple.

    Raises CorruptError for a container that cannot be made.
    """
    try:
        make, is_tried = _maker(container, plain)
        if is_tried:
            make(range(len(container.items)))
        return make
    except Exception as error:  # classes that users register read their own part
        raise CorruptError(
            f"the record's output structure cannot be read: {container.type[:200]}: {str(error)[:500]}",
            hint="import the package that defines the model's output class before the load",
        ) from error


def _maker(container: ResultContainer, plain: bool) -> tuple[Make, bool]:
    """Also whether it can be tried with any items: the classes that users register may be particular."""
    keys, context = container.keys, container.context
    match container.type:
        case "dict":
            raise LookupError("it has no key of its own for each item")
        case "collections.OrderedDict":
            return lambda items: OrderedDict(zip(keys, items, strict=True)), True
        case "collections.defaultdict":
            factory = _FACTORIES[context]
            return lambda items: defaultdict(factory, zip(keys, items, strict=True)), True
        case "collections.deque":
            return lambda items: deque(items, context), True
    cache = find_cache(container.type.removeprefix(PREFIX)) if container.type.startswith(PREFIX) else None
    if cache is not None:
        return lambda items: make_cache(cache, items, context), True
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(container.type) or find_class(container.type)
    if kind is None and plain:
        names = _member_names(context, len(container.items))
        return (lambda items: dict(zip(names, items, strict=True))) if names else tuple, True
    if not isinstance(kind, type) or container.type == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise LookupError("no such class is registered")
    if pytree.is_namedtuple_class(kind):
        return lambda items: kind(*items), True
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is not None and known.from_dumpable_context is not None:
        context = known.from_dumpable_context(context)
    unflatten = pytree.SUPPORTED_NODES[kind].unflatten_fn
    return lambda items: unflatten(items, context), is_positional(kind)


def _member_names(context: Any, count: int) -> list[str] | None:
    """The context of dataclasses and of transformers' ModelOutput and caches: names, or names and other members."""
    if isinstance(context, list) and len(context) == 2 and all(isinstance(part, list) for part in context):
        context = context[0]
    if not isinstance(context, list) or not all(isinstance(name, str) for name in context):
        return None
    return context if len(context) == len(set(context)) == count else None
