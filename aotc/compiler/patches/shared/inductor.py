"""Inductor's modules, functions and tables, as a patch changes them while it is active."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from aotc.compiler.patches.machinery.replacing import replaced, replaced_entries

ConfigCheck = Callable[[Any], bool]

TMA_TEMPLATES = "triton.enable_persistent_tma_matmul"
"""An option of Inductor: templates with the tensor memory accelerator. If the user sets it, aotc changes nothing about
them."""


TF32_ON_HOPPER = "tf32_on_hopper"
"""The template of `tf32_tiles`."""

_LOADS_BY_TMA = ("_tma", TF32_ON_HOPPER)
"""What is in the names of such templates."""


def inductor(module: str) -> Any:
    """A module of Inductor, imported on demand, so that only a process that compiles imports it."""
    return importlib.import_module(f"torch._inductor.{module}")


@contextmanager
def decomposed(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """While active, these functions decompose their operators; where one returns NotImplemented, Inductor's own
    decomposition is used, if there is one."""
    from torch._inductor import decomposition

    tables: Any = (decomposition.decompositions, decomposition.fast_random_decomps())
    with ExitStack() as patches:
        for table in tables:
            asked_first = {name: _first(function, table.get(name)) for name, function in functions.items()}
            patches.enter_context(replaced_entries(table, asked_first))
        yield


def _first(function: Callable[..., Any], own: Callable[..., Any] | None) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return own(*args, **kwargs) if result is NotImplemented and own is not None else result

    return compute


@contextmanager
def patterns_narrowed(narrowed: Callable[[Any, ConfigCheck], ConfigCheck | None]) -> Iterator[None]:
    """While active, a pattern of a pass uses the check that `narrowed` returns for it, if it returns one."""
    from torch._inductor.pattern_matcher import PatternMatcherPass

    apply: Any = PatternMatcherPass.apply
    seen: set[int] = set()

    def applied(self: Any, gm: Any) -> Any:
        for entry in [entry for entries in self.patterns.values() for entry in entries if id(entry) not in seen]:
            seen.add(id(entry))
            if check := narrowed(self, entry.extra_check):
                stack.enter_context(mock.patch.object(entry, "extra_check", check))
        return apply(self, gm)

    with ExitStack() as stack, replaced(PatternMatcherPass, "apply", applied):
        yield


def both(first: ConfigCheck, second: ConfigCheck) -> ConfigCheck:
    return lambda match: first(match) and second(match)


def serialised_within(changed: Callable[[Any], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """While active, torch serialises a call of an operator inside the context `changed(kernel)`."""
    from torch._inductor import ir

    write: Callable[..., Any] = ir.FallbackKernel.export_extern_kernel_node

    def write_changed(kernel: Any) -> Any:
        with changed(kernel):
            return write(kernel)

    return replaced(ir.FallbackKernel, "export_extern_kernel_node", write_changed)


@contextmanager
def racing(templates_of: Callable[[Any, list[Any]], list[Any]]) -> Iterator[None]:
    """While active, a matrix product's candidates are made by the templates that `templates_of(inputs, templates)`
    returns: a handler of choices, which Inductor has for this purpose."""
    from torch._inductor.virtualized import V

    class Choices(type(V.choices)):  # type: ignore[misc]
        def get_template_configs(self, inputs: Any, templates: list[Any], *args: Any, **kwargs: Any) -> Any:
            return super().get_template_configs(inputs, templates_of(inputs, templates), *args, **kwargs)

    with V.set_choices_handler(Choices()):
        yield


def tma_templates_require(condition: Callable[..., bool]) -> AbstractContextManager[None]:
    """While active, templates with the tensor memory accelerator race only for two matrices that `condition`
    accepts."""

    def required(inputs: Any, templates: list[Any]) -> list[Any]:
        others = [one for one in templates if not any(part in one.name for part in _LOADS_BY_TMA)]
        return templates if len(others) == len(templates) or condition(*inputs.mat1mat2()) else others

    return racing(required)
