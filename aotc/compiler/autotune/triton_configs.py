"""Decide the configuration of each Triton kernel."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from aotc.compiler.autotune.picker import UNMEASURED, Hook, Picker, with_time
from aotc.compiler.patches.shared.inductor import inductor
from aotc.picks import Candidate, Pick
from aotc.records import Scalar


def kernel_hooks(picker: Picker) -> list[Hook]:
    """Hooks for the configuration of each Triton kernel: block sizes, warps, stages.

    Inductor compiles kernels in its own processes, so these read a pinned configuration from a file, which
    `place_kernel_pins` writes; one that another unit measured is written just before the kernel is compiled.
    """
    autotuner = inductor("runtime.triton_heuristics").CachingAutotuner
    compiler = inductor("async_compile").AsyncCompile
    bench, save, add_smaller = autotuner.bench, autotuner.save_gpu_kernel, autotuner._dynamic_scale_rblock
    compile = compiler.triton
    times: dict[int, list[Candidate]] = {}
    owners: list[Any] = []  # keeps these objects alive, so that their ids are not reused
    placed: dict[str, Pick] = {}

    def compiled(self: Any, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        if not picker.shares:
            return compile(self, kernel_name, source_code, *args, **kwargs)
        source, _ = inductor("codecache").PyCodeCache.write(source_code)
        picker.about_to_compile(source)
        known = picker.find_shared(_kernel_form(source))
        if known and not any(pin.inputs == known.inputs for pin in picker.pins if pin.kind == "kernel"):
            placed[source] = known
            _place_kernel(known)
        return compile(self, kernel_name, source_code, *args, **kwargs)

    def benched(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> float:
        if picker.locked:
            picker.must_not_measure(_kernel(self))
            return UNMEASURED
        picker.measurements += 1
        ms = float(bench(self, launcher, *args, **kwargs))
        owners.append(self)
        times.setdefault(id(self), []).append(with_time(_configuration(launcher.config), ms))
        return ms

    def saved(self: Any, stream: Any, launcher: Any) -> Any:
        question, taken = _kernel(self), _configuration(launcher.config)
        measured = times.get(id(self))
        source = Path(self.filename or "").stem
        if question.subject.startswith("Placeholder"):
            return save(self, stream, launcher)  # a candidate of a race, which is not part of the unit
        picker.has_compiled(source)
        if measured is None and (pin := picker.pin_for(question)) and pin.winner.same_code(taken):
            picker.take(pin)
        elif measured is None and (known := placed.get(source)) and known.winner.same_code(taken):
            picker.take_shared(known)
        else:
            fastest: dict[str, Candidate] = {}
            for candidate in sorted(measured or [taken], key=lambda c: c.ms if c.ms is not None else math.inf):
                fastest.setdefault(str(candidate.config), candidate)
            fastest.setdefault(str(taken.config), taken)
            picker.keep(question, tuple(fastest.values()), taken, _kernel_form(source) if measured and source else None)
        return save(self, stream, launcher)

    def smaller_added(self: Any) -> None:
        """Keep a configuration from the cache. torch 2.11 would tune it again: it adds a smaller block for a reduction,
        and the mark `found_by_coordesc` is lost when a configuration is sent from the compile process."""
        if (self.autotune_cache_info or {}).get("autotune_cache_state") == "hit":
            for result in self.compile_results:
                result.config.found_by_coordesc = True
        else:
            add_smaller(self)

    return [
        (autotuner, "bench", benched),
        (autotuner, "save_gpu_kernel", saved),
        (autotuner, "_dynamic_scale_rblock", smaller_added),
        (compiler, "triton", compiled),
    ]


def _kernel_form(source: str) -> Any:
    """Inductor names a kernel's file by the hash of its source, which contains the sizes and the GPU."""
    return ["kernel", source]


_BEST_CONFIG = ("num_warps", "num_stages", "num_consumer_groups", "num_buffers_warp_spec")


def _configuration(config: Any) -> Candidate:
    extra = {name: getattr(config, name) for name in _BEST_CONFIG if getattr(config, name, 0)}
    return Candidate("triton", {**{str(k): _plain(v) for k, v in sorted(config.kwargs.items())}, **extra})


def _plain(value: Any) -> Scalar:
    return value if isinstance(value, int | float | str | None) else str(value)


def _kernel(autotuner: Any) -> Pick:
    """The question for a kernel: its name and source; `detail` has the file of Inductor's autotune cache for it."""
    heuristic = getattr(autotuner.heuristic_type, "name", str(autotuner.heuristic_type)).lower()
    detail: dict[str, Scalar] = {"heuristic": heuristic}
    cache = autotuner.save_cache_hook.__self__ if autotuner.save_cache_hook else None
    if cache is not None and cache.local_cache:
        file = Path(cache.local_cache[1])
        detail["file"] = f"{file.parent.name}/{file.name}"
        detail["configs_hash"] = cache.configs_hash
    name = str(autotuner.inductor_meta.get("kernel_name", autotuner.fn.__name__))
    source = Path(autotuner.filename or "").stem
    return Pick(
        kind="kernel", subject=name, candidates=(), inputs=(f"source {source}",) if source else (), detail=detail
    )


def place_kernel_pins(picker: Picker) -> None:
    for pin in picker.pins:
        if pin.kind == "kernel":
            _place_kernel(pin)


def _place_kernel(pin: Pick) -> None:
    """Write a configuration to the file of Inductor's autotune cache for that kernel."""
    from torch._inductor.runtime.triton_compat import HAS_WARP_SPEC

    file = str(pin.detail.get("file", ""))
    if not re.fullmatch(r"\w+/\w+\.best_config", file):
        return
    unsaid = dict.fromkeys(_BEST_CONFIG[2:], 0) if HAS_WARP_SPEC else {}
    found = {
        **unsaid,
        **pin.winner.config,
        "configs_hash": pin.detail.get("configs_hash"),
        "found_by_coordesc": True,
        "time_taken_ms": 0,
        "triton_cache_hash": None,
    }
    path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
