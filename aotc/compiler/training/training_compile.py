"""Compile a unit for training: two libraries, and what passes from the forward's to the backward's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.autotune.benchmarks import gpu_benchmarks_alone
from aotc.compiler.autotune.inductor_hooks import picking
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.unit_graph import UnitModule
from aotc.compiler.codegen.aot_inductor import CompiledFiles, compile_capture
from aotc.compiler.codegen.library_imports import both_imports
from aotc.compiler.cross_compile.absent_gpu import lowering_without_gpu
from aotc.compiler.explain_failure import line_named
from aotc.compiler.messages import Job
from aotc.compiler.patches.machinery.apply import patched
from aotc.compiler.training.halves import Halves, halves_of
from aotc.errors import BuildError
from aotc.machine.targets import Target
from aotc.manifest.inputs import TensorInput, parse_inputs
from aotc.manifest.types import ModelSpec
from aotc.provenance import both_operators
from aotc.reads.tensors import plain_state
from aotc.records import Argument

BACKWARD = "backward.so"


def compile_halves(
    job: Job, target: Target, halves: Halves, options: Mapping[str, Any], picker: Picker
) -> CompiledFiles:
    """Compile both halves into `job.output`. Raises BuildError; errors of torch's compiler pass through."""
    with torch.autocast(target.device, enabled=False):  # the halves have their casts
        forward = compile_capture(job, target, halves.forward, options, picker)
        backward = compile_capture(job, target, halves.backward, options, picker, BACKWARD)
    return _both(forward, backward)


def check_sparse(captured: Capture) -> None:
    """Raises BuildError where the gradient of an embedding's table would be sparse."""
    for node in captured.graph.graph.nodes:
        names = [argument.name for argument in getattr(getattr(node.target, "_schema", None), "arguments", ())]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if "embedding" in str(node.target) and given.get("sparse") is True:
            raise BuildError(
                "the gradient of an embedding with `sparse=True` is a sparse tensor, which compiled code cannot make",
                hint="leave out `sparse=True`; or compile only the other parts of the model, with `regions`",
                stage="export",
                source=line_named(node.meta.get("stack_trace") or ""),
            )


def split(
    job: Job,
    target: Target,
    captured: Capture,
    differentiable: Sequence[Argument],
    options: Mapping[str, Any],
    picker: Picker,
) -> Halves:
    """Both halves, under the patches and the autotuning of a compilation, since Inductor's passes run over the joint
    graph. Raises BuildError, as `halves_of` does; errors of torch's compiler pass through."""
    check_sparse(captured)
    spec = job.unit.spec
    with (
        gpu_benchmarks_alone() if target.device == "cuda" else nullcontext(),
        picking(picker),
        patched("compile", target.device, spec.options, spec.patches_off, captured.graph.graph),
        torch._inductor.config.patch(dict(options)),
        lowering_without_gpu(),
    ):
        return halves_of(captured, differentiable, spec.activation_memory)


def differentiable_arguments(spec: ModelSpec, subject: UnitModule, leaves: Sequence[Any]) -> list[Argument]:
    """The parameters that require gradients, and the inputs of which the manifest says so; of a region, those that do
    in a call of the model."""
    state = plain_state(subject.module)
    trained = {name for name, tensor in state.items() if tensor.requires_grad}
    if subject.region is not None:  # other instances may be frozen in other places
        instances = subject.region.instances
        trained |= {name for name in state for path in instances if subject.outside[f"{path}.{name}"].requires_grad}
    parameters = [Argument(state=name) for name in state if name in trained]
    if subject.region is not None:
        wanted = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    else:
        _, inputs = parse_inputs(spec.inputs)
        paths = {each.path for each in inputs if isinstance(each, TensorInput) and each.requires_grad}
        wanted = [index for index, leaf in enumerate(subject.signature.leaves) if leaf.path in paths]
    return [*parameters, *(Argument(leaf=index) for index in wanted)]


def _both(forward: CompiledFiles, backward: CompiledFiles) -> CompiledFiles:
    return CompiledFiles(
        tuple(sorted({*forward.files, *backward.files})),
        forward.mapped + backward.mapped,
        forward.kernels + backward.kernels,
        tuple(dict.fromkeys(forward.patches + backward.patches)),
        tuple(dict.fromkeys(forward.left_out + backward.left_out)),
        both_operators(forward.operators, backward.operators),
        both_imports(forward.imports, backward.imports),
    )
