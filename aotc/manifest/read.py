"""Reading a manifest: file → document → checks → `Manifest`, or one error with every mistake in it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from aotc.errors import Issue, ManifestError
from aotc.manifest.check_models import check_models, sound_parts
from aotc.manifest.document import read_document
from aotc.manifest.findings import Findings, did_you_mean
from aotc.manifest.recorded_values import with_recorded_values
from aotc.manifest.structure import check_structure
from aotc.manifest.types import Manifest, ModelSpec


def read_manifest(path: str | os.PathLike[str], only: Collection[str] = ()) -> Manifest:
    """Read and check a manifest; with `only`, keep the models of those names (all models are checked even so).

    No code of the user runs: factories are called by `aotc.models.factory.build_modules`. Raises ManifestError with
    every mistake as an Issue whose `where` is `file:line`, the file being named as the caller named it.
    """
    file = Path(path)
    check_path(file.absolute().parent)
    document = read_document(_read_bytes(file), str(file))
    findings = Findings(str(file), document.lines, document.issues, document.broken)
    check_structure(document.data, findings)
    models = check_models(document.data, findings)
    models = with_recorded_values(models, file.absolute().parent, findings)
    _check_only(only, _names(document.data), findings)
    if issues := findings.issues:
        raise ManifestError(mistakes_in(file, len(issues)), issues=issues)
    folder = file.absolute().parent
    picks = folder / document.data["picks"] if "picks" in document.data else None
    auto = frozenset(name for name, own in document.data["models"].items() if own["inputs"] == "auto")
    return Manifest(file, folder, _selected(models, only), document.lines, picks, auto)


def read_sound_parts(path: str | os.PathLike[str], only: Collection[str] = ()) -> Manifest:
    """What can be checked further of a manifest that `read_manifest` refuses: see
    `aotc.manifest.check_models.sound_parts`.

    Raises ManifestError where nothing of it can be read.
    """
    file = Path(path)
    document = read_document(_read_bytes(file), str(file))
    findings = Findings(str(file), document.lines, document.issues, document.broken)
    check_structure(document.data, findings)
    check_models(document.data, findings)
    models = _selected(sound_parts(document.data, findings), only)
    auto = frozenset(name for name in models if document.data["models"][name]["inputs"] == "auto")
    return Manifest(file, file.absolute().parent, models, document.lines, auto=auto)


def _instead(file: Path) -> str:
    """The hint for a missing manifest: the file with the other suffix, .yaml or .yml, if there is one."""
    near = [other for suffix in (".yaml", ".yml") if (other := file.with_suffix(suffix)) != file and other.is_file()]
    return f"did you mean {near[0]}?" if near else "`aotc init` writes a first manifest"


def mistakes_in(file: Path, count: int) -> str:
    """The message of an error that lists a manifest's mistakes."""
    return f"{file} has {count} mistake{'' if count == 1 else 's'}"


def check_path(path: Path) -> None:
    """Raises ManifestError for a path that is not UTF-8, and so can be in no job and no record."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ManifestError(f"the path {str(path)!r} is not UTF-8", hint="choose one that can be printed") from None


def _read_bytes(file: Path) -> bytes:
    if file.suffix == ".py":
        raise _unreadable(file, "this is a Python file; a manifest is YAML", "`aotc init` writes a first manifest")
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise _unreadable(file, "there is no such file", _instead(file)) from None
    except IsADirectoryError:
        raise _unreadable(file, "this is a folder, not a file", "name the manifest in it, a YAML file") from None
    except OSError as error:
        raise _unreadable(file, f"the file cannot be read: {error.strerror}", "look at its permissions") from error


def _unreadable(file: Path, message: str, hint: str) -> ManifestError:
    return ManifestError("the manifest cannot be read", issues=(Issue(message, where=str(file.absolute()), hint=hint),))


def _names(data: object) -> Collection[str]:
    models = data.get("models") if isinstance(data, dict) else None
    return models if isinstance(models, dict) else ()


def _check_only(only: Collection[str], known: Collection[str], findings: Findings) -> None:
    for name in only:
        if name not in known:
            findings.add(("models",), f"there is no model `{name}` in this manifest", hint=did_you_mean(name, known))


def _selected(models: dict[str, ModelSpec], only: Collection[str]) -> dict[str, ModelSpec]:
    return {name: spec for name, spec in models.items() if not only or name in only}
