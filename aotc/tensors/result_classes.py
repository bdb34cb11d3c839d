"""Classes of results that torch takes apart without being told, and gives no name: what its operators return
(`torch.return_types.topk`), and named tuples. A record names them by module and class."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def is_positional(kind: type) -> bool:
    """Whether an object of the class is made of its items alone."""
    return kind in torch.return_types.all_return_types or pytree.is_namedtuple_class(kind)


def find_class(name: str, accepts: Callable[[type], bool] = is_positional) -> type | None:
    """The class that has that name and is accepted, in a module that is imported already."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = vars(found).get(part) if isinstance(found, type(sys) | type) else None
        if isinstance(found, type) and accepts(found):
            return found
    return None
