"""How the libraries of an extra are installed. No index has a release of aotc yet, so a hint names them themselves."""

from __future__ import annotations

import re
import shlex
from importlib import metadata

_REQUIREMENT = re.compile(r"""(?P<library>[^;]+?)\s*;\s*extra\s*==\s*["'](?P<extra>[^"']+)["']""")


def install_hint(extra: str) -> str:
    """`pip install 'requests>=2.32' 'urllib3>=2.2'`, and the extra's name, as the installed package's metadata says."""
    libraries = _libraries(extra)
    named = f"pip install 'aotc[{extra}]'"
    return f"pip install {' '.join(map(shlex.quote, libraries))} (what {named} installs)" if libraries else named


def _libraries(extra: str) -> list[str]:
    try:
        given = metadata.requires("aotc") or []
    except metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for match in filter(None, map(_REQUIREMENT.fullmatch, given)):
        if match["extra"] != extra:
            continue
        library = match["library"]
        if nested := re.fullmatch(r"aotc\[([^\]]+)\]", library):
            found += [each for name in nested[1].split(",") for each in _libraries(name.strip())]
        else:
            found.append(library)
    return found
