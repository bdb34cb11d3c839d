"""What a manifest says, as data: one `ModelSpec` for each model, and where in the file each part stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aotc.manifest.schema import ModelSettings
from aotc.records import Bucket, Record

Key = str | int
KeyPath = tuple[Key, ...]

OutputsSpec = tuple[str, ...] | dict[str, list[str | None]]
"""What is cropped: dims, in every output that carries them; or for each output's path the dim of each axis."""


class RecordedCall(Record, frozen=True):
    """A call that a program made: the shapes of its tensors, and of those whose values were kept the dtypes and the
    values (little-endian, packed by zlib, in base64), by the inputs' paths. See `aotc.manifest.recorded_values`."""

    shapes: dict[str, list[int]]
    values: dict[str, str]
    dtypes: dict[str, str]


class ModelSpec(ModelSettings, frozen=True):
    """One model of a manifest, with the defaults applied. It is kept in the artifacts' records, so it holds no path of
    this machine, and equal manifests give equal specs whatever their comments and the order of their keys. What it
    shares with a manifest's models is described there: `aotc.manifest.schema`.

    `inputs` is the manifest's own form with sorted keys (see `aotc.manifest.inputs.parse_inputs`). `buckets` are the
    listed ones and the grid's product, each once; a model without dims has one empty bucket. `method` is what is called
    in the place of forward, "" for forward. `recorded` are the calls whose values inputs refer to, by the reference.
    """

    name: str
    factory: str
    inputs: dict[str, Any]
    buckets: tuple[Bucket, ...]
    crop: OutputsSpec = ()
    regions: tuple[str, ...] = ()
    method: str = ""
    parallel: dict[str, int] = msgspec.field(default_factory=dict)
    recorded: dict[str, tuple[RecordedCall, ...]] = msgspec.field(default_factory=dict)

    @property
    def patches_off(self) -> frozenset[str]:
        """The names of the patches of torch that are switched off."""
        return frozenset(name for name, on in self.patches.items() if not on)


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and checked.

    `auto` names the models whose inputs are left to their configuration (`models.auto_inputs`): their specs have none.
    `path` is the file as the caller named it, `folder` the absolute folder that holds it. `lines` gives for each key
    path, like `("models", "tinyblock", "factory")`, the line on which it stands. `picks` is the absolute path of the
    pick file that it names.
    """

    path: Path
    folder: Path
    models: dict[str, ModelSpec]
    lines: Mapping[KeyPath, int]
    picks: Path | None = None
    auto: frozenset[str] = frozenset()

    def where(self, *keys: Key) -> str:
        """`manifest.yaml:12`: where these keys stand, or their nearest ancestor that is written in the file."""
        return place(str(self.path), self.lines, keys)


def place(file: str, lines: Mapping[KeyPath, int], keys: KeyPath) -> str:
    """`file:line` of a key path. What a model does not say itself is looked up in `defaults`."""
    if len(keys) > 2 and keys[0] == "models" and keys[:3] not in lines and ("defaults", keys[2]) in lines:
        keys = ("defaults", *keys[2:])
    while keys and keys not in lines:
        keys = keys[:-1]
    return f"{file}:{lines.get(keys, 1)}"
