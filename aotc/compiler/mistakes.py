"""All mistakes of a manifest at once: those of its form, of its options, and those that its factories show.

What looks for the last two imports torch, and is imported where there are mistakes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from aotc.errors import Issue, ManifestError
from aotc.manifest import Manifest, mistakes_in, read_manifest
from aotc.manifest.findings import line_of
from aotc.manifest.read import read_sound_parts


def read_checked(path: Path, only: Collection[str] = ()) -> Manifest:
    """As `read_manifest`. Raises ManifestError with the mistakes, too, that the sound parts of a manifest with mistakes
    show: then its factories are called."""
    try:
        return read_manifest(path, only)
    except ManifestError as error:
        try:
            manifest = read_sound_parts(path, only)
        except ManifestError:  # nothing of it can be read
            raise error from None
        raise _together(manifest, [*error.issues, *_settings(manifest)]) from None


def check_settings(manifest: Manifest) -> None:
    """Raises ManifestError where an option or a patch is wrong, with the mistakes that the factories show."""
    if issues := _settings(manifest):
        raise _together(manifest, issues)


def _settings(manifest: Manifest) -> list[Issue]:
    from aotc.compiler.codegen.option_check import check_options, check_patches

    return [*check_options(manifest), *check_patches(manifest)]


def _together(manifest: Manifest, issues: list[Issue]) -> ManifestError:
    from aotc.models.factory import visit_modules

    try:
        visit_modules(manifest, lambda *made: None)
    except ManifestError as error:
        issues += error.issues
    found = tuple(sorted(dict.fromkeys(issues), key=line_of))
    return ManifestError(mistakes_in(manifest.path, len(found)), issues=found)
