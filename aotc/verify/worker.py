"""The process that compares: `python -m aotc.verify.worker JOB.json` writes a message a line to standard output.

It loads the artifact exactly as a service does, so a report also proves that loading works without a compiler.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.errors import AotcError, VerifyError
from aotc.manifest.calls import arguments_of, modes_of, signature_leaves
from aotc.manifest.factory import build_module
from aotc.manifest.types import ModelSpec
from aotc.processes import die_with_parent, message_stream
from aotc.records import Dims, bucket_name
from aotc.runtime import Compiled, load
from aotc.snapshot import same_bits
from aotc.targets import parse_target
from aotc.verify.cases import describe_sizes, model_dispatcher, sizes_to_verify
from aotc.verify.tolerance import Judgement, judge

Status = Literal["ok", "failed", "crashed", "could not run"]


class VerifyJob(msgspec.Struct, frozen=True):
    """What to verify: a reference in a store, the model's factory in `folder`, buckets from the `first`-th on."""

    ref: str
    store: str
    spec: ModelSpec
    folder: str
    target: str
    seeds: int
    first: int = 0


class Report(msgspec.Struct, frozen=True):
    """The verdict on one bucket at one set of sizes, the worst over outputs and seeds.

    Errors are relative to the reference's size (rms); see `aotc.verify.tolerance`.
    """

    model: str
    bucket: str
    target: str
    sizes: str
    status: Status
    error: float | None = None
    eager_error: float | None = None
    allowed: float | None = None
    detail: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the worker says: that it begins with a bucket at some sizes, and then how that ended."""

    bucket: int
    sizes: str
    report: Report | None = None


class Comparison:
    """The compiled callable, eager, and a float64 reference of one model, each with a module of its own."""

    def __init__(self, job: VerifyJob) -> None:
        self.spec, self.folder = job.spec, Path(job.folder)
        device = parse_target(job.target).device
        module = build_module(job.spec, self.folder).to(device)
        self.compiled: Compiled = load(job.ref, module, store=job.store, target=job.target)
        self.device = self.compiled.device
        self.module = module
        self.eager = copy.deepcopy(module)
        self.reference, self.wide = copy.deepcopy(module).double(), True
        self.signature = self.compiled.artifact.signature
        self.draws = False
        """Whether eager has drawn random numbers."""

    def compare(self, dims: Dims, seed: int) -> tuple[list[Judgement], list[Judgement]]:
        """Judge every output, and every input, buffer and changed parameter as they are after the call: the model may
        write to them.

        Raises VerifyError where the outputs are not as many as eager's, or a parameter was written over.
        """
        leaves = signature_leaves(self.spec, self.signature, dims, self.device, seed, self.folder)
        compiled, written = self._run(self.compiled, self.module, leaves)
        changed = self._changed_parameters()
        exact, exactly_written = self._run_reference(leaves)
        eager, eagerly_written = self._run(self.eager, self.eager, leaves)
        if self._has_drawn():  # in float64 it draws others, and what they change would count as eager's error
            self.draws, exact, exactly_written = True, eager, eagerly_written
        parameters = self._check_parameters(changed)
        if len(compiled) != len(eager):
            raise VerifyError(f"eager gives {len(eager)} outputs, compiled gives {len(compiled)}")
        return _judge_all(compiled, eager, exact), [*_judge_all(written, eagerly_written, exactly_written), *parameters]

    def _run(
        self, function: Any, module: nn.Module, leaves: Sequence[Any], autocast: bool = True
    ) -> tuple[list[Any], list[Tensor]]:
        """The outputs; and the inputs and buffers, as they are then."""
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = arguments_of(self.signature, own)
        torch.manual_seed(0)
        with modes_of(self.spec, self.device.type, autocast=autocast):
            outputs = pytree.tree_leaves(function(*args, **kwargs))
        buffers = (buffer.clone() for buffer in module.buffers())  # the next call writes to them
        return outputs, [*(leaf for leaf in own if isinstance(leaf, Tensor)), *buffers]

    def _has_drawn(self) -> bool:
        """Whether the last run took numbers from torch's generator, which it found as a seed leaves it."""
        generator = torch.default_generator
        if self.device.type == "cuda":
            generator = torch.cuda.default_generators[self.device.index or 0]
        after = generator.get_state()
        torch.manual_seed(0)
        return not torch.equal(after, generator.get_state())

    def _changed_parameters(self) -> dict[str, Tensor]:
        """Those that the compiled call changed, as they were before: as eager has them, which is yet to be called."""
        pairs = zip(self.module.named_parameters(), self.eager.parameters(), strict=True)
        return {name: before.detach().clone() for (name, now), before in pairs if not _same(now, before)}

    def _check_parameters(self, changed: Mapping[str, Tensor]) -> list[Judgement]:
        """Judge those that eager writes to. What it does not change, compiled code must not either: that has written to
        memory that is not its own."""
        now, eager = dict(self.module.named_parameters()), dict(self.eager.named_parameters())
        exact = dict(self.reference.named_parameters())
        own = {name for name, before in changed.items() if not _same(eager[name], before)}
        memory = {now[name].untyped_storage().data_ptr() for name in own}  # which others may have a part of
        wrong = [name for name in changed if now[name].untyped_storage().data_ptr() not in memory]
        missed = {name for name in now if name not in changed and not _same(now[name], eager[name])}
        judgements = [_judge(now[name], eager[name], exact[name]) for name in sorted(own | missed)]
        for name in (*own, *missed, *wrong):  # so that the next call is judged for itself
            now[name].data.copy_(eager[name].data)
        if wrong:
            raise VerifyError(
                f"the compiled code wrote over the parameter {wrong[0]}, which the model only reads"
                + (f", and over {len(wrong) - 1} more" if wrong[1:] else ""),
                hint="it writes to memory that is not its own: do not serve it, and report its model",
            )
        return judgements

    def _run_reference(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
        """In float64; where the model cannot be run so, in its own precision, which leaves eager's error out."""
        wide = [leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
        if self.wide:
            try:
                return self._run(self.reference, self.reference, wide, autocast=False)
            except Exception:  # its own operators may raise anything
                self.wide, self.reference = False, copy.deepcopy(self.eager)
        return self._run(self.reference, self.reference, leaves)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters are equal to the bit; of a class or a layout of their own, that is not asked."""
    plain = type(one.detach()) is Tensor and one.layout == torch.strided and not one.is_quantized
    return not plain or same_bits(one, other)


def _judge_all(compiled: Sequence[Any], eager: Sequence[Any], reference: Sequence[Any]) -> list[Judgement]:
    return [_judge(*values) for values in zip(compiled, eager, reference, strict=True)]


def _judge(compiled: Any, eager: Any, reference: Any) -> Judgement:
    if isinstance(eager, Tensor) and isinstance(compiled, Tensor):
        return judge(compiled, eager, reference)
    same = type(compiled) is type(eager) and compiled == eager
    return Judgement(same, 0.0, 0.0, 0.0, "" if same else f"eager gives {eager!r}, compiled gives {compiled!r}")


def verify(job: VerifyJob) -> Iterator[Message]:
    """Yield messages for each bucket and set of sizes. Raises AotcError where nothing can be run."""
    comparison = Comparison(job)
    artifact = comparison.compiled.artifact
    dispatcher = model_dispatcher(artifact, job.spec.buckets)
    for index in range(job.first, len(dispatcher.variants)):
        sizes = sizes_to_verify(dispatcher, index)
        name = bucket_name(dispatcher.variants[index].bucket)
        if not sizes:
            yield Message(index, "-", _report(job, name, "-", "failed", detail="no size is dispatched to this bucket"))
        for dims in sizes:
            yield Message(index, describe_sizes(dims))
            yield Message(index, describe_sizes(dims), _verify_sizes(comparison, job, name, dims))


def _verify_sizes(comparison: Comparison, job: VerifyJob, bucket: str, dims: Dims) -> Report:
    outputs: list[list[Judgement]] = []
    judgements: list[Judgement] = []
    try:
        for seed in range(job.seeds):
            of_outputs, of_written = comparison.compare(dims, seed)
            outputs.append(of_outputs)
            judgements += [*of_outputs, *of_written]
    except Exception as error:  # the model's own, too
        traceback.print_exc()
        return _report(job, bucket, describe_sizes(dims), "failed", detail=f"{type(error).__name__}: {error}")
    worst = max(judgements, key=lambda j: (not j.ok, j.error / j.allowed if j.allowed else 0.0))
    unseen = [number for number, seen in enumerate(zip(*outputs, strict=True)) if not any(one.finite for one in seen)]
    if worst.ok and unseen:
        detail = f"output {unseen[0]} has no finite element, in eager either: nothing shows that it is right; {_FINITE}"
        return _report(job, bucket, describe_sizes(dims), "failed", detail=detail)
    if not worst.ok and comparison.draws:
        worst = msgspec.structs.replace(worst, detail=f"{worst.detail}; {_RANDOM}")
    status: Status = "ok" if worst.ok else "failed"
    return _report(job, bucket, describe_sizes(dims), status, worst)


_RANDOM = (
    "the model draws random numbers, and compiled code draws others: verify it with a factory that leaves them out, or "
    "takes them as an input"
)
_FINITE = "give the inputs an `init`, or the factory weights, with which the model computes finite numbers"


def _report(
    job: VerifyJob, bucket: str, sizes: str, status: Status, judgement: Judgement | None = None, detail: str = ""
) -> Report:
    if judgement is None:
        return Report(job.spec.name, bucket, job.target, sizes, status, detail=detail)
    return Report(
        job.spec.name,
        bucket,
        job.target,
        sizes,
        status,
        judgement.error,
        judgement.eager_error,
        judgement.allowed,
        judgement.detail or detail,
    )


def main() -> int:
    die_with_parent()
    stream = message_stream()
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=VerifyJob)
    try:
        for message in verify(job):
            stream.write(msgspec.json.encode(message).decode() + "\n")
    except AotcError as error:
        message = Message(job.first, "-", _report(job, "-", "-", "could not run", detail=str(error)))
        stream.write(msgspec.json.encode(message).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
