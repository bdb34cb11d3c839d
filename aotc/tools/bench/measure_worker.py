"""The measuring process: `python -P measure_worker.py JOB.json SPAWNED IMPORTS`.

It starts one contender, step by step as a service does, and then answers requests
(`aotc.tools.bench.contender_messages`). It is run as a file, with nothing imported but what the standard library needs:
importing aotc is a step of aotc's own start.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from aotc.tools.bench.contender_messages import (
        Answer,
        Burst,
        Calls,
        ContenderJob,
        ContenderRequest,
        Launches,
        Started,
        Timed,
    )

COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy", "aotc.compiler")
TORCH_FREE = {"onnxruntime", "openvino"}
"""Imports of contenders whose service imports no torch: here it comes after their start, uncounted."""
PROFILED_CALLS = 5
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch", "cudaLaunchCooperativeKernel")
"""How the names of the runtime's launching functions begin."""


class Clock:
    """Seconds of the steps of a start. `skip` leaves out what a service does not do."""

    def __init__(self, spawned: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = spawned

    def end(self, step: str) -> None:
        now = time.time()
        self.seconds[step] = now - self._last
        self._last = now

    def skip(self) -> None:
        self._last = time.time()


class Worker:
    """A contender that was started, and the inputs to call it with."""

    def __init__(self, job: ContenderJob, clock: Clock) -> None:
        import torch  # a peer's service does not

        from aotc.machine.processes import die_with_parent
        from aotc.models.calls import modes_of
        from aotc.models.factory import build_module
        from aotc.tools.bench.contenders import CONTENDERS

        die_with_parent()
        self.job, self.device = job, torch.device(job.attachment.device)
        self.modes: Callable[[], Any] = lambda: modes_of(job.spec, self.device.type)
        contender = CONTENDERS[job.contender]
        if contender.prepare is not None:
            load = contender.prepare(job.attachment)
            clock = forked(clock)
        clock.skip()
        if self.device.type == "cuda":
            torch.zeros(1, device=self.device)
            self.wait()
        clock.end("device")
        self.module = build_module(job.spec, Path(job.folder)).to(self.device) if contender.needs_module else None
        self.wait()
        clock.end("model")
        self.inputs = [torch.load(path, weights_only=False) for path in job.inputs]
        self.wait()
        self.contender = contender
        clock.skip()
        with self.modes():
            self.call = load() if contender.attach is None else contender.attach(self.module, job.attachment)
            self.wait()
            clock.end("load")
            output = self._call_once(0)
            clock.end("first call")
        self.started = self._started(clock, output)

    def wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def _call_once(self, sizes: int) -> Any:
        args, kwargs = self.inputs[sizes]
        output = self.call(*args, **kwargs)
        self.wait()
        return output

    def _started(self, clock: Clock, output: Any) -> Started:
        from aotc.tools.bench.contender_messages import Started

        used, compilers = self.memory(), imported_compilers()
        return Started(clock.seconds, compilers, difference(output, self.job.expected), *used)

    # -- requests -----------------------------------------------------------------------------------------------------

    def answer(self, request: ContenderRequest) -> Answer:
        from aotc.tools.bench.contender_messages import Burst, Calls, Profile, SaveMega, Timed, Used

        with self.modes():
            match request:
                case Calls():
                    return self.time_calls(request)
                case Burst():
                    return self.call_at_once(request)
                case Profile(sizes):
                    return self.count_launches(sizes)
                case SaveMega(path):
                    import torch

                    saved = torch.compiler.save_cache_artifacts()
                    if saved is None:
                        raise RuntimeError("torch.compiler.save_cache_artifacts() has nothing to save")
                    Path(path).write_bytes(saved[0])
                    return Timed(())
        return Used(*self.memory(), compiled_graphs(), imported_compilers(), self.misses())

    def time_calls(self, request: Calls) -> Timed:
        from aotc.machine.benchmarking import seconds_waited
        from aotc.tools.bench.contender_messages import Timed

        for _ in range(request.warm):
            self._call_once(request.sizes)
        gc.collect()
        ms = []
        waited = seconds_waited()
        for _ in range(request.count):
            began = time.perf_counter()
            self._call_once(request.sizes)
            ms.append((time.perf_counter() - began) * 1e3)
        return Timed(tuple(ms), max(0.0, seconds_waited() - waited))

    def call_at_once(self, request: Burst) -> Answer:
        import msgspec
        import torch

        from aotc.tools.bench.contender_messages import Counted

        alone, attach = self.call, self.contender.attach
        if attach is not None and (self.contender.name == "aotc" or self.contender.peer) and self.device.type == "cpu":
            self.call = attach(self.module, msgspec.structs.replace(self.job.attachment, threads=request.threads))
        before = torch.get_num_threads()
        each = max(1, before // request.threads)
        counts, errors = [0] * request.threads, []
        began = 0.0

        def begin() -> None:
            nonlocal began
            began = time.perf_counter()

        ready = threading.Barrier(request.threads, begin)

        def serve(number: int) -> None:
            try:
                torch.set_num_threads(each)
                with self.modes():
                    self._call_once(request.sizes)
                    ready.wait()
                    while not counts[number] or time.perf_counter() < began + request.seconds:
                        self._call_once(request.sizes)
                        counts[number] += 1
            except threading.BrokenBarrierError:
                pass
            except Exception as error:
                errors.append(error)
                ready.abort()

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(1, request.threads)]
        for thread in threads:
            thread.start()
        serve(0)  # one of them is this thread: torch.compile's CUDA graphs know no other
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        torch.set_num_threads(before)
        self.call = alone
        if errors:
            raise errors[0]
        return Counted(sum(counts), seconds)

    def count_launches(self, sizes: int) -> Launches:
        from aotc.tools.bench.contender_messages import Launches

        if self.device.type != "cuda":
            return Launches(None, None)
        import torch
        from torch.autograd.profiler import profile  # that of `torch.profiler` imports Inductor

        self._call_once(sizes)
        with profile(use_cpu=False, use_device="cuda", use_kineto=True) as profiled:
            for _ in range(PROFILED_CALLS):
                self._call_once(sizes)
        cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        events = list(profiled.function_events or ())
        host = sum(event.name.startswith(LAUNCHES) for event in events if event.device_type != cuda)
        kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in events if event.device_type == cuda)
        if not kernels:  # CUPTI is not there, or in another's use
            return Launches(None, None)
        return Launches(round(host / PROFILED_CALLS), round(kernels / PROFILED_CALLS))

    def memory(self) -> tuple[int, int | None]:
        import torch

        on_gpu = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else None
        return peak_rss(), on_gpu

    def misses(self) -> int:
        stats = getattr(self.call, "stats", None)
        return stats().misses if stats and self.contender.name.startswith("aotc") else 0


def forked(parent: Clock) -> Clock:
    """Continue in a forked child, whose start begins here: the parent's steps cost it no time."""
    from aotc.machine.processes import die_with_parent

    gc.freeze()
    clock = Clock(time.time())
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))
    die_with_parent()
    clock.seconds = dict.fromkeys(parent.seconds, 0.0)
    clock.end("python")
    return clock


def peak_rss() -> int:
    """The most bytes that were resident at a time; of this process, not of its children."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def imported_compilers() -> tuple[str, ...]:
    return tuple(name for name in COMPILERS if name in sys.modules)


def compiled_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def tensors_in(value: Any) -> list[Any]:
    """Every tensor of a result, on the CPU, in order. Classes of results need not be known to torch."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value.detach().to("cpu", copy=True)]
    values = value.values() if hasattr(value, "values") else value
    return [leaf for item in values for leaf in tensors_in(item)] if isinstance(value, dict | list | tuple) else []


def difference(output: Any, file: str) -> float | None:
    """The largest difference from eager's output, as a share of its largest value."""
    import torch

    expected, found = torch.load(file), tensors_in(output)
    if [one.shape for one in found] != [one.shape for one in expected]:
        return None
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.numel():
            largest = other.double().abs().max().clamp_min(1e-30)
            worst = max(worst, float((one.double() - other.double()).abs().max() / largest))
    return worst


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what a model prints goes to the log
    job_file, spawned, imports = sys.argv[1:]
    clock = Clock(float(spawned))
    clock.end("python")
    if TORCH_FREE.isdisjoint(imports.split(",")):
        importlib.import_module("torch")
    clock.end("import torch")
    for name in filter(None, imports.split(",")):
        importlib.import_module(name)
    clock.end("imports")
    serve(Path(job_file), clock, answers)
    answers.flush()
    os._exit(0)  # tearing down a compiler's worker processes can take seconds


def serve(job_file: Path, clock: Clock, answers: TextIO) -> None:
    import msgspec

    from aotc.errors import AotcError
    from aotc.models.factory import told
    from aotc.tools.bench.contender_messages import ContenderJob, ContenderRequest, Failed

    encode = msgspec.json.encode
    worker = Worker(msgspec.json.decode(job_file.read_bytes(), type=ContenderJob), clock)
    answers.write(encode(worker.started).decode() + "\n")
    for line in sys.stdin:
        try:
            answer: Answer = worker.answer(msgspec.json.decode(line, type=ContenderRequest))
        except Exception as error:
            answer = Failed(str(error) if isinstance(error, AotcError) else told(error))
        answers.write(encode(answer).decode() + "\n")


if __name__ == "__main__":
    sys.exit(main())
