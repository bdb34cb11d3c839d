"""From a captured graph to files: AOTInductor, set up for one target, and a list of the kernels that it generated."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from aotc.compiler.autotune.attention import attention_chosen
from aotc.compiler.autotune.benchmarks import gpu_benchmarks_alone
from aotc.compiler.autotune.inductor_hooks import picking
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.replaced_functions import called_as_torchs
from aotc.compiler.codegen.called_operators import calls_checked
from aotc.compiler.codegen.generated_kernels import kernels_of, kernels_recorded
from aotc.compiler.codegen.instruction_sets import code_for
from aotc.compiler.codegen.library_constants import constants_left_out
from aotc.compiler.codegen.library_imports import OperatorCalls, imports_of, operators_called
from aotc.compiler.codegen.standalone_attention import attention_generated
from aotc.compiler.codegen.standalone_code import check_standalone, operators_avoided
from aotc.compiler.cross_compile.absent_gpu import lowering_without_gpu
from aotc.compiler.messages import Job
from aotc.compiler.patches.machinery.apply import patched
from aotc.compiler.patches.machinery.graph_operators import operators_recorded
from aotc.compiler.toolchain.unit_toolchain import unit_toolchain
from aotc.errors import BuildError
from aotc.machine.targets import Target
from aotc.provenance import Kernel
from aotc.records import CONSTANTS, LibraryImports

LIBRARY = "model.so"


class CompiledFiles(msgspec.Struct, frozen=True):
    """The files needed at run time, all in one folder; those of them that are stored uncompressed, to be mapped; the
    kernels; the names of the applied patches of torch; a note for each patch that was left out; the operators that
    Inductor lowered, each with its dtypes, and None where that is not known; what the libraries take from torch's."""

    files: tuple[str, ...]
    mapped: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    patches: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    operators: dict[str, tuple[str, ...]] | None = None
    imports: LibraryImports | None = None


def compile_capture(
    job: Job, target: Target, captured: Capture, options: Mapping[str, Any], picker: Picker, name: str = LIBRARY
) -> CompiledFiles:
    """Compile, and copy the files needed at run time to `job.output`, the library as `name`; `picker` decides
    autotuning.

    `options` are those of `inductor_options`. Raises BuildError, also for `runtime: standalone` where the library calls
    what that runtime lacks; errors of Inductor pass through.
    """
    spec, destination = job.unit.spec, Path(job.output)
    generated = spec.runtime == "standalone"
    kernels: dict[str, tuple[str, str]] = {}
    lowered: dict[str, set[str]] = {}
    called: dict[str, OperatorCalls] = {}
    weights: list[str] = []
    with (
        torch.no_grad(),
        code_for(target),
        gpu_benchmarks_alone() if target.device == "cuda" else nullcontext(),
        lowering_without_gpu(),
        picking(picker),
        patched("compile", target.device, spec.options, spec.patches_off, captured.graph.graph) as patches,
        unit_toolchain(options, target.device, Path(job.shared) if job.shared else None, job.precompile),
        attention_generated(captured.graph)
        if generated and target.device == "cuda"
        else attention_chosen(captured.graph, picker, race=bool(options.get("max_autotune"))),
        kernels_recorded(kernels),
        operators_recorded(lowered),
        operators_called(called),
        calls_checked(),
        constants_left_out(destination, weights) if spec.weights == "frozen" else nullcontext(),
        operators_avoided(target.device, frozen=spec.weights == "frozen") if generated else nullcontext(),
    ):
        produced = torch._inductor.aot_compile(captured.graph, captured.examples, options=dict(options))
    paths = [Path(file) for file in cast("list[Any]", produced) if isinstance(file, str)]
    libraries = [path for path in paths if path.suffix == ".so"]
    if len(libraries) != 1:
        raise BuildError(f"AOTInductor gave {len(libraries)} libraries; one is expected", stage="compile")
    library = libraries[0]
    destination.mkdir(parents=True, exist_ok=True)
    shutil.copy(library, destination / name)
    names = [name, *weights, *([CONSTANTS] if (destination / CONSTANTS).exists() else [])]
    calls_back = library.with_suffix(".json")
    if calls_back.exists():
        listed = called_as_torchs(calls_back.read_bytes())
        (destination / Path(name).with_suffix(".json")).write_bytes(listed)
        names.append(calls_back.with_name(name).with_suffix(".json").name)
    for cubin in (path for path in paths if path.suffix in (".cubin", ".fatbin")):
        if cubin.suffix == ".fatbin":
            _check_portable(cubin.with_suffix(".ptx"))
        shutil.copy(cubin, destination / cubin.name)
        names.append(cubin.name)
    imports = imports_of(destination / name, called)
    if generated:
        check_standalone(imports, called)
    wrapper = next((path for path in paths if path.name.endswith("wrapper.cpp")), None)
    text = wrapper.read_text(errors="replace") if wrapper else ""
    return CompiledFiles(
        tuple(sorted(names)),
        tuple(weights),
        tuple(kernels_of(kernels, text)),
        patches.names,
        patches.left_out,
        {name: tuple(sorted(lowered[name])) for name in sorted(lowered)},
        imports,
    )


_PTX_TARGET = re.compile(r"^\.target\s+(?P<name>sm_\d+(?P<only>[af]?))", re.MULTILINE)


def _check_portable(ptx: Path) -> None:
    """Raises BuildError for PTX that no other architecture runs.

    PTX for a target with the suffix `a` has instructions of that one architecture, and is not forward compatible
    (CUDA's PTX ISA manual, section "PTX Module Directives: .target"). Triton's PTX on Hopper is for sm_90a.
    """
    found = _PTX_TARGET.search(ptx.read_text(errors="replace")) if ptx.exists() else None
    if found is None or found["only"]:
        raise BuildError(
            f"`ptx: true`, but the PTX is for {found['name'] if found else 'no known target'}, which no other GPU runs",
            hint="leave `ptx` out and build on each generation of GPU that serves the model",
            stage="compile",
        )
