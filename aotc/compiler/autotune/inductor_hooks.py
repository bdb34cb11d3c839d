"""Install the hooks by which Inductor asks the picker. A torch without a function that they replace is an error."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from aotc.compiler.autotune.algorithm_selection import operator_hooks
from aotc.compiler.autotune.fusion import fusion_hooks
from aotc.compiler.autotune.picker import Hook, Picker, with_time
from aotc.compiler.autotune.triton_configs import kernel_hooks, place_kernel_pins
from aotc.compiler.patches.machinery.patch import NEWEST_TESTED
from aotc.compiler.patches.shared.inductor import inductor
from aotc.compiler.scoped import replaced
from aotc.errors import BuildError, Issue
from aotc.picks import Candidate, Pick


@contextmanager
def picking(picker: Picker) -> Iterator[None]:
    """While active, `picker` answers and records all that Inductor would measure.

    Raises BuildError where this torch's Inductor is not as the hooks expect: what it decides could be neither recorded
    nor pinned, and no later build could repeat it.
    """
    if issues := _unknown_parts():
        raise BuildError(
            f"autotune picks can be neither recorded nor pinned with torch {torch.__version__}",
            issues=issues,
            hint=f"use torch 2.11 to {'.'.join(map(str, NEWEST_TESTED))}, whose Inductor the hooks know",
            stage="compile",
        )
    place_kernel_pins(picker)
    with ExitStack() as stack:
        hooks = (operator_hooks, fusion_hooks, padding_hooks, kernel_hooks)
        for owner, name, function in [patch for hook in hooks for patch in hook(picker)]:
            stack.enter_context(replaced(owner, name, function))
        yield


_PARTS = {
    "select_algorithm:AlgorithmSelectorCache.__call__": ("name", "choices", "input_nodes", "layout"),
    "select_algorithm:AlgorithmSelectorCache.make_precompile_fn": ("choices", "name"),
    "select_algorithm:AlgorithmSelectorCache.do_autotuning": ("name", "input_nodes", "layout", "choices"),
    "select_algorithm:AlgorithmSelectorCache.benchmark": ("choices",),
    "select_algorithm:AlgorithmSelectorCache.key_of": ("node",),
    "scheduler:Scheduler.speedup_by_fusion": ("node1", "node2"),
    "scheduler:Scheduler.benchmark_codegened_module": ("module",),
    "scheduler:Scheduler.benchmark_fused_nodes": ("nodes",),
    "scheduler:FusionResult.from_callable": ("callable_fn", "future"),
    "scheduler:as_completed": ("fs",),
    "select_algorithm:ExternKernelCaller.__init__": ("kwargs",),
    "codegen.triton:TritonScheduling.benchmark_codegened_module": ("mod", "n_spills_threshold", "node_names"),
    "ir:MultiTemplateBuffer.swap_as_triton_caller": ("caller",),
    "ir:MultiTemplateBuffer.finalize_as_triton_caller": ("caller",),
    "ir:MultiTemplateBuffer.get_min_choice": (),
    "fx_passes.pad_mm:get_cached_should_pad": ("key",),
    "fx_passes.pad_mm:is_padded_faster": ("key", "ori_time", "pad_time"),
    "fx_passes.pad_mm:get_do_bench": (),
    "runtime.triton_heuristics:CachingAutotuner.bench": ("launcher",),
    "runtime.triton_heuristics:CachingAutotuner.save_gpu_kernel": ("launcher",),
    "runtime.triton_heuristics:CachingAutotuner._dynamic_scale_rblock": (),
    "async_compile:AsyncCompile.triton": ("kernel_name", "source_code"),
}
"""The functions of Inductor that are hooked, with the parameters that the hooks use (torch 2.11 to 2.15)."""


@functools.cache
def _unknown_parts() -> tuple[Issue, ...]:
    """The functions that are not as the hooks expect."""
    issues: list[Issue] = []
    for part, parameters in _PARTS.items():
        module, _, path = part.partition(":")
        try:
            found: Any = functools.reduce(getattr, path.split("."), inductor(module))
            missing = set(parameters) - set(inspect.signature(inspect.unwrap(found)).parameters)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            issues.append(Issue(f"torch._inductor.{module}.{path}: {error}"))
            continue
        if missing:
            issues.append(Issue(f"torch._inductor.{module}.{path} has no parameter {', '.join(sorted(missing))}"))
    return tuple(issues)


# -- whether products are padded ---------------------------------------------------------------------------------------


PADDED, UNPADDED = "padded", "as it is"


def padding_hooks(picker: Picker) -> list[Hook]:
    """Hooks for the padding of a matrix product to better aligned sizes."""
    pad_mm = inductor("fx_passes.pad_mm")
    cached, compare, timer = pad_mm.get_cached_should_pad, pad_mm.is_padded_faster, pad_mm.get_do_bench

    def question(key: str) -> Pick:
        return Pick(kind="padding", subject="matrix product", candidates=(), inputs=(str(key),))

    def known(key: str) -> Any:
        if pin := picker.pin_for(question(key)):
            picker.take(pin)
            return pin.winner.name == PADDED
        if shared := picker.find_shared(question(key).identity):
            picker.take_shared(shared)
            return shared.winner.name == PADDED
        known_to_torch = cached(key)
        if known_to_torch is None and picker.must_not_measure(question(key)):
            return False  # before the operands are made, perhaps for a GPU that is absent
        return known_to_torch

    def compared(key: str, ori_time: float, pad_time: float) -> bool:
        padded = bool(compare(key, ori_time, pad_time))
        timed = with_time(Candidate(PADDED), pad_time), with_time(Candidate(UNPADDED), ori_time)
        picker.keep(question(key), timed, timed[0] if padded else timed[1], question(key).identity)
        return padded

    def counting() -> Any:
        bench = timer()

        def timed(function: Any) -> Any:
            picker.measurements += 1
            return bench(function)

        return timed

    return [
        (pad_mm, "get_cached_should_pad", known),
        (pad_mm, "is_padded_faster", compared),
        (pad_mm, "get_do_bench", counting),
    ]
