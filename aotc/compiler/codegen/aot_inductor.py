"""From a captured graph to files: AOTInductor, set up for one target, and a list of the kernels that it wrote."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import torch

from aotc.compiler.autotune.attention import attention_chosen
from aotc.compiler.autotune.benchmarks import gpu_benchmarks_alone
from aotc.compiler.autotune.hooks import picking
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.capture.lifting import Capture
from aotc.compiler.patches.registry import TMA_TEMPLATES, patched
from aotc.compiler.toolchain.compile_cache import CompileCache
from aotc.compiler.toolchain.object_cache import objects_shared
from aotc.compiler.toolchain.parallel_compile import compiling_side_by_side
from aotc.compiler.toolchain.precompiled_headers import PrecompiledHeaders, kernels_with
from aotc.compiler.toolchain.wrapper_split import expected_wrapper
from aotc.errors import BuildError
from aotc.machine.environment import cpu_features
from aotc.machine.targets import Target
from aotc.manifest import ModelSpec
from aotc.provenance import Kernel

LIBRARY = "model.so"
_MARCH = {"cpu:x86-64-v3": "x86-64-v3", "cpu:x86-64-v4": "x86-64-v4", "cpu:amx": "x86-64-v4"}
_BESIDE_GPU = "x86-64-v2"
_ISA = {"cpu:x86-64-v3": "VecAVX2", "cpu:x86-64-v4": "VecAVX512", "cpu:amx": "VecAMX"}


class CompiledFiles(msgspec.Struct, frozen=True):
    """The files that the library needs at run time, all in one folder, the kernels in them, how many objects another
    unit had compiled, the names of the patches of torch that were applied, and a note for each one left out."""

    files: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    shared_objects: int = 0
    patches: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


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
    spec: ModelSpec,
    target: Target,
    destination: Path,
    picker: Picker,
    shared: Path | None = None,
    precompile: bool = False,
) -> CompiledFiles:
    """Compile and copy what is needed at run time to `destination`; `picker` answers autotuning's questions.

    `options` are those of `inductor_options`.

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
        patched("compile", target.device, spec.options, spec.patches_off, captured.graph.graph) as patches,
        kernels_with(headers),
        objects_shared(shared / "objects" if shared else None) as objects,
        compiling_side_by_side(
            expected=lambda: expected_wrapper(options, target.device, _cache_folder()),
            shared=CompileCache(shared / "common") if shared else None,
            headers=headers,
        ),
        attention_chosen(captured.graph, picker, race=bool(options.get("max_autotune"))),
        _recording(kernels),
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
    return CompiledFiles(
        tuple(sorted(names)),
        tuple(_kernels(kernels, text)),
        objects.taken,
        patches.names,
        patches.left_out,
    )


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
