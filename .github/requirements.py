"""Print what aotc with some of its extras needs, without torch and aotc itself: `python requirements.py [EXTRA ...]`.

Without arguments, to build: for a torch that aotc's own requirement does not allow yet.
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]


def needed(extra: str) -> list[str]:
    """The requirements of an extra, and of those that it names."""
    found: list[str] = []
    for each in extras[extra]:
        named = re.fullmatch(r"aotc\[(.+)\]", each)
        found += [each for name in named[1].split(",") for each in needed(name)] if named else [each]
    return found


asked = [*project["dependencies"], *(each for extra in sys.argv[1:] or ["build"] for each in needed(extra))]
print(*dict.fromkeys(each for each in asked if not each.startswith("torch>")), sep="\n")
