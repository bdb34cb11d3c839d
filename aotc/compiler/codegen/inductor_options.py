"""Inductor's options for a unit: the mode's, aotc's own, and the manifest's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.codegen.standalone_code import OPTIONS
from aotc.compiler.patches.shared.inductor import TMA_TEMPLATES
from aotc.machine.targets import Target
from aotc.manifest import ModelSpec


def inductor_options(spec: ModelSpec, target: Target) -> dict[str, Any]:
    """The Inductor options of a unit: the mode's, aotc's own, and last the user's."""
    from torch._inductor import list_mode_options

    mode = {name: value for name, value in list_mode_options(spec.mode).items() if name != "triton.cudagraphs"}
    own: dict[str, Any] = {
        "aot_inductor.package": True,
        "freezing": spec.weights == "frozen",
        # Frozen weights lie beside the library, where all buckets share them: see `library_constants`.
        "aot_inductor.package_constants_in_so": spec.weights == "live",
        # The service decides how many threads run, not the build machine.
        "cpp.dynamic_threads": True,
        # Inductor's precompiled headers cost more than they save in the two files of a unit: see `precompiled_headers`.
        "aot_inductor.precompile_headers": False,
        # A wrapper only calls kernels: it runs as fast as with -O1, compiles in two thirds of the time, and is smaller.
        "aot_inductor.compile_wrapper_opt_level": os.environ.get("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "Og"),
    }
    if target.device == "cuda":
        # Kernels inside the library: one file to fetch, check and map. Files beside it would save nothing: cubins of
        # buckets of other sizes differ (tests/benchmarks/cuda.py --storage).
        own["aot_inductor.embed_kernel_binary"] = not spec.ptx
        own["aot_inductor.emit_multi_arch_kernel"] = spec.ptx
        # Offline there is time for candidates that `torch.compile` leaves out: templates that use the tensor memory
        # accelerator (from Hopper on), and fusions with more templates than the one that is fastest alone.
        own[TMA_TEMPLATES] = True
        own["max_epilogue_benchmarked_choices"] = 4 if spec.float32_matmul_precision == "highest" else 8
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
        # Debug lines make a library three to five times as large and name the build's folders.
        own["aot_inductor.enable_line_tables"] = False
    if spec.runtime == "standalone":
        own |= OPTIONS[target.device]
    return {**mode, **own, **spec.options}


@contextmanager
def options_of_the_model_undone() -> Iterator[list[str]]:
    """At the end, Inductor's options are as they were. The yielded list has a note then if a model's code changed some.

    A build's options are those of its manifest, which are in its keys and records. torchao's `quantize_` sets options
    for the whole process, among them coordinate descent tuning: each kernel is compiled and measured dozens of times,
    one after another.
    """
    from torch._inductor import config

    notes: list[str] = []
    before = config.get_config_copy()
    try:
        yield notes
    finally:
        changed = {name: now for name, now in config.get_config_copy().items() if now != before[name]}
        for name in changed:
            setattr(config, name, before[name])
    if changed:
        told = ", ".join(f"{name}: {value!r}" for name, value in changed.items())
        notes.append(
            f"the model's code sets options of Inductor, which take no effect unless `options` has them: {told}"
        )
