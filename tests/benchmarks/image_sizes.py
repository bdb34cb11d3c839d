"""What the stages of examples/container/Dockerfile add to their base image: python tests/benchmarks/image_sizes.py

The sums of the files that the installed distributions and Debian packages have: no image is built for it. Run it where
torch is the build that the image has.
"""

from __future__ import annotations

import re
import subprocess
from importlib import metadata

MB = 1e6
STAGES = {"base": ("torch",), "service": ("aotc[torch,sign]",), "tools": ("aotc[build,oci,sign]",)}
WITH_COMPILER = "tools"
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")


def closure(requirements: tuple[str, ...]) -> set[str]:
    """The installed distributions that these require, and all that those do."""
    wanted, found = list(requirements), set[str]()
    seen = set[str]()
    while wanted:
        text = wanted.pop()
        match = _NAME.match(text)
        assert match
        name, extras = re.sub(r"[-_.]+", "-", match[1]).lower(), set(filter(None, re.split(r"\s*,\s*", match[2] or "")))
        if (key := f"{name}{sorted(extras)}") in seen:
            continue
        seen.add(key)
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for one in requires:
            of_extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", one)
            if of_extra is None or of_extra[1] in extras:
                wanted.append(one)
    return found


def size_of(name: str) -> int:
    files = metadata.files(name) or []
    paths = [path for file in files if (path := file.locate()).is_file()]  # type: ignore[attr-defined]
    return sum(path.stat().st_size for path in paths)


def compiler() -> float:
    """Bytes of g++ and what it needs that a slim image lacks: packages that are neither required nor important."""
    options = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    listed = subprocess.run(["apt-cache", "depends", "--recurse", *options, "g++"], capture_output=True, text=True)
    names = sorted({line for line in listed.stdout.splitlines() if re.fullmatch(r"[a-z0-9][\w.+-]*", line)})
    form = "${Priority} ${Installed-Size}\n"
    shown = subprocess.run(["dpkg-query", "-W", "-f", form, *names], capture_output=True, text=True).stdout
    rows = [line.split() for line in shown.splitlines()]
    return sum(1024.0 * int(size) for priority, size in rows if priority not in ("required", "important"))


def main() -> None:
    before: set[str] = set()
    print("| stage | adds to its base | MB |\n|---|---|---:|")
    for stage, requirements in STAGES.items():
        added = closure(requirements) - (closure(STAGES["base"]) if stage != "base" else before)
        size = sum(map(size_of, added)) + (compiler() if stage == WITH_COMPILER else 0)
        largest = sorted(added, key=size_of, reverse=True)[:3]
        with_gcc = " and g++" if stage == WITH_COMPILER else ""
        print(
            f"| `{stage}` | {len(added)} distributions{with_gcc}, the largest {', '.join(largest)} | {size / MB:,.0f} |"
        )


if __name__ == "__main__":
    main()
