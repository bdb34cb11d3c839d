"""The forms of a model's inputs: what a tensor is filled with may change what the model does with it.

A mask that masks nothing is the known case: models of transformers then give their layers `None` in its place. So an
`init` may be a list, and a mask of a model by regions has two forms unless its `init` is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aotc.manifest.inputs import leaf_path, tensors_in
from aotc.manifest.types import KeyPath, ModelSpec
from aotc.records import TUPLE

MASK = "attention_mask"
"""The end of the names of masks that libraries leave out where they mask nothing."""


def input_forms(spec: ModelSpec) -> list[ModelSpec]:
    """The spec with one `init` for each tensor, in every combination; the first has the first of each tensor's."""
    inits = {keys: _inits(spec, keys, form) for keys, form in tensors_in(spec.inputs)}
    several = {keys: each for keys, each in inits.items() if each}
    return [
        msgspec.structs.replace(spec, inputs=_filled(spec.inputs, (), dict(zip(several, chosen, strict=True))))
        for chosen in itertools.product(*several.values())
    ]


def with_inits(spec: ModelSpec, inits: Mapping[str, Any]) -> ModelSpec:
    """The spec with other `init`s of these inputs, by their paths."""
    paths = {keys: _path_of(keys) for keys, _ in tensors_in(spec.inputs)}
    by_keys = {keys: inits[path] for keys, path in paths.items() if path in inits}
    return msgspec.structs.replace(spec, inputs=_filled(spec.inputs, (), by_keys))


def _path_of(keys: KeyPath) -> str:
    """The path of an input, in which a tuple has no key of its own."""
    own = [
        key for key, after in zip(keys, (*keys[1:], ""), strict=True) if not (key == TUPLE and isinstance(after, int))
    ]
    return leaf_path(tuple(own))


def _inits(spec: ModelSpec, keys: KeyPath, form: Mapping[str, Any]) -> Sequence[Any]:
    """The `init`s that a tensor is given in turn; empty where it has one only."""
    init = form.get("init")
    if isinstance(init, list):
        return init
    is_mask = str(keys[-1]).endswith(MASK) and str(form.get("dtype")).startswith(("int", "uint", "bool"))
    if not (spec.regions and is_mask):
        return ()
    return (init, "padding") if init == "ones" else (init or {"randint": [0, 2]}, "ones")


def _filled(value: Any, keys: KeyPath, inits: Mapping[KeyPath, Any]) -> Any:
    if keys in inits:
        return {**value, "init": inits[keys]}
    if isinstance(value, Mapping):
        return {key: _filled(item, (*keys, key), inits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, (*keys, index), inits) for index, item in enumerate(value)]
    return value
