"""Errors for unknown names, with the nearest known name, or with the store or manifest of that name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from aotc.amounts import listed
from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.store.files.disk import store_error, typed_errors
from aotc.store.layout.names import NAME_LIMIT
from aotc.store.reference import Reference

MAKE_ANEW = "restore index.json from a copy; or `aotc fsck --repair` makes it anew, with new tags for all bundles"
_COMPARED = 50  # names; comparing two takes up to a millisecond


def no_layout(path: Path, error: OSError) -> NoReturn:
    """Raises the error of a path whose file `oci-layout` could not be read: NotFoundError, StoreError."""
    with typed_errors("open the store", path):
        if not path.exists():
            raise no_store(path)
        if not path.is_dir():
            raise StoreError(f"{path.absolute()} is a file; a store is a folder", hint="name the store's folder")
        if not (path / "oci-layout").exists():
            raise StoreError(
                f"{path.absolute()} is not a store: it has no file oci-layout",
                hint="`aotc fsck --repair` writes oci-layout again"
                if (path / "index.json").exists() and (path / "blobs").exists()
                else "name the folder that holds oci-layout, index.json and blobs",
                path=str(path),
            )
    raise store_error("open the store", path, error) from error


def no_index(path: Path) -> CorruptError:
    return CorruptError(
        f"{path.parent} has no index.json, so its tags are lost",
        hint=MAKE_ANEW,
        path=str(path),
        expected="a file",
        actual="nothing",
    )


def unprintable(path: Path | str) -> StoreError:
    return StoreError(
        f"{str(path)[:200]!r} is not a path of a store: it holds an unprintable character",
        hint="choose a folder whose name can be printed",
    )


def no_store(path: Path) -> NotFoundError:
    """There is nothing at `path`, which should be a store."""
    by_variable = os.environ.get("AOTC_STORE") == str(path)
    if near := _near(path):
        hint = f"did you mean {near}?"
    elif by_variable:
        hint = "AOTC_STORE should name a store; `aotc build` makes one"
    else:
        hint = "`aotc build` makes one; or name the folder of another"
    named = ", which AOTC_STORE names" if by_variable else ""
    return NotFoundError(f"there is no store at {path.absolute()}{named}", hint=hint, known=())


def _near(path: Path) -> Path | None:
    """The store beside `path` whose name is the most like its name."""
    try:
        stores = [folder.name for folder in path.absolute().parent.iterdir() if _is_store(folder)]
    except OSError:
        return None
    match = difflib.get_close_matches(path.name, stores, n=1, cutoff=0.8)
    return path.with_name(match[0]) if match else None


def _is_store(path: Path) -> bool:
    try:
        return (path / "oci-layout").is_file()
    except (OSError, ValueError):
        return False


def what_it_is(model: str, known: Sequence[str]) -> str:
    """A hint for a `model` that no bundle has: a store or a manifest of that name is in the working folder. Else ""."""
    if model and _is_store(Path(model)):
        return f"{model} is a store: write {model}#MODEL, and `aotc ls --store {model}` lists them"
    if Path(model).suffix in (".yaml", ".yml"):
        there = f"; there is {', '.join(known[:5])}" if known else ""
        return f"{model} is a manifest: name one of its models{there}"
    return ""


def not_found(reference: Reference, known: Sequence[str], where: str) -> NotFoundError:
    """`reference` names none of `known` in the store `where`."""
    nearest = nearest_first(reference.name, known)
    if other := what_it_is(reference.model, nearest):
        hint = other
    elif not nearest:
        hint = "the store holds no bundle; `aotc build` publishes one, `aotc merge` one of what shards have built"
    else:
        hint = f"there is {listed(nearest, 5)}"
    return NotFoundError(f"{reference.name} is not in the store {where}", hint=hint, known=tuple(nearest))


def nearest_first(name: str, known: Sequence[str]) -> list[str]:
    """Names that exist, the most like `name` first: of many, those that begin most like it are compared in full."""

    def in_common(other: str) -> int:
        return next((place for place, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), len(name))

    def likeness(other: str) -> float:
        return difflib.SequenceMatcher(None, name, other[: 2 * len(name) + NAME_LIMIT]).ratio()

    by_beginning = sorted(sorted(set(known)), key=in_common, reverse=True)
    return sorted(by_beginning[:_COMPARED], key=likeness, reverse=True) + by_beginning[_COMPARED:]
