"""The protocol of the measuring process: one JSON line for each request and each answer.

The process begins with its start, which it answers with `Started`. Then it answers requests, until its input ends.
"""

from __future__ import annotations

import msgspec

from aotc.manifest.types import ModelSpec
from aotc.tools.bench.contenders import Attachment


class ContenderJob(msgspec.Struct, frozen=True):
    """What a measuring process is to start.

    folder: where the factory is found. inputs: a file for each set of sizes that will be called; the first
    one gives the first output. expected: the file of eager's first output.
    """

    contender: str
    spec: ModelSpec
    folder: str
    attachment: Attachment
    inputs: tuple[str, ...]
    expected: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A start, to the first output.

    seconds: of each step, see STEPS. compilers: which of them were imported. difference: the largest from eager's
    output, as a share of its largest value; None where they cannot be compared. peak_rss, peak_gpu: bytes; the latter
    reserved by torch's allocator, None without a GPU.
    """

    seconds: dict[str, float]
    compilers: tuple[str, ...]
    difference: float | None
    peak_rss: int
    peak_gpu: int | None = None

    @property
    def first_output(self) -> float:
        """Seconds from the start of the process to its first output."""
        return sum(self.seconds.values())

    @property
    def attached(self) -> float:
        """Seconds from the module to the first output."""
        return self.seconds["load"] + self.seconds["first call"]


STEPS = {
    "python": "the interpreter",
    "import torch": "import torch",
    "imports": "imports of the contender's own",
    "device": "the GPU's context",
    "model": "the module, its library's imports and its weights",
    "load": "from the module to a callable",
    "first call": "the first call",
}
"""The steps of a start, in order. Not counted: reading the inputs and importing the code that measures."""


class Calls(msgspec.Struct, frozen=True, tag="calls"):
    """Call `count` times with the inputs number `sizes`, after `warm` calls that are not timed."""

    sizes: int
    count: int
    warm: int = 2


class Burst(msgspec.Struct, frozen=True, tag="burst"):
    """Call from so many threads at a time, for so many seconds."""

    sizes: int
    threads: int
    seconds: float


class Profile(msgspec.Struct, frozen=True, tag="profile"):
    """Count the launches of one call."""

    sizes: int


class SaveMega(msgspec.Struct, frozen=True, tag="save mega"):
    """Write torch's cache artifacts to the file."""

    path: str


class Usage(msgspec.Struct, frozen=True, tag="usage"):
    """Ask what the process has used until now."""


ContenderRequest = Calls | Burst | Profile | SaveMega | Usage


class Timed(msgspec.Struct, frozen=True, tag="timed"):
    """Milliseconds of each call, until its result was complete. waited: seconds that threads waited for a CPU."""

    ms: tuple[float, ...]
    waited: float = 0.0


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """How many calls ended within how many seconds."""

    calls: int
    seconds: float

    @property
    def rate(self) -> str:
        """Calls a second: `36,030`, `9.53`."""
        rate = self.calls / self.seconds
        return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


class Launches(msgspec.Struct, frozen=True, tag="launches"):
    """Of one call: launches by the host (a CUDA graph is one), and kernels that ran. None without a GPU."""

    host: int | None
    kernels: int | None


class Used(msgspec.Struct, frozen=True, tag="used"):
    """Bytes at most, compiled graphs, the compilers imported, and calls that no bucket of aotc took."""

    peak_rss: int
    peak_gpu: int | None
    graphs: int
    compilers: tuple[str, ...]
    misses: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request could not be done; the process goes on."""

    message: str


Answer = Started | Timed | Counted | Launches | Used | Failed
