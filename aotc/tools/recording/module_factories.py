"""How a live module can be made again: its factory in a manifest, if its class or its attributes say so."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from aotc.reads.attributes import module_attributes
from aotc.reads.sources import file_of
from aotc.reads.tensors import named_state

_WITHOUT = ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype")
"""Of a configuration of transformers: where it came from."""

_IMPLEMENTATIONS = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
"""What transformers takes by itself for a model's attention and its experts."""


class Made(NamedTuple):
    factory: str
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    comment: str = ""


def factory_of(
    module: nn.Module,
    folder: Path,
    changed: Collection[str] = (),
    finish: Callable[[nn.Module], object] = lambda made: None,
) -> Made | None:
    """A factory with its arguments, for a manifest in `folder`; None where there is none that is known to do. `changed`
    are attributes that calls have changed, as `layers.0.seen`, which a new module need not have; `finish` does to a new
    module what the factory does not."""
    reference = _reference(type(module), folder)
    if reference is None:
        return None
    bases = {base.__name__: base.__module__.partition(".")[0] for base in type(module).__mro__}
    config = getattr(module, "config", None)
    if bases.get("PreTrainedModel") == "transformers" and hasattr(config, "to_diff_dict"):
        return _from_transformers(reference, config, folder)
    if bases.get("ConfigMixin") == "diffusers" and isinstance(config, Mapping):
        return _from_diffusers(reference, type(module), config)
    return _from_attributes(reference, module, changed, finish)


def _reference(cls: type, folder: Path) -> str | None:
    """How a manifest names a class: by its package where that offers it, a script's by the script's file."""
    name, package = cls.__qualname__, sys.modules.get(cls.__module__.partition(".")[0])
    if "<locals>" in name:
        return None
    if cls.__module__ == "__main__":
        file = file_of("__main__")
        return f"{os.path.relpath(file, folder)}:{name}" if file is not None and file.suffix == ".py" else None
    if getattr(package, name, None) is cls:
        return f"{cls.__module__.partition('.')[0]}:{name}"
    return f"{cls.__module__}:{name}"


def _from_transformers(reference: str, config: Any, folder: Path) -> Made | None:
    values = _with_text_keys(_own_values(config))
    for what, usual in _IMPLEMENTATIONS.items():
        implementation = getattr(config, f"_{what}", None)
        if isinstance(implementation, str) and implementation != usual:
            values[what] = implementation
    made = _reference(type(config), folder)
    if made is None or not _is_plain(values):
        return None
    return Made(reference, {"config": {"factory": made, "kwargs": values}})


def _own_values(config: Any) -> dict[str, Any]:
    """The values in which a configuration differs from its class's defaults, if these make the same; else all."""
    whole = config.to_diff_dict()
    values = {key: value for key, value in whole.items() if key not in _WITHOUT}
    try:
        usual = type(config)().to_dict()
        own = {key: value for key, value in values.items() if key not in usual or usual[key] != value}
        is_same = type(config)(**own).to_diff_dict() == whole
    except Exception:  # of a class without defaults, or that computes some from others
        return values
    return own if is_same else values


def _with_text_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the numbers of labels as text, as a manifest holds them; transformers makes numbers of them."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if key == "id2label" and isinstance(value, Mapping):
            plain[key] = {str(number): label for number, label in value.items()}
        else:
            plain[key] = _with_text_keys(value) if isinstance(value, Mapping) else value
    return plain


def _from_diffusers(reference: str, cls: type, config: Mapping[str, Any]) -> Made | None:
    defaults = config.get("_use_default_values") or ()
    takes = inspect.signature(cls).parameters
    values = {key: value for key, value in config.items() if key in takes and key not in defaults}
    return Made(reference, values) if _is_plain(values) else None


def _from_attributes(
    reference: str, module: nn.Module, changed: Collection[str], finish: Callable[[nn.Module], object]
) -> Made | None:
    """The class with the attributes that are called as its arguments, if that gives a module of the same form."""
    values: dict[str, Any] = {}
    try:
        for name, parameter in inspect.signature(type(module)).parameters.items():
            if name in vars(module) and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
                if not _is_plain(value := vars(module)[name]):
                    return None
                if value != parameter.default or type(value) is not type(parameter.default):
                    values[name] = value
            elif parameter.default is inspect.Parameter.empty and parameter.kind in (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.KEYWORD_ONLY,
            ):
                return None
        with torch.random.fork_rng(devices=()), torch.device("meta"), _NoInitialisation():
            other = type(module)(**values)
            finish(other)
        is_same = _form(other) == _form(module) and _attributes(other.eval(), changed) == _attributes(module, changed)
    except Exception:  # of the user's constructor, which was not written for the meta device
        return None
    return Made(reference, values) if is_same else None


def _attributes(module: nn.Module, changed: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for path, attributes in module_attributes(module).items()
        for key, value in attributes.items()
        if (name := f"{path}.{key}".removeprefix(".")) not in changed
    }


class _NoInitialisation(TorchFunctionMode):
    """Makes no random numbers: on the meta device that does nothing, but import torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        if func in (torch.rand, torch.randn):
            return torch.empty(*args, **given)
        if getattr(func, "__name__", "") in _FILL:
            return args[0] if args else given["tensor"]
        return func(*args, **(kwargs or {}))


_FILL = {name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")} | {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
}


def _form(module: nn.Module) -> dict[str, Any]:
    return {name: tuple(tensor.shape) for name, tensor in named_state(module).items()}


def _is_plain(value: Any) -> bool:
    """Whether a manifest can hold it."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)
