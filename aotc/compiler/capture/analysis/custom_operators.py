"""Operators that are not torch's own: those that a library calls, and the modules that register them.

AOTInductor lists, in a file beside the library, the operators that it calls through torch's dispatcher. A service must
have registered them before it loads, so the record names each with the Python module or shared library to import.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from aotc.compiler.scoped import replaced
from aotc.errors import BuildError
from aotc.records import OperatorNeed

_C = cast("Any", torch._C)


class Registrations:
    """The operators of bare torch, and the modules that loaded shared libraries with further ones; `before` are the
    registrations of the module holder, if this process was forked from it."""

    before: Registrations | None = None

    def __init__(self) -> None:
        self.bare = _all_operators()
        self.loaded: dict[str, OperatorNeed] = {}
        if self.before is not None:
            self.bare -= self.before.added
            self.loaded |= self.before.loaded
        self.added: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While active, note the operators that each loaded shared library registers, and the module that loads it: by
        `torch.ops.load_library`, or as an extension module. Of `torch.library.define`, for which torch keeps no calling
        line, note the module that calls it."""
        define: Any = torch.library.define
        load: Any = torch._ops._Ops.load_library
        create: Any = ExtensionFileLoader.create_module

        def loaded(ops: Any, path: Any) -> None:
            with self._noting(_calling_module(), Path(path)):
                load(ops, path)

        def created(loader: Any, spec: ModuleSpec) -> Any:
            with self._noting(spec.name, Path(loader.path)):
                return create(loader, spec)

        def defined(name: Any, *given: Any, **named: Any) -> Any:
            if isinstance(name, str):  # else it is a Library, whose method `define` torch notes
                self.loaded.setdefault(_base(name), OperatorNeed(_base(name), _calling_module()))
            return define(name, *given, **named)

        with (
            replaced(torch.library, "define", defined),
            replaced(torch._ops._Ops, "load_library", loaded),
            replaced(ExtensionFileLoader, "create_module", created),
        ):
            yield

    @contextmanager
    def _noting(self, module: str, library: Path) -> Iterator[None]:
        before = _all_operators()
        yield
        for name in map(_base, _all_operators() - before):
            self.loaded.setdefault(name, OperatorNeed(name, module, library.name))

    def take_down(self) -> None:
        """Record the operators that code other than torch has registered so far: a fork of this process inherits
        them."""
        self.added = {name for name in _all_operators() - self.bare if not _is_torchs(name)}

    def needed(self, calls: Path) -> tuple[OperatorNeed, ...]:
        """The operators in the file `calls`, the library's list, that bare torch lacks. Raises BuildError."""
        if not calls.exists():
            return ()
        listed = msgspec.json.decode(calls.read_bytes())["nodes"]
        bare = {_base(name) for name in self.bare}
        names = sorted({_base(node["node"]["target"]) for node in listed} - bare)
        return tuple(self._need(name) for name in names)

    def _need(self, name: str) -> OperatorNeed:
        need = self.loaded.get(name) or _registered_in_python(name)
        if need is None or not need.module:
            raise BuildError(
                f"the model calls the operator {name}, which is not registered by a module that can be imported",
                hint="register it, or call torch.ops.load_library, in a separate module that the model imports",
                stage="compile",
            )
        if need.module == "torch.library":  # `define`, in a module that was imported before the model was made
            raise BuildError(
                f"{name} is defined by torch.library.define, and which module does it is not known",
                hint="define it by torch.library.custom_op or torch.library.Library, in a module that the model uses",
                stage="compile",
            )
        if need.module.partition(".")[0] == "torch":
            raise BuildError(
                f"the library calls {name}, which {need.module} registers: a service does not import it",
                hint="this operator of torch works only in a process with a compiler: use other operators",
                stage="compile",
            )
        return need


def _all_operators() -> set[str]:
    return set(_C._dispatch_get_all_op_names())


def _is_torchs(name: str) -> bool:
    """Whether a module of torch, such as the compiler, registers the operator when it is imported."""
    need = _registered_in_python(_base(name))
    return need is not None and need.module.partition(".")[0] == "torch"


def _base(name: str) -> str:
    """`ns::op` for `ns::op.overload`."""
    return name.partition(".")[0]


def _calling_module() -> str:
    """The module of the innermost caller outside torch and aotc."""
    names = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_stack(None))
    return next((name for name in names if name.partition(".")[0] not in ("torch", "aotc", "traceback")), "")


def _registered_in_python(name: str) -> OperatorNeed | None:
    """The module that registered an operator by `torch.library.custom_op`, or by `torch.library.Library.define`, for
    which torch notes the calling line; None if there is none."""
    from torch._library.custom_ops import OPDEFS

    if definition := OPDEFS.get(name):
        return OperatorNeed(name, definition._init_fn.__module__)
    found = re.search(r"^debug: registered at (?P<file>.+\.py):\d+$", _C._dispatch_dump(name), re.MULTILINE)
    modules = sys.modules.copy().items()
    module = next((key for key, value in modules if found and getattr(value, "__file__", "") == found["file"]), "")
    return OperatorNeed(name, module) if module else None
