"""Sizes: code lines of each room, and their change since the last tag; the loader; the age of the last run on a GPU.

A code line of Python holds a token other than a comment, docstring or import; one of C++ is not blank, nor a comment.

python .ci/sizes.py                # of HEAD, with an aotc that can be imported
python .ci/sizes.py main           # and its change since another commit: what a branch adds
"""

from __future__ import annotations

import ast
import functools
import io
import json
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
GPU_LOG = ROOT / "tests" / "cuda" / "last_run.json"


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def said(*arguments: str) -> str:
    """What git prints; "" where it fails."""
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip() if ran.returncode == 0 else ""


def base() -> tuple[str, str]:
    """A commit to compare with, and what it is: the last tag, or the commit that began the changelog's last version."""
    if tag := said("describe", "--tags", "--abbrev=0"):
        return tag, f"the tag {tag}"
    version = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    commits = said("log", "--format=%H", f"-S{version}\n", "--", "CHANGELOG.md").split()
    return (commits[-1], f"{commits[-1][:9]}, where {version[3:]} begins; there is no tag") if commits else ("", "")


def room_of(path: str) -> str:
    first, *rest = Path(path).parts
    if first != "aotc":
        return first
    return f"aotc/{rest[0]}" if len(rest) > 1 else "aotc/*.py"


@functools.cache  # most files of two commits are the same
def python_lines(source: bytes) -> int:
    found: set[int] = set()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str
        )
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def cpp_lines(source: bytes) -> int:
    return sum(bool(line.strip()) and not line.lstrip().startswith(b"//") for line in source.splitlines())


COUNTS = {".py": python_lines, ".cpp": cpp_lines, ".h": cpp_lines}


def lines_at(commit: str) -> Counter[str]:
    """Code lines, by room."""
    found: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        for member in archive:
            if member.isfile() and (count := COUNTS.get(Path(member.name).suffix)):
                file = archive.extractfile(member)
                assert file is not None
                found[room_of(member.name)] += count(file.read())
    return found


def loader() -> list[Path]:
    """The files of aotc that a load imports."""
    ours = "module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'aotc'"
    script = f"import sys, aotc; aotc.load; print(*({ours}))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return list(map(Path, ran.stdout.split()))


def table(other: str) -> str:
    now = lines_at("HEAD")
    tag, what = base()
    bases = {title: lines_at(commit) for commit, title in ((tag, what), (other, other)) if commit}

    def row(name: str, *rooms: str) -> str:
        counts = [sum(lines[room] for room in rooms) for lines in (now, *bases.values())]
        return f"  {name:<22}{counts[0]:>8,}" + "".join(f"{counts[0] - before:>+9,}" for before in counts[1:])

    rooms = sorted(now.keys() | {room for before in bases.values() for room in before})
    since = ", and since ".join(bases) or "nothing: the history has no earlier version"
    files = loader()
    return "\n".join(
        (
            f"code lines of each room, and the change since {since}",
            *(row(room, room) for room in rooms),
            row("aotc in all", *(room for room in rooms if room.startswith("aotc"))),
            f"the loader: {len(files)} modules, {sum(python_lines(file.read_bytes()) for file in files):,} code lines",
        )
    )


def gpu_log() -> str:
    if not GPU_LOG.exists():
        return "the suite on a GPU: no log of a run (tests/cuda/last_run.json)"
    run = json.loads(GPU_LOG.read_text())
    counts = f"{run['passed']} passed, {run['failed']} failed, {run['skipped']} skipped in {run['seconds']} s"
    text = (
        f"the suite on a GPU: {counts}; {run['date']}, {run['gpu']}, torch {run['torch']}, commit {run['commit'][:9]}"
    )
    since = said("rev-list", "--count", f"{run['commit'].rstrip('+')}..HEAD", "--", "aotc")
    text += f"; {since} commits touched aotc/ since" if since else "; that commit is not in this history"
    return text + ("; a release needs 0 failures" if run["failed"] else "")


if __name__ == "__main__":
    print(table(sys.argv[1] if sys.argv[1:] else ""))
    print(gpu_log())
