"""Operators of the user's own, which a library calls by name: they must be registered before it is opened."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from aotc.errors import Issue, OperatorError

if TYPE_CHECKING:
    from aotc.records import OperatorNeed

Imports = bool | str | Collection[str]
"""The modules that may be imported: none, all that a record names, or those named here and what is in them."""

COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy")
"""Modules that a load never imports, not even if a record names them."""


def provide_operators(needs: Iterable[OperatorNeed], allow_imports: Imports) -> None:
    """Import the modules that register what is missing, where the caller allows it.

    Raises OperatorError with every operator that is missing after that, and who registers it; also where such a module
    imports a compiler.
    """
    needs = list(dict.fromkeys(needs))
    failed: dict[str, str] = {}
    for module in dict.fromkeys(need.module for need in _missing(needs)):
        if _is_allowed(module, allow_imports):
            failed[module] = _import(module)
    if missing := _missing(needs):
        raise OperatorError(
            f"the compiled code calls operators that are not registered: {', '.join(need.name for need in missing)}",
            issues=tuple(_issue(need, failed.get(need.module)) for need in missing),
            hint="import these modules before aotc.load, or allow it: "
            f"aotc.load(…, allow_imports={sorted({need.module for need in missing})})",
        )
    for need in needs:
        _keep_compiler_out(need.name)


def _missing(needs: Collection[OperatorNeed]) -> list[OperatorNeed]:
    if not needs:
        return []
    registered = {name.partition(".")[0] for name in cast("Any", torch._C)._dispatch_get_all_op_names()}
    return [need for need in needs if need.name not in registered]


def _is_allowed(module: str, allow_imports: Imports) -> bool:
    if isinstance(allow_imports, bool):
        return allow_imports
    names = [allow_imports] if isinstance(allow_imports, str) else allow_imports
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _import(module: str) -> str:
    """Why the module could not be imported; "" if it was. Raises OperatorError where a compiler came with it."""
    before = _compilers()
    failure = ""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        failure = f"{type(error).__name__}: {error}"
    if new := [name for name in _compilers() if name not in before]:
        raise OperatorError(
            f"importing `{module}`, which registers operators that the compiled code calls, imported {', '.join(new)}",
            hint="register them in a module that imports no compiler; or, where this process may have one, import "
            f"{module} before aotc.load",
        )
    return failure


def _compilers() -> list[str]:
    return [name for name in COMPILERS if name in sys.modules]


def _issue(need: OperatorNeed, failure: str | None) -> Issue:
    place = f"module `{need.module}`" + (f", with the shared library {need.library}" if need.library else "")
    if failure is None:
        return Issue(f"registered by {place}", where=need.name, expected=need.module, actual="not imported")
    message = f"registered by {place}, which " + (
        f"cannot be imported here: {failure}" if failure else "was imported and did not register it"
    )
    return Issue(message, where=need.name, expected=need.module, actual=failure or "imported")


def _keep_compiler_out(name: str) -> None:
    """Let an operator of `torch.library.custom_op` run without the import of torch's compiler.

    torch wraps each kernel of such an operator so that Dynamo leaves it alone, and imports Dynamo for that when the
    kernel first runs. In a process without Dynamo there is nothing to be left alone by.
    """
    library = sys.modules.get("torch._library.custom_ops")
    definition = getattr(library, "OPDEFS", {}).get(name)
    for kernel in definition._backend_fns.values() if definition is not None else ():
        inner: Any = getattr(kernel, "__wrapped__", None)
        if inner is not None and getattr(inner, "__dynamo_disable", None) is None:
            inner.__dynamo_disable = _disabled_later(inner)


def _disabled_later(kernel: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or not hasattr(dynamo, "disable"):
            return kernel(*args, **kwargs)
        kernel.__dynamo_disable = dynamo.disable(kernel, wrapping=False)  # as torch itself does
        return kernel.__dynamo_disable(*args, **kwargs)

    return run
