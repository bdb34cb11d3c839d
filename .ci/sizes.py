"""Sizes: lines of each room, and their change since the last tag; the loader; and how old the last run on a GPU is.

python .ci/sizes.py                # of the checkout, with an aotc that can be imported
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def lines_at(commit: str) -> Counter[str]:
    """Lines of Python, by room."""
    found: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".py"):
                file = archive.extractfile(member)
                assert file is not None
                found[room_of(member.name)] += file.read().count(b"\n")
    return found


def loader() -> list[Path]:
    """The files of aotc that a load imports."""
    ours = "module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'aotc'"
    script = f"import sys, aotc; aotc.load; print(*({ours}))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return list(map(Path, ran.stdout.split()))


def table() -> str:
    now = lines_at("HEAD")
    commit, what = base()
    before = lines_at(commit) if commit else None
    rows = [
        f"lines of Python of each room, and the change since {what or 'nothing: the history has no earlier version'}"
    ]
    for room in sorted(now.keys() | (before or now).keys()):
        change = f"{now[room] - before[room]:+,}" if before else ""
        rows.append(f"  {room:<22}{now[room]:>8,}{change:>9}")
    change = f"{now.total() - before.total():+,}" if before else ""
    rows.append(f"  {'in all':<22}{now.total():>8,}{change:>9}")
    files = loader()
    rows.append(f"the loader: {len(files)} modules, {sum(file.read_bytes().count(10) for file in files):,} lines")
    return "\n".join(rows)


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
    print(table())
    print(gpu_log())
