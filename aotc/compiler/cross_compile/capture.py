"""A unit's graph for a GPU that this machine lacks.

The model is captured twice. On the CPU, where tensors have values, the graph is run beside the model and every fact is
found that needs a run. For the GPU it is captured on tensors there, of which torch.export reads no values. Both graphs
must be of the same operators, or the facts of one are not those of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.collectives import name_groups
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.ranges.dynamic_shapes import conditions, dynamic_shapes
from aotc.compiler.capture.unit_graph import Exported, UnitModule
from aotc.compiler.messages import Job
from aotc.errors import BuildError
from aotc.models.fake_ranks import parallel_of
from aotc.reads.tensors import plain_state

GPU = "cuda:0"


def export_for_absent_gpu(
    job: Job, subject: UnitModule, model: nn.Module, leaves: Sequence[Any], on_cpu: Exported
) -> Exported:
    """What `export` gave on the CPU, with the graph for the GPU. Moves the model to the GPU.

    Raises BuildError where the model computes something else on a GPU than on a CPU.
    """
    move(model)
    there = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(GPU), list(leaves))
    module, signature = subject.module, subject.signature
    outside = plain_state(model) if job.unit.region else {}
    shapes = dynamic_shapes(signature, job.unit.bucket)
    captured = capture(module, signature, there, shapes, False, outside, train=job.unit.spec.train)
    if parallel := parallel_of(job.unit.spec.parallel):
        name_groups(captured.graph, parallel)
    needed = conditions(captured.guards, signature, job.unit.bucket)
    _check_same(on_cpu, captured, needed)
    outputs = tuple(
        known if known.dims else found for known, found in zip(on_cpu.outputs, captured.outputs, strict=True)
    )
    return on_cpu._replace(captured=captured, conditions=needed, outputs=outputs)


def move(model: nn.Module) -> None:
    """Move the model to the GPU. Its parameters lose their values, which no code depends on and a copy of which would
    take as much memory again; buffers keep theirs."""

    def moved(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and type(tensor.data) is Tensor and tensor.is_cpu:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
        return tensor.to(GPU)

    with torch.no_grad():
        model._apply(moved)  # type: ignore[no-untyped-call]


def _check_same(on_cpu: Exported, captured: Capture, needed: Sequence[str]) -> None:
    one, other = (_operators(graph.graph.graph) for graph in (on_cpu.captured, captured))
    facts = (
        (on_cpu.captured.arguments, captured.arguments),
        (on_cpu.captured.mutated_leaves, captured.mutated_leaves),
        (on_cpu.captured.mutated_state, captured.mutated_state),
        (tuple(on_cpu.conditions), tuple(needed)),
    )
    if one == other and all(here == there for here, there in facts):
        return
    place = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    where = f": operator {place} is {one[place]} on a CPU, {other[place]} on a GPU" if place is not None else ""
    raise BuildError(
        f"the model computes something else on a GPU than on a CPU, where it is checked without a GPU{where}",
        hint="build it on a machine with such a GPU, or let forward do the same on every device",
        stage="export",
    )


def _operators(graph: fx.Graph) -> list[str]:
    """Without copies for a layout, which depend on how a device's attention or convolution lays out its result."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in names if name != "aten.contiguous.default"]
