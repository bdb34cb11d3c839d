"""The pick file of a build, made by `aotc picks --export`, and the pins in it for a unit."""

from __future__ import annotations

from pathlib import Path

from aotc.compiler.messages import NO_PINS, Pins
from aotc.errors import ManifestError
from aotc.picks import PickFile, decode_picks
from aotc.records import Bucket

_SEEDING = ("operator", "padding", "kernel")
"""Kinds of picks that may answer for another unit: their questions contain all shapes. (A fusion's question names nodes
of one graph.)"""


def read_picks_file(path: Path) -> PickFile:
    """Read a pick file. Raises ManifestError for a file that cannot be read, SchemaVersionError, CorruptError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(
            f"the picks cannot be read: {error}", hint="`aotc picks REF --export FILE` writes such a file"
        ) from error
    return decode_picks(data, str(path))


def pins_for(file: PickFile | None, model: str, bucket: Bucket, target: str, torch: str, region: str = "") -> Pins:
    """The pins in a pick file for this unit."""
    if file is None:
        return NO_PINS
    here = [unit for unit in file.units if unit.target == target]
    own = [unit for unit in here if (unit.model, unit.region, unit.bucket) == (model, region, bucket)]
    if own:
        return Pins(own[0], further=tuple(own[1:]))
    same_torch = [unit for unit in here if unit.torch == torch]
    seeds = tuple(pick for unit in same_torch for pick in unit.picks if pick.kind in _SEEDING)
    return Pins(None, seeds, next((unit.device for unit in same_torch), ""))
