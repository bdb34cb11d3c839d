"""Why a unit failed, for a person: the stage, the model's own line, what to change."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch

from aotc.errors import AotcError, BuildError

_TORCH = str(Path(torch.__file__).parent)
_AOTC = str(Path(__file__).parents[1])

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"GuardOnDataDependentSymNode|data-dependent|DataDependentOutputException|Could not guard on|Could not extract",
        "the code branches on, or sizes something by, a tensor's value: use torch.where or torch.cond for the branch, "
        "or keep this part out of forward",
    ),
    (
        r"missing fake|fake impl|register_fake|does not have a fake|no fake",
        "a custom operator needs a fake kernel that gives the output's shape and dtype:\n"
        '      @torch.library.register_fake("namespace::operator")\n'
        "      def _(x):\n"
        "          return torch.empty_like(x)",
    ),
    (r"out of memory|OutOfMemoryError", "free the device, or build the large buckets alone with --jobs 1"),
    (
        r"No C\+\+ compiler|InvalidCxxCompiler|CppCompileError|No working C\+\+",
        "a C++ compiler is needed where aotc builds (not where it loads): install g++ or set CXX",
    ),
    (r"No space left on device", "free the disk, or set TMPDIR to a folder with room"),
    (
        r"specialized|ConstraintViolation|Constraints violated|suggested fixes|Suggested fixes",
        "the model does not take every size of the range as one graph; the log says which: narrow the range, give it "
        "`multiple_of`, or list fixed buckets",
    ),
    (r"mutat|in-place", "write the change as a new tensor, or keep the buffer out of forward"),
)


def explain_failure(error: BaseException, stage: str) -> BuildError:
    """The BuildError for whatever a unit raised."""
    if isinstance(error, BuildError):
        return error.with_fields(stage=error.fields.get("stage", stage), source=error.fields.get("source", ""))
    source = model_line(error)
    text = str(error).strip()
    own = error.hint if isinstance(error, AotcError) else ""
    hint = own or hint_for(f"{type(error).__name__} {text}")
    proposal = _proposed_ranges(text)
    return BuildError(
        f"{stage}: {type(error).__name__}: {_first_lines(text)}",
        hint=f"{proposal}; {hint}" if proposal and hint else proposal or hint,
        stage=stage,
        source=source,
    )


def hint_for(text: str) -> str:
    """What to do about a failure whose message or log is `text`; "" where nothing is known."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, text)), "")


def _first_lines(text: str, count: int = 6, width: int = 400) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n    ".join(line[:width] for line in lines[:count])


def model_line(error: BaseException) -> str:
    """`file.py:12 in forward: x = …`: the innermost frame that is neither torch's nor aotc's nor the interpreter's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _AOTC, "<")) and "/lib/python" not in frame.filename
    ]
    if frames:
        frame = frames[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {line}"
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error))
    own = [match for match in found if not match[0].startswith((_TORCH, _AOTC))]
    return f"{Path(own[-1][0]).name}:{own[-1][1]} in {own[-1][2]}" if own else ""


_FIX = re.compile(r"^\s*(?P<name>\w+) = (?P<value>.+)$", re.MULTILINE)


def _proposed_ranges(text: str) -> str:
    """torch.export's suggested fixes in the manifest's words."""
    _, _, fixes = text.partition("uggested fixes")
    proposals = []
    for match in _FIX.finditer(fixes):
        name, value = match["name"], match["value"].strip()
        if times := re.fullmatch(r"(\d+)\s*\*\s*_\w+", value):
            proposals.append(f"`{name}: {{range: […], multiple_of: {times[1]}}}`")
        elif value.isdigit():
            proposals.append(f"`{name}: {value}` (one fixed size)")
        elif limits := re.search(r"(min|max)=(\d+)(?:, max=(\d+))?", value):
            proposals.append(f"`{name}` with {limits[0]}")
    return f"the model needs, in the manifest's words: {', '.join(proposals)}" if proposals else ""
