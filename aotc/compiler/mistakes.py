"""All mistakes of a manifest at once: those of its form, of its options, and those that its factories show."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from aotc.compiler.codegen.option_check import check_options, check_patches
from aotc.errors import Issue, ManifestError
from aotc.manifest import Manifest, mistakes_in
from aotc.manifest.read import read_sound_parts
from aotc.models.factory import build_modules


def with_further(error: ManifestError, path: Path, only: Collection[str] = ()) -> ManifestError:
    """The error that `read_manifest` raised, with the mistakes that its sound parts show. Factories are called."""
    try:
        manifest = read_sound_parts(path, only)
    except ManifestError:  # nothing of it can be read
        return error
    return _together(manifest, [*error.issues, *check_options(manifest), *check_patches(manifest)])


def check_settings(manifest: Manifest) -> None:
    """Raises ManifestError where an option or a patch is wrong, with the mistakes that the factories show."""
    if issues := [*check_options(manifest), *check_patches(manifest)]:
        raise _together(manifest, issues)


def _together(manifest: Manifest, issues: list[Issue]) -> ManifestError:
    try:
        build_modules(manifest)
    except ManifestError as error:
        issues += error.issues
    found = tuple(sorted(dict.fromkeys(issues), key=_line_of))
    return ManifestError(mistakes_in(manifest.path, len(found)), issues=found)


def _line_of(issue: Issue) -> int:
    line = issue.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 0
