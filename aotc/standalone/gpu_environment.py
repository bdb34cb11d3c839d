"""The GPUs of this machine, by the driver alone: which one a load means, and whether an artifact's code runs on it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from aotc.errors import BindError, EnvironmentMismatchError, Issue, LibraryError, MemoryLimitError
from aotc.machine.targets import cuda_target, parse_target
from aotc.machine.this_host import numbers
from aotc.records import Artifact, Environment
from aotc.standalone.cpu_environment import cpu_environment, open_cpu

_DEVICE = re.compile(r"(?:(?P<cpu>cpu)|cuda(?::(?P<number>\d{1,4}))?)")
_LOST = frozenset({700, 702, 710, 713, 714, 715, 716, 717, 718, 719, 721, 999})
"""CUresult: errors after which the process can use no GPU any more, as CUDA_ERROR_ILLEGAL_ADDRESS."""
_NONE = frozenset({100, 101})
"""CUDA_ERROR_NO_DEVICE, also where there is no driver or one that is too old, and CUDA_ERROR_INVALID_DEVICE."""
_CAPTURE = range(900, 909)
"""What a capture of a CUDA graph cannot hold, from CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED on."""
_FORKED = 3
"""CUDA_ERROR_NOT_INITIALIZED: what `cuInit` gives a child whose parent has called it."""


def gpu_number(device: str | None) -> int | None:
    """`cuda:1` is 1, `cuda` is 0, `cpu` and None are None. Raises BindError."""
    if device is None:
        return None
    found = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise BindError(f"device is {device!r:.100}", hint='give device="cuda", "cuda:1" and so on, "cpu", or none')
    return None if found["cpu"] else int(found["number"] or 0)


def gpu_environment(number: int) -> Environment:
    """This machine with that GPU, which is opened: `cuda` is the newest CUDA that its driver runs.

    Raises EnvironmentMismatchError where there is no such GPU, or no driver.
    """
    here, core = cpu_environment(), open_cpu()
    try:
        name, major, minor, version = core.open_gpu(number)
    except core.GpuError as error:
        failure = failure_of(error)
        none = "install NVIDIA's driver, and run containers with `--gpus`; CUDA_VISIBLE_DEVICES may hide a GPU"
        raise EnvironmentMismatchError(
            f"GPU {number} cannot be used: {failure.message}",
            hint=none if error.args[1] in _NONE else failure.hint,
            here=here,
        ) from failure
    capability, cuda = f"{major}.{minor}", f"{version // 1000}.{version % 1000 // 10}"
    return msgspec.structs.replace(here, cuda_capability=capability, cuda=cuda, gpu=name)


def gpu_mismatches(artifact: Artifact, here: Environment) -> list[Issue]:
    """Why the code does not run on the GPU of `here`."""
    needed, issues = artifact.environment, list[Issue]()
    built, actual = numbers(needed.cuda_capability, 2), numbers(here.cuda_capability, 2)
    if built != actual and not (needed.ptx and actual > built):
        this = parse_target(cuda_target((actual[0], actual[1]))).name
        said = f"built for {artifact.target}, this GPU ({here.gpu}) is {this}"
        hint = f"build the model with `{this}` among its targets"
        issues.append(Issue(said, expected=needed.cuda_capability, actual=here.cuda_capability, hint=hint))
    parts = 1 if built == actual else 2  # a driver compiles no PTX of a later minor version
    if numbers(here.cuda, parts) < numbers(needed.cuda, parts):
        said = f"built with CUDA {needed.cuda}, this machine's driver runs code of up to CUDA {here.cuda}"
        hint = "install a newer driver, or build with a torch of an older CUDA"
        issues.append(Issue(said, expected=needed.cuda, actual=here.cuda, hint=hint))
    return issues


def on_the_gpu(tensors: Sequence[Any], number: int | None) -> list[Any]:
    """The tensors on that GPU, or as they are: those that lie there already are left. Raises MemoryLimitError and
    LibraryError."""
    if number is None:
        return list(tensors)
    with gpu_errors():
        return open_cpu().to_gpu(list(tensors), number)  # type: ignore[no-any-return]


@contextmanager
def gpu_errors() -> Iterator[None]:
    """Raises what the driver says as `failure_of` has it."""
    try:
        yield
    except open_cpu().GpuError as error:
        raise failure_of(error) from None


def failure_of(error: RuntimeError) -> LibraryError | MemoryLimitError:
    """The error of a call or a load that failed: with both values where a GPU has too little memory."""
    if not isinstance(error, open_cpu().GpuError):
        return LibraryError(str(error))
    words, code, by_driver, asked, available, total = error.args
    if asked:
        return MemoryLimitError(
            f"the GPU has too little memory: {_mib(asked)} were asked for at once, {_mib(available)} of {_mib(total)} "
            f"are free ({words})",
            hint="close other models and processes on this GPU, serve smaller buckets, or take a larger GPU",
            asked=asked,
            used=total - available,
            limit=total,
        )
    hint = "the process can use no GPU any more: end it, and start another" if code in _LOST else ""
    if code == _FORKED and by_driver:
        hint = (
            "a child of a process that has opened a GPU, as `aotc.early` does, can use none: open it in the child alone"
        )
    if code in _CAPTURE:
        hint = "set `cuda_graphs: never` for it; a graph holds no host synchronisation and no CPU operator"
    return LibraryError(f"the GPU's driver failed: {words}" if by_driver else words, hint=hint)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


if __name__ == "__main__":  # for a process whose children are to open the GPU
    try:
        sys.stdout.write(msgspec.json.encode(gpu_environment(0)).decode())
    except EnvironmentMismatchError as error:
        sys.exit(error.message)
