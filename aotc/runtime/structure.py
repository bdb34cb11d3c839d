"""The structure of a model's result: the text that `torch.utils._pytree.treespec_dumps` gave at build.

Torch's own reader of that text imports whatever module the text names, for enums and for the factories of defaultdicts,
and takes any attribute of it. A record is untrusted text, so every node is looked at before torch sees it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aotc.errors import CorruptError
from aotc.tensors.result_classes import find_class, is_unnamed, register

PROTOCOL = 1
DEEPEST = 64
"""Containers within containers."""

_PLAIN = {
    "builtins.tuple",
    "builtins.list",
    "builtins.dict",
    "collections.namedtuple",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
    "torch.Size",
    *(f"torch.return_types.{kind.__qualname__}" for kind in torch.return_types.all_return_types),
}
"""Types that can be tried out with any leaves; the classes that users register may be particular."""

_FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "bool", "str")


class _Flaw(Exception):
    pass


def read_builder(text: str, count: int, *, plain: bool) -> Callable[[list[Any]], Any]:
    """A function from `count` flat outputs to the structure. Raises as `read_structure` does."""
    spec = read_structure(text, plain=plain)
    if spec.num_leaves != count:
        raise CorruptError(f"the record names {count} outputs, its structure has {spec.num_leaves}")
    return lambda outputs: pytree.tree_unflatten(outputs, spec)


def read_structure(text: str, *, plain: bool = False) -> pytree.TreeSpec:
    """The structure; with `plain`, a container of a class that is not registered here is a dict or a tuple instead.

    Raises CorruptError for a text that is no structure, or would import or call something to be read.
    """
    try:
        protocol, root = json.loads(text)
        if protocol != PROTOCOL:
            raise _Flaw(f"protocol {protocol!r:.100}")
        kinds = set(_checked_kinds(root, DEEPEST))
        _register(root)
        spec = pytree.treespec_loads(json.dumps([protocol, _plain(root)]) if plain else text)
        if kinds <= _PLAIN:
            pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        return spec
    except Exception as error:  # classes that users register read their own part
        raise CorruptError(
            f"the record's output structure cannot be read: {str(error)[:500]}",
            hint="import the package that defines the model's output class before the load",
        ) from error


def _register(node: Any) -> None:
    """Let torch know the classes within a checked node that have names of aotc's."""
    name = node["context"] if node["type"] == "collections.namedtuple" else node["type"]
    kind = find_class(name) if isinstance(name, str) else None
    if kind is not None and is_unnamed(kind):
        register(kind)
    for child in node["children_spec"]:
        _register(child)


def _plain(node: Any) -> Any:
    """A checked node with dicts and tuples for containers of unknown classes.

    A class that keeps the names of its members as its context (dataclasses, transformers' ModelOutput) becomes a dict.
    """
    kind, context = node["type"], node["context"]
    children = [_plain(child) for child in node["children_spec"]]
    if kind is None or _is_registered(kind, context):
        return {**node, "children_spec": children}
    names = _member_names(context, len(children))
    if names is None:
        return {"type": "builtins.tuple", "context": "null", "children_spec": children}
    return {"type": "builtins.dict", "context": json.dumps(names), "children_spec": children}


def _is_registered(kind: str, context: Any) -> bool:
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    return kind in known and (kind != "collections.namedtuple" or context in known)


def _member_names(context: Any, count: int) -> list[str] | None:
    """The context as torch.export writes it for such classes: names, or names and those of members that are None."""
    try:
        names = json.loads(context)
    except (TypeError, ValueError):
        return None
    if isinstance(names, list) and len(names) == 2 and all(isinstance(part, list) for part in names):
        names = names[0]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return names if len(names) == len(set(names)) == count else None


def _checked_kinds(node: Any, depth: int) -> Iterator[str]:
    """The type of each container. Raises _Flaw."""
    if not isinstance(node, dict) or node.keys() != {"type", "context", "children_spec"}:
        raise _Flaw("a node without type, context and children_spec")
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if kind is None and context is None and children == []:
        return
    if depth == 0:
        raise _Flaw(f"more than {DEEPEST} levels")
    if not isinstance(kind, str) or not isinstance(children, list) or kind == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise _Flaw(f"a node of type {kind!r:.100}")
    if kind == "collections.defaultdict":
        _check_defaultdict(context)
    else:
        _check_context(context)
    yield kind
    for child in children:
        yield from _checked_kinds(child, depth - 1)


def _check_defaultdict(context: Any) -> None:
    if not isinstance(context, dict) or context.get("default_factory_module") != "builtins":
        raise _Flaw("a defaultdict whose factory is no built-in type; let the model return a dict")
    if context.get("default_factory_name") not in _FACTORIES:
        raise _Flaw(f"a defaultdict of {context.get('default_factory_name')!r:.100}")


def _check_context(context: Any) -> None:
    """Each object as torch's reader would see it: with the same parser, those that a doubled key hides included."""
    if isinstance(context, str):
        with contextlib.suppress(ValueError):  # a text that a user's class reads itself
            json.loads(context, object_hook=_checked_object)


def _checked_object(fields: dict[str, Any]) -> dict[str, Any]:
    if "__enum__" in fields:
        _check_enum(fields)
    return fields


def _check_enum(fields: dict[str, Any]) -> None:
    """An enum's member is taken only from a module that is imported already, and only from an enum."""
    module_name, _, path = str(fields.get("fqn")).partition(":")
    found: Any = sys.modules.get(module_name)
    for name in path.split("."):
        found = vars(found).get(name) if isinstance(found, type(sys) | type) else None
    if not isinstance(found, enum.EnumMeta) or fields.get("name") not in found.__members__:
        raise _Flaw(f"the member {fields.get('name')!r:.100} of {fields.get('fqn')!r:.200}, which is no enum here")
