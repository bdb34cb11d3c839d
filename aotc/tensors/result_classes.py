"""Names, for a record, of classes that torch takes apart without being told, and gives no name in a text: its own for
what operators return (`torch.return_types.topk`), and named tuples. Any other class is named where it is registered.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_unnamed(kind: type) -> bool:
    """Whether it is such a class, and nobody has registered it with a name."""
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is None:
        return pytree.is_namedtuple_class(kind)
    return known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND and _is_torch_s(kind)


def find_class(name: str) -> type | None:
    """The class of these that has that name, in a module that is imported already."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = vars(found).get(part) if isinstance(found, type(sys) | type) else None
        if isinstance(found, type) and (_is_torch_s(found) or pytree.is_namedtuple_class(found)):
            return found
    return None


def register(kind: type) -> None:
    """Have torch write an unnamed class by its name, and read that."""
    name = name_of(kind)
    if _is_torch_s(kind):
        known = pytree.SUPPORTED_SERIALIZED_TYPES[kind]
        pytree.SUPPORTED_SERIALIZED_TYPES[kind] = known._replace(serialized_type_name=name)
        pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind
    else:
        pytree._register_namedtuple(kind, serialized_type_name=name)


def _is_torch_s(kind: type) -> bool:
    return kind in torch.return_types.all_return_types
