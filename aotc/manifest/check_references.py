"""Checks of what names code: a model's factory, factories within its arguments, functions that fill inputs."""

from __future__ import annotations

import re
from pathlib import PurePath

from aotc.manifest.inputs import nested_factories
from aotc.manifest.model_form import ModelForm
from aotc.manifest.schema import FACTORY
from aotc.manifest.types import KeyPath


def check_factory(model: ModelForm) -> None:
    if model.sound("factory"):
        check_reference(model, model.path("factory"), model.get("factory", ""))
    for keys, reference in nested_factories(model.get("kwargs", {})) if model.sound("kwargs") else ():
        path = model.path("kwargs", *keys, "factory")
        if re.match(FACTORY, reference):
            check_reference(model, path, reference)
        else:
            model.report(path, f"`{reference}` names no factory", hint="write package.module:name")


def check_reference(model: ModelForm, path: KeyPath, reference: str) -> None:
    """`package.module:name` or a relative `path/to/file.py:name`."""
    module = reference.partition(":")[0]
    if PurePath(module).is_absolute():
        hint = "name it relative to the manifest's folder: artifacts carry this text to other machines"
        model.report(path, f"`{reference}` is an absolute path", hint=hint)
    elif not module.endswith(".py") and not all(part.isidentifier() for part in module.split(".")):
        hint = "write package.module:name or path/to/file.py:name"
        model.report(path, f"`{module}` in `{reference}` is neither a module nor a Python file", hint=hint)
