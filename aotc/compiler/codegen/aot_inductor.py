"""From a captured graph to files: AOTInductor, set up for one target, and a list of the kernels that it wrote."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import torch
from torch import fx

from aotc.compiler.autotune import picking
from aotc.compiler.autotune.attention import attention_chosen
from aotc.compiler.autotune.gpu_benchmarks import gpu_benchmarks_alone
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.capture.lifting import Capture
from aotc.compiler.capture.size_arithmetic import rounded_as_in_python
from aotc.compiler.patches.bugs.assigned_numbers import numbers_are_assigned
from aotc.compiler.patches.bugs.complex_numbers import complex_numbers_are_tensors
from aotc.compiler.patches.bugs.concatenated import single_parts_lie_as_in_eager, written_parts_are_copied
from aotc.compiler.patches.bugs.empty_constants import empty_constants_have_no_memory
from aotc.compiler.patches.bugs.errors.divisors import divisors_are_checked
from aotc.compiler.patches.bugs.errors.index_checks import index_errors_are_raised
from aotc.compiler.patches.bugs.errors.negative_indices import negative_indices_are_refused
from aotc.compiler.patches.bugs.errors.noted_errors import noted_errors_are_thrown
from aotc.compiler.patches.bugs.errors.operator_errors import operator_errors_are_raised
from aotc.compiler.patches.bugs.errors.repeated_rows import counts_of_rows_are_checked
from aotc.compiler.patches.bugs.grouped_products import grouped_products_are_called
from aotc.compiler.patches.bugs.known_bools import known_bools_are_compared
from aotc.compiler.patches.bugs.loops import loops_begin_with_copies
from aotc.compiler.patches.bugs.old_values import old_values_kept
from aotc.compiler.patches.bugs.operands import operands_stay_as_given
from aotc.compiler.patches.bugs.operator_arguments import operator_arguments_as_read
from aotc.compiler.patches.bugs.own_device import tensors_made_on_own_gpu
from aotc.compiler.patches.bugs.patterns import only_equals_are_replaced
from aotc.compiler.patches.bugs.powers import powers_of_ints_are_ints
from aotc.compiler.patches.bugs.quotients import quotients_from_remainders
from aotc.compiler.patches.bugs.ranges.adaptive_pool_range import windows_stay_open
from aotc.compiler.patches.bugs.ranges.conv_batch_range import batches_stay_open
from aotc.compiler.patches.bugs.ranges.kept_ranges import ranges_kept
from aotc.compiler.patches.bugs.ranges.remainders import remainders_are_not_negative
from aotc.compiler.patches.bugs.scratch import scratch_for_every_program
from aotc.compiler.patches.bugs.view_offsets import views_begin_where_theirs_do
from aotc.compiler.patches.determinism.repeatable_code import repeatable_code
from aotc.compiler.patches.performance.depthwise import depthwise_template_raced
from aotc.compiler.patches.performance.epilogues import neighbours_of_any_shape_offered
from aotc.compiler.patches.performance.fused_bias import fused_bias_offered
from aotc.compiler.patches.performance.half_precision import shorter_functions
from aotc.compiler.patches.performance.small_loops import small_loops_are_serial
from aotc.compiler.patches.performance.tma_templates import (
    tiles_for_tf32_on_hopper,
    tma_templates_on_tensor_cores_only,
    valid_tensor_maps_only,
)
from aotc.compiler.toolchain.compile_cache import CompileCache
from aotc.compiler.toolchain.object_cache import objects_shared
from aotc.compiler.toolchain.parallel_compile import compiling_side_by_side
from aotc.compiler.toolchain.precompiled_headers import PrecompiledHeaders, kernels_with
from aotc.compiler.toolchain.wrapper_split import expected_wrapper
from aotc.errors import BuildError
from aotc.machine.environment import cpu_features
from aotc.machine.targets import Target
from aotc.manifest import ModelSpec
from aotc.records import Kernel

LIBRARY = "model.so"
TMA_TEMPLATES = "triton.enable_persistent_tma_matmul"
_MARCH = {"cpu:x86-64-v3": "x86-64-v3", "cpu:x86-64-v4": "x86-64-v4", "cpu:amx": "x86-64-v4"}
_BESIDE_GPU = "x86-64-v2"
_ISA = {"cpu:x86-64-v3": "VecAVX2", "cpu:x86-64-v4": "VecAVX512", "cpu:amx": "VecAMX"}


class CompiledFiles(msgspec.Struct, frozen=True):
    """The files that the library needs at run time, all in one folder, the kernels in them, how many candidates of
    autotuning could not be compiled or run (Inductor drops them; its reasons are in the log), and how many objects
    another unit had compiled."""

    files: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    failed_candidates: int = 0
    shared_objects: int = 0


def inductor_options(spec: ModelSpec, target: Target) -> dict[str, Any]:
    """The Inductor options of a unit: the mode's, aotc's own, and last the user's."""
    from torch._inductor import list_mode_options

    mode = {name: value for name, value in list_mode_options(spec.mode).items() if name != "triton.cudagraphs"}
    own: dict[str, Any] = {
        "aot_inductor.package": True,
        "freezing": spec.weights == "frozen",
        # The service decides how many threads run, not the build machine.
        "cpp.dynamic_threads": True,
        # They cost more than they save in the two files that a unit compiles: see `precompiled_headers`.
        "aot_inductor.precompile_headers": False,
        # A wrapper only calls kernels: it runs as fast as with -O1, compiles in two thirds of the time, and is smaller.
        "aot_inductor.compile_wrapper_opt_level": os.environ.get("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "Og"),
    }
    if target.device == "cuda":
        # Kernels inside the library: one file to fetch, check and map. Beside it, the cubins of buckets of other sizes
        # are other files, so nothing is shared (tests/benchmarks/cuda.py --storage).
        own["aot_inductor.embed_kernel_binary"] = not spec.ptx
        own["aot_inductor.emit_multi_arch_kernel"] = spec.ptx
        # Offline there is time for candidates that `torch.compile` leaves out: templates that load by the tensor memory
        # accelerator, from Hopper on, and fusions with more than the template that is fastest alone.
        own[TMA_TEMPLATES] = True
        own["max_epilogue_benchmarked_choices"] = 4 if spec.float32_matmul_precision == "highest" else 8
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
        # Debug lines make a library three to five times as large and name the build's folders.
        own["aot_inductor.enable_line_tables"] = False
    return {**mode, **own, **spec.options}


def compile_capture(
    captured: Capture,
    options: Mapping[str, Any],
    chosen: Mapping[str, Any],
    target: Target,
    destination: Path,
    picker: Picker,
    shared: Path | None = None,
    precompile: bool = False,
) -> CompiledFiles:
    """Compile and copy what is needed at run time to `destination`; `picker` answers autotuning's questions.

    `options` are those of `inductor_options`, of which the user has `chosen` some.

    In the folder `shared` other units of the build have what they compiled; with `precompile`, headers, too.

    Raises what Inductor raises, or BuildError.
    """
    kernels: dict[str, tuple[str, str]] = {}
    headers = PrecompiledHeaders(shared / "headers") if shared and precompile else None
    with (
        torch.no_grad(),
        _for_target(target),
        gpu_benchmarks_alone() if target.device == "cuda" else nullcontext(),
        picking(picker),
        _for_gpus(chosen) if target.device == "cuda" else nullcontext(),
        _for_ranges(captured.graph.graph),
        _as_in_eager(),
        small_loops_are_serial(),
        repeatable_code(),
        kernels_with(headers),
        objects_shared(shared / "objects" if shared else None) as objects,
        compiling_side_by_side(
            expected=lambda: expected_wrapper(options, target.device, _cache_folder()),
            shared=CompileCache(shared / "common") if shared else None,
            headers=headers,
        ),
        attention_chosen(captured.graph, picker, race=bool(options.get("max_autotune"))),
        _recording(kernels),
        _counting_failures() as failures,
    ):
        produced = torch._inductor.aot_compile(captured.graph, captured.examples, options=dict(options))
    paths = [Path(file) for file in cast("list[Any]", produced) if isinstance(file, str)]
    libraries = [path for path in paths if path.suffix == ".so"]
    if len(libraries) != 1:
        raise BuildError(f"AOTInductor gave {len(libraries)} libraries; one is expected", stage="compile")
    library = libraries[0]
    destination.mkdir(parents=True, exist_ok=True)
    shutil.copy(library, destination / LIBRARY)
    names = [LIBRARY]
    calls_back = library.with_suffix(".json")
    if calls_back.exists():
        shutil.copy(calls_back, destination / Path(LIBRARY).with_suffix(".json"))
        names.append(calls_back.with_name(LIBRARY).with_suffix(".json").name)
    for cubin in (path for path in paths if path.suffix in (".cubin", ".fatbin")):
        if cubin.suffix == ".fatbin":
            _check_portable(cubin.with_suffix(".ptx"))
        shutil.copy(cubin, destination / cubin.name)
        names.append(cubin.name)
    wrapper = next((path for path in paths if path.name.endswith("wrapper.cpp")), None)
    text = wrapper.read_text(errors="replace") if wrapper else ""
    return CompiledFiles(tuple(sorted(names)), tuple(_kernels(kernels, text)), failures.count, objects.taken)


@contextmanager
def _for_ranges(graph: fx.Graph) -> Iterator[None]:
    with ranges_kept(graph), batches_stay_open(), windows_stay_open():
        yield


_AS_IN_EAGER: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    old_values_kept,
    written_parts_are_copied,
    single_parts_lie_as_in_eager,
    operands_stay_as_given,
    loops_begin_with_copies,
    numbers_are_assigned,
    known_bools_are_compared,
    powers_of_ints_are_ints,
    quotients_from_remainders,
    complex_numbers_are_tensors,
    index_errors_are_raised,
    negative_indices_are_refused,
    counts_of_rows_are_checked,
    divisors_are_checked,
    noted_errors_are_thrown,
    operator_errors_are_raised,
    only_equals_are_replaced,
    rounded_as_in_python,
    remainders_are_not_negative,
    operator_arguments_as_read,
    grouped_products_are_called,
    views_begin_where_theirs_do,
    empty_constants_have_no_memory,
)


@contextmanager
def _as_in_eager() -> Iterator[None]:
    with ExitStack() as patches:
        for patch in _AS_IN_EAGER:
            patches.enter_context(patch())
        yield


@contextmanager
def _for_gpus(options: Mapping[str, Any]) -> Iterator[None]:
    with _gpu_candidates(options), shorter_functions(), scratch_for_every_program(), tensors_made_on_own_gpu():
        yield


@contextmanager
def _gpu_candidates(chosen: Mapping[str, Any]) -> Iterator[None]:
    """Let what Inductor overlooks be raced, and not what cannot win, unless the user's options say otherwise, nor what
    would be wrong."""
    with (
        fused_bias_offered() if chosen.get("triton.autotune_cublasLt", True) else nullcontext(),
        neighbours_of_any_shape_offered(),
        depthwise_template_raced(),
        nullcontext() if TMA_TEMPLATES in chosen else tiles_for_tf32_on_hopper(),
        nullcontext() if TMA_TEMPLATES in chosen else tma_templates_on_tensor_cores_only(),
        valid_tensor_maps_only(),
    ):
        yield


def _cache_folder() -> Path:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


_PTX_TARGET = re.compile(r"^\.target\s+(?P<name>sm_\d+(?P<only>[af]?))", re.MULTILINE)


def _check_portable(ptx: Path) -> None:
    """Refuse PTX that no other GPU runs.

    PTX for a target with the suffix `a` holds instructions of that one architecture, and is not forward compatible
    (CUDA's PTX ISA manual, section "PTX Module Directives: .target"). Triton writes such on Hopper: sm_90a.
    """
    found = _PTX_TARGET.search(ptx.read_text(errors="replace")) if ptx.exists() else None
    if found is None or found["only"]:
        raise BuildError(
            f"`ptx: true`, but the PTX is for {found['name'] if found else 'no known target'}, which no other GPU runs",
            hint="leave `ptx` out and build on each generation of GPU that serves the model",
            stage="compile",
        )


# -- the instruction set ----------------------------------------------------------------------------------------------


@contextmanager
def _for_target(target: Target) -> Iterator[None]:
    """Generate code for the target's CPU, whatever CPU this is.

    Inductor picks the vector instructions by asking this machine, which takes one C++ compile for each candidate; the
    target has already said which they are, so the question is answered here. `-march=native` would let the C++ compiler
    use this machine's own instructions, so the target's level takes its place. Beside a GPU the CPU only launches: its
    code uses what every x86-64 machine with such a GPU has.
    """
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    if target.device == "cuda":
        isas, options = [], {}
    else:
        isa = getattr(cpu_vec_isa, _ISA[target.name])()
        if target.name == "cpu:amx":
            isa._is_avx512_bf16_supported = True
            cpu_features()  # asks the kernel for AMX's tiles, as Inductor's own answer does: candidates are run here
        isas, options = [isa], {"cpp.simdlen": isa.bit_width(), "cpp.vec_isa_ok": True}
    march = f"march={_MARCH.get(target.name, _BESIDE_GPU)}" if platform.machine() == "x86_64" else "march=native"
    flags_of = cpp_builder._get_optimization_cflags

    def with_march(*args: Any, **kwargs: Any) -> Any:
        result = flags_of(*args, **kwargs)
        flags, *rest = result if isinstance(result, tuple) else (result,)
        flags = [march if flag == "march=native" else flag for flag in flags]
        return (flags, *rest) if isinstance(result, tuple) else flags

    with ExitStack() as patches:
        patches.enter_context(config.patch(options))
        patches.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: isas))
        for isa in isas:
            patches.enter_context(mock.patch.object(type(isa), "__bool__", lambda self: True))
        patches.enter_context(mock.patch.object(cpp_builder, "_get_optimization_cflags", with_march))
        yield


# -- what was generated -----------------------------------------------------------------------------------------------


@contextmanager
def _recording(kernels: dict[str, tuple[str, str]]) -> Iterator[None]:
    """Collect every kernel that Inductor defines: name → (source, comment that names the fused operators).

    Triton kernels are defined with such a comment; for C++ kernels it is made here in the same way.
    """
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.utils import get_kernel_metadata
    from torch._inductor.virtualized import V

    define: Any = PythonWrapperCodegen.define_kernel
    define_cpp: Any = CppScheduling.define_kernel

    def recorded(self: Any, kernel_name: str, kernel_body: str, metadata: str | None = None, *a: Any, **k: Any) -> Any:
        kernels[kernel_name] = (kernel_body, metadata or "")
        return define(self, kernel_name, kernel_body, metadata, *a, **k)

    def recorded_cpp(self: Any, src_code: str, nodes: Any, *a: Any, **k: Any) -> Any:
        name = define_cpp(self, src_code, nodes, *a, **k)
        source, comment = kernels.get(name, (src_code, ""))
        kernels[name] = (source, comment or get_kernel_metadata(nodes, V.graph.wrapper_code)[0])
        return name

    with (
        mock.patch.object(PythonWrapperCodegen, "define_kernel", recorded),
        mock.patch.object(CppScheduling, "define_kernel", recorded_cpp),
    ):
        yield


class _FailureCount(logging.Handler):
    """Counts what Inductor says of candidates that it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.count += "Ignoring this choice" in message or "It will be ignored" in message


@contextmanager
def _counting_failures() -> Iterator[_FailureCount]:
    handler = _FailureCount()
    loggers = [logging.getLogger(f"torch._inductor.{name}") for name in ("select_algorithm", "autotune_process")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


_ORIGINAL = re.compile(r"Original ATen: \[(?P<names>[^\]]*)\]")
_EXTERN = re.compile(r"\baoti_torch_(?:cpu|cuda)_(?P<name>\w+)\(")
_BODY = re.compile(r"run_impl\(", re.MULTILINE)
_HOUSEKEEPING = ("empty_strided", "zero_", "device_type")


def _kernels(defined: Mapping[str, tuple[str, str]], wrapper: str) -> Iterator[Kernel]:
    """The generated kernels with their operators, then torch's operators, each with its number of calls per run."""
    calls = Counter(name.removeprefix("call_") for name in re.findall(r"\b(\w+)\(", _run_body(wrapper)))
    for name, (source, comment) in sorted(defined.items()):
        operators = [
            operator.strip().removeprefix("aten.")
            for match in _ORIGINAL.finditer(comment)
            for operator in match["names"].split(",")
            if operator.strip()
        ]
        kind = "triton" if "@triton.jit" in source else "cpp"  # a user's own kernel has a name of its own
        yield Kernel(name, kind, calls.get(name, 1), tuple(dict.fromkeys(operators)), source)
    for name, count in sorted(Counter(_EXTERN.findall(_run_body(wrapper))).items()):
        operator = name.removesuffix("_out").strip("_")
        if not name.startswith(_HOUSEKEEPING):
            yield Kernel(name, "extern", count, (operator,))


def _run_body(wrapper: str) -> str:
    """The part of the wrapper that runs at each call: definitions of kernels come before it."""
    starts = [match.start() for match in _BODY.finditer(wrapper)]
    return wrapper[starts[-1] :] if starts else wrapper
