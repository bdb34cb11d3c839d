"""How peft's adapters stand in a module, as plain data; and a factory's module with the same adapters.

`peft.inject_adapter_in_model`, `peft.get_peft_model` and the adapters of transformers and diffusers all leave layers of
peft in a module, and a `peft_config`. The program records both, and the build makes the module by its factory and then
adds the adapters by `with_adapters`. Configurations and names are recorded. The only class that a record can choose is
one of peft's own table of adapter kinds.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn

from aotc.adapters import is_prepared, prepare
from aotc.amounts import listed
from aotc.digest import canonical_json
from aotc.errors import ManifestError
from aotc.reads.tensors import dtype_name

_KINDS = ("LORA", "LOHA", "LOKR", "IA3")
"""Kinds of adapters that stand in the layers alone, and are made from their configuration alone."""

_IMPORTED = ("megatron_config", "megatron_core", "auto_mapping")
"""Of a configuration: what peft would import."""

_WHERE = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Of a configuration: which of its target modules get no adapter."""

OF_MODEL = "base_model.model."
"""Precedes the paths of a module that `peft.get_peft_model` has put into another one."""

_MARKS: dict[str, tuple[type, ...]] = {
    "active_adapter": (str, list),
    "base_model.active_adapter": (str, list),
    "peft_config": (dict,),
}
"""What is kept in the module itself by `get_peft_model`, and a table without adapters."""

_BARE = "_aotc_bare"
_WRITE_A_FACTORY = "name a function that adds them, too: aotc.compile(model, factory=…)"


def base_of(module: nn.Module) -> nn.Module:
    """The module that a factory makes: of what `peft.get_peft_model` gave, the one within."""
    if (peft := sys.modules.get("peft")) is not None and isinstance(module, peft.PeftModel):
        inner: nn.Module = module.base_model.model
        return inner
    return module


def adapters_in(module: nn.Module) -> dict[str, Any]:
    """The arguments of `with_adapters`, by which a build gets the module from its base; {} where there are no adapters.
    Raises ManifestError where plain data does not say what there is."""
    layers, marks = _layers_in(module), _marks(module)
    if not layers and not marks:
        return {}
    is_model = base_of(module) is not module
    configs: Mapping[str, Any] = getattr(module, "peft_config", {})
    held = {path: _names_in(layer) for path, layer in layers.items()}
    if unknown := sorted({name for names in held.values() for name in names} - configs.keys()):
        raise ManifestError(f"no configuration is known of the adapters {listed(unknown, 3)}", hint=_WRITE_A_FACTORY)
    prefix = OF_MODEL if is_model else ""
    given: dict[str, Any] = {"adapters": {}}
    for name, config in configs.items():
        values = _plain_config(name, config)
        own = {path.removeprefix(prefix) for path, names in held.items() if name in names}
        if own != _targeted(config, base_of(module)):
            given["adapters"][name] = {"config": values, "layers": sorted(own)}
        else:
            given["adapters"][name] = {"config": values}
    if bare := [path.removeprefix(prefix) for path, names in held.items() if not names]:
        given["bare"] = bare
    given["states"] = _states(layers)
    if marks:
        given["marks"] = marks
    if is_model:
        given["as_model"] = True
    if any(map(is_prepared, layers.values())):
        given["prepared"] = True
    if dtypes := _dtypes(module, layers.values()):
        given["dtypes"] = dtypes
    return given


def adapter_states(module: nn.Module) -> list[dict[str, Any]]:
    """Which adapters are active, and how: peft keeps that in private attributes, which a module's facts leave out. []
    where there are none, or plain data does not say it."""
    with suppress(ManifestError):
        return _states(_layers_in(module))
    return []


def with_adapters(
    module: nn.Module,
    adapters: Mapping[str, Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    bare: Sequence[str] = (),
    marks: Mapping[str, Any] | None = None,
    as_model: bool = False,
    prepared: bool = False,
    dtypes: Mapping[str, str] | None = None,
) -> nn.Module:
    """The module with the adapters that `adapters_in` found in another one, without the values of their weights.

    adapters: of each by its name the `config`, as plain data, and the paths of its `layers` where the configuration
    alone does not say them. Those that the module has already are left as they are.
    states: of layers `of` these paths, or of all, the `scaling` of adapters, which are `active` or `merged`, and
    whether they are `disabled`.
    bare: the paths of layers whose adapters were all deleted.
    marks: what peft and diffusers keep in the module itself, as which adapter is active.
    as_model: whether it is made by `peft.get_peft_model`.
    prepared: whether `aotc.adapters.prepare` is called.
    dtypes: those of the parameters of the `module` and of its `adapters`, where they are not the same.

    Raises ManifestError for a configuration that is not known here.
    """
    peft: Any = importlib.import_module("peft")
    if dtypes:
        _cast(module.parameters(), dtypes["module"])
    configs = {name: _config_of(name, each["config"]) for name, each in adapters.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a second adapter
        for name, each in adapters.items():
            if name not in getattr(module, "peft_config", {}):
                module = _added(peft, module, name, each, as_model)
        if bare:
            one = {"config": {"peft_type": "LORA", "r": 1}, "layers": bare}
            base = base_of(module)
            _added(peft, base, _BARE, one, False)
            for layer in _layers_in(base).values():
                if _BARE in _names_in(layer):
                    layer.delete_adapter(_BARE)
    held: dict[str, Any] = getattr(module, "peft_config", {})
    held.pop(_BARE, None)
    held.update(configs)
    for path, value in (marks or {}).items():
        if path not in _MARKS or type(value) not in _MARKS[path]:
            raise ManifestError(f"{value!r} is not what peft keeps as `{path}`")
        holder, _, name = path.rpartition(".")
        vars(module.get_submodule(holder))[name] = value
    if not held and "peft_config" not in (marks or {}):
        vars(module).pop("peft_config", None)
    layers = _layers_in(module)
    if dtypes:
        _cast(_weights_of(layers.values()), dtypes["adapters"])
    for state in states:
        for path in state.get("of", layers):
            _put_state(layers[path], state)
    return prepare(module) if prepared else module


def _added(peft: Any, module: nn.Module, name: str, each: Mapping[str, Any], as_model: bool) -> nn.Module:
    """Add an adapter, whose random weights are neither 0 nor computed from the module's."""
    config = _config_of(name, each["config"])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False
    if "layers" in each:
        config.target_modules = "|".join(map(re.escape, each["layers"]))
        for where in _WHERE:
            if hasattr(config, where):
                setattr(config, where, None)
    is_model = isinstance(module, peft.PeftModel)
    if is_model:
        cast("Any", module).add_adapter(name, config)
        return module
    if as_model:
        return cast("nn.Module", peft.get_peft_model(module, config, adapter_name=name))
    return cast("nn.Module", peft.inject_adapter_in_model(config, module, name))


def _layers_in(module: nn.Module) -> dict[str, Any]:
    """The layers of peft by their paths."""
    if "peft" not in sys.modules:
        return {}
    cls = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    return {path: part for path, part in module.named_modules() if isinstance(part, cls)}


def _names_in(layer: Any) -> list[str]:
    """The adapters of a layer."""
    tables = (getattr(layer, attribute, {}) for attribute in layer.adapter_layer_names)
    return list(dict.fromkeys(name for table in tables for name in table))


# -- configurations ---------------------------------------------------------------------------------------------------


def _plain_config(name: str, config: Any) -> dict[str, Any]:
    """The values in which it differs from its kind's defaults. Raises ManifestError where these do not say it."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in _KINDS:
        raise ManifestError(
            f"the adapter `{name}` is of the kind {kind}, and a build adds {listed(_KINDS, 9)}", hint=_WRITE_A_FACTORY
        )
    usual, whole = type(config)().to_dict(), config.to_dict()
    own = {key: _plain(value, key) for key, value in whole.items() if key != "peft_type" and usual.get(key) != value}
    values = {"peft_type": kind, **own}
    made = _config_of(name, values).to_dict()
    if other := [key for key, value in whole.items() if _plain(made[key], key) != _plain(value, key)]:
        raise ManifestError(
            f"the configuration of the adapter `{name}` cannot be said as data: {listed(other, 3)}",
            hint=_WRITE_A_FACTORY,
        )
    return values


def _config_of(name: str, values: Mapping[str, Any]) -> Any:
    """Raises ManifestError."""
    peft: Any = importlib.import_module("peft")
    kind = values.get("peft_type")
    if kind not in _KINDS:
        raise ManifestError(f"the adapter `{name}` is of the kind {kind!r}; expected one of {listed(_KINDS, 9)}")
    cls = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    known = {field.name for field in dataclasses.fields(cls)}.difference(_IMPORTED)
    if other := sorted(values.keys() - known):
        raise ManifestError(
            f"the configuration of the adapter `{name}` has {listed(other, 3)}, which a build does not take",
            hint=_WRITE_A_FACTORY,
        )
    return cls(**{key: value for key, value in values.items() if key != "peft_type"})


def _plain(value: Any, key: str) -> Any:
    """Raises ManifestError for what JSON does not hold."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(_plain(item, key) for item in value)
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _plain(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ManifestError(f"`{key}` of an adapter is {type(value).__name__}, no plain data", hint=_WRITE_A_FACTORY)


def _targeted(config: Any, base: nn.Module) -> set[str]:
    """The paths that the target modules name."""
    targets = config.target_modules
    layers = [f"{path}." for path in _layers_in(base)]
    paths = [path for path, _ in base.named_modules() if path and not any(map(path.startswith, layers))]
    if isinstance(targets, str):
        return {path for path in paths if re.fullmatch(targets, path)}
    ends = tuple(f".{target}" for target in targets or ())
    return {path for path in paths if f".{path}".endswith(ends)}


def _marks(module: nn.Module) -> dict[str, Any]:
    found = {}
    for path in _MARKS:
        holder, _, name = path.rpartition(".")
        if not holder or (base_of(module) is not module and holder in module._modules):
            value = vars(module.get_submodule(holder)).get(name)
            if type(value) in _MARKS[path] and (name != "peft_config" or not value):
                found[path] = _plain(value, path)
    return found if _layers_in(module) else {}


# -- the layers' states -----------------------------------------------------------------------------------------------


def _states(layers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The state that most layers have, and those of others by their paths."""
    states = {path: canonical_json(_state(path, layer)).decode() for path, layer in layers.items()}
    paths = {state: [path for path in states if states[path] == state] for state in states.values()}
    if not states:
        return []
    first = Counter(states.values()).most_common(1)[0][0]
    others = [{"of": paths[state], **json.loads(state)} for state in paths if state != first]
    return [json.loads(first), *others]


def _state(path: str, layer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"merged": list(layer.merged_adapters)}
    if not hasattr(layer, "prepared_adapters"):  # else code runs all, and a scale of 0 switches one off
        found["active"] = _plain(layer._active_adapter, f"{path}.active_adapter")
        found["disabled"] = bool(layer.disable_adapters)
    if "adapter_layer_names" in vars(layer):  # of DoRA, also where such an adapter was deleted
        found["tables"] = list(layer.adapter_layer_names)
    where = getattr(layer, "kwargs", {}).get("device_map")
    if isinstance(where, dict) and all(isinstance(device, torch.device) for device in where.values()):
        found["devices"] = {name: device.type for name, device in where.items()}  # where it was when they were added
    scaling = getattr(layer, "scaling", {})
    if is_prepared(layer):
        return found
    if any(isinstance(scale, torch.Tensor) for scale in scaling.values()):
        raise ManifestError(
            f"`{path}.scaling` has tensors that the module does not register",
            hint="make them buffers, which compiled calls read: aotc.adapters.prepare(model), before aotc.compile",
        )
    return found | {"scaling": _plain(dict(scaling), f"{path}.scaling")}


def _put_state(layer: Any, state: Mapping[str, Any]) -> None:
    active, merged, scaling = state.get("active", []), state["merged"], state.get("scaling", {})
    names, tables = [active] if isinstance(active, str) else active, state.get("tables", [])
    if not all(isinstance(name, str) for name in [*names, *merged, *scaling, *tables]):
        raise ManifestError("the names of adapters are texts")
    if not all(type(scale) in (int, float) for scale in scaling.values()):
        raise ManifestError("the scales of adapters are numbers")
    if "active" in state:
        layer.set_adapter(names)
        layer.enable_adapters(not state["disabled"])
        layer._active_adapter = active
    layer.merged_adapters = list(merged)
    getattr(layer, "kwargs", {}).pop("device_map", None)
    if "devices" in state:
        layer.kwargs["device_map"] = {name: torch.device(device) for name, device in state["devices"].items()}
    vars(layer).pop("adapter_layer_names", None)
    if tables:
        layer.adapter_layer_names = tuple(tables)
    if "scaling" in state and hasattr(layer, "scaling"):
        layer.scaling.clear()
        layer.scaling.update(scaling)


def _weights_of(layers: Iterable[Any]) -> list[nn.Parameter]:
    """The parameters of adapters."""
    tables = [getattr(layer, name) for layer in layers for name in layer.adapter_layer_names if hasattr(layer, name)]
    return [parameter for table in tables for parameter in table.parameters()]


def _dtypes(module: nn.Module, layers: Iterable[Any]) -> dict[str, str]:
    """The dtype of the module's parameters and that of its adapters', where each is one and they are not the same."""
    adapters = {id(parameter) for parameter in _weights_of(layers)}
    real = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    of = {each: {p.dtype for p in real if (id(p) in adapters) is each} for each in (False, True)}
    if len(of[False]) != 1 or len(of[True]) != 1 or of[False] == of[True]:
        return {}
    return {"module": dtype_name(of[False].pop()), "adapters": dtype_name(of[True].pop())}


def _cast(parameters: Iterable[nn.Parameter], name: str) -> None:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"{name!r} is not a dtype")
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
