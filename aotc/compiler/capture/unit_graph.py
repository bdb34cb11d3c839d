"""From a unit's module to its graph, and to the conditions under which the graph is valid."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from aotc.compiler.capture.analysis.argument_forms import Forms, other_forms
from aotc.compiler.capture.analysis.assigned_attributes import Assigned, assigned_attributes
from aotc.compiler.capture.analysis.attribute_reads import AttributeReads, absences, attributes_read
from aotc.compiler.capture.analysis.output_dims import output_dims, padded_dims
from aotc.compiler.capture.analysis.outside_reads import outside_reads
from aotc.compiler.capture.checks.graph_run import check_traced
from aotc.compiler.capture.checks.hidden_state import check_second_call
from aotc.compiler.capture.checks.left_out import check_defaults
from aotc.compiler.capture.checks.repeated_calls import check_repeated_calls
from aotc.compiler.capture.checks.specialization import LeavesAt, check_edges
from aotc.compiler.capture.collectives import name_groups
from aotc.compiler.capture.export import NOTHING, capture, model_fails
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.compiler.capture.ranges.dynamic_shapes import conditions, constraints_explained, dynamic_shapes
from aotc.compiler.capture.tensor_subclasses import OpaqueParameters
from aotc.compiler.messages import Job
from aotc.errors import BuildError
from aotc.machine.targets import Target
from aotc.models.calls import signature_leaves
from aotc.models.fake_ranks import parallel_of
from aotc.models.regions import example_of
from aotc.models.signature import make_signature
from aotc.reads.modes import OF_INPUT
from aotc.reads.tensors import plain_state
from aotc.records import Output, Region, Scalar, Signature, tuned_dims

_log = logging.getLogger("aotc")


class UnitModule(NamedTuple):
    """The module that a unit compiles: the model, or one of its regions."""

    module: nn.Module
    signature: Signature
    model_signature: Signature
    leaves_at: LeavesAt
    region: Region | None = None
    outside: Mapping[str, Tensor] = NOTHING
    """For a region: the model's tensors."""


def subject_of(job: Job, model: nn.Module, target: Target) -> UnitModule:
    unit, spec, folder = job.unit, job.unit.spec, Path(job.folder)
    signature = make_signature(spec, model)
    if not unit.region:

        def leaves_at(dims: Mapping[str, int], seed: int = 0) -> list[Any]:
            return signature_leaves(spec, signature, dims, target.device, seed, folder)

        return UnitModule(model, signature, signature, leaves_at)
    region = next(region for region in unit.regions if region.name == unit.region)
    return UnitModule(
        model.get_submodule(region.instances[0]),
        region.signature,
        signature,
        lambda dims, seed=0: example_of(spec, model, signature, region, {**unit.sizes, **dims}, folder, seed).leaves,
        region,
        plain_state(model),
    )


class Exported(NamedTuple):
    """The graph of a unit, with the facts of its sizes, its outputs' axes and its module's attributes for the record.

    `reads` are those of `analysis.attribute_reads`, without attributes that calls of the model change; `outside` and
    `asked` those of `analysis.outside_reads`.
    """

    captured: Capture
    conditions: tuple[str, ...]
    padded: tuple[str, ...]
    outputs: tuple[Output, ...]
    origins: Collection[str]
    forms: Forms
    assigned: Assigned
    reads: Collection[str]
    outside: Collection[str] = ()
    asked: Mapping[str, Scalar] = MappingProxyType({})
    notes: Collection[str] = ()


def export(
    job: Job, subject: UnitModule, leaves: list[Any], other_leaves: list[Any], kept: KeptObjects, target: Target
) -> Exported:
    spec, bucket = job.unit.spec, job.unit.bucket
    module, signature = subject.module, subject.signature
    shapes = dynamic_shapes(signature, bucket)
    with constraints_explained(module, signature, bucket):
        try:
            frozen = spec.weights == "frozen"
            with attributes_read(module) as reads:
                captured = capture(module, signature, leaves, shapes, frozen, subject.outside, train=spec.train)
            if parallel := parallel_of(spec.parallel):
                name_groups(captured.graph, parallel)
        except OpaqueParameters:
            raise
        except Exception:  # perhaps caused by a buffer that is None before the first call
            try:
                check_second_call(module, signature, dict(module.named_buffers()), kept, leaves, other_leaves)
            except BuildError:
                raise
            except Exception:  # a model that fails in eager: `capture` has raised that error
                _log.warning("the model fails when it is called", exc_info=True)
            raise
    sizes_needed = conditions(captured.guards, signature, bucket)
    check_repeated_calls(module, signature, captured.mutated_state, kept, leaves)
    try:
        with outside_reads(module) as outside, absences(module) as absent:
            result = check_second_call(module, signature, captured.mutated_state, kept, leaves, other_leaves)
    except BuildError:
        raise
    except Exception as error:
        raise model_fails(signature, error) from error
    check_defaults(module, signature, captured.mutated_state, kept, leaves)
    check_traced(module, signature, captured, kept, leaves, result, tuned_dims(bucket))
    forms = other_forms(module, signature, captured.mutated_state, kept, leaves)
    assigned = assigned_attributes(module, signature, captured.mutated_state, kept, leaves, result)
    del result  # copies of outputs and state, whose memory the next runs need
    check_edges(module, signature, bucket, captured, subject.leaves_at, sizes_needed)
    reads.names_read |= outside.attributes | absent
    origins, names = reads.origins, _read(reads, captured, kept)
    asked = _asked(outside.asked, spec.train)
    outputs, padded = captured.outputs, padded_dims(signature, bucket)
    if job.unit.region:  # its inputs are not padded, so its outputs need not be cropped
        padded = ()
    else:
        outputs = output_dims(spec, module, signature, bucket, captured, target, Path(job.folder))
    return Exported(
        captured,
        conditions=sizes_needed,
        padded=padded,
        outputs=outputs,
        origins=origins,
        forms=forms,
        assigned=assigned,
        reads=names,
        outside=outside.names,
        asked=asked,
        notes=outside.notes,
    )


def _asked(asked: Mapping[str, Scalar], train: bool) -> dict[str, Scalar]:
    """The modes that forward asked for as the capture had them; what is computed from inputs requires gradients in
    training as it does in eager."""
    of_capture = {"grad": train} if "grad" in asked else {}
    return {name: mode for name, mode in {**asked, **of_capture}.items() if not (train and name == OF_INPUT)}


_TRACED_HERE = ("auto_functionalized", "triton_kernel_wrapper", "with_effects", "wrap_with_")
"""Higher-order operators whose bodies torch.export itself runs, without Dynamo."""


def _read(reads: AttributeReads, captured: Capture, kept: KeptObjects) -> set[str]:
    kept.changes()
    targets = [node.target for node in captured.graph.graph.nodes]
    holders = [str(target) for target in targets if isinstance(target, HigherOrderOperator)]
    if any(not name.startswith(_TRACED_HERE) for name in holders):
        reads.take_all()
    return {name for name in reads.names if name.rpartition(".")[2] not in kept.changed}
