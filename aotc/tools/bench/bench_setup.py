"""`python -m aotc.tools.bench.bench_setup JOB.json`: write what all contenders read, once, in a process that is not
measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from aotc.errors import AotcError, VerifyError
from aotc.machine.processes import Parent, answer_of
from aotc.manifest.types import ModelSpec
from aotc.records import Dims, Signature
from aotc.tools.bench.contender_caches import own_caches
from aotc.tools.bench.measure_worker import tensors_in
from aotc.tools.bench.subject import BenchSubject


class PrepareJob(msgspec.Struct, frozen=True):
    """inputs: a file for each of `sizes`. expected: the file of eager's output on the first. checkpoint: of the
    factory's weights; "" if none is wanted."""

    spec: ModelSpec
    folder: str
    device: str
    signature: Signature
    sizes: tuple[Dims, ...]
    inputs: tuple[str, ...]
    expected: str
    checkpoint: str


class BenchSetup(msgspec.Struct, frozen=True):
    """error: why nothing can be measured. gpu: its name. notes: what could not be written."""

    error: str = ""
    gpu: str = ""
    notes: tuple[str, ...] = ()


def prepared(
    subject: BenchSubject, sizes: Sequence[Dims], work: Path, checkpoint: str
) -> tuple[PrepareJob, BenchSetup]:
    """Prepare in a process of its own, whose files are in `work`. Raises VerifyError where the model cannot be run."""
    files = tuple(str(work / f"inputs-{number}.pt") for number in range(len(sizes)))
    job = PrepareJob(
        *(subject.spec, str(subject.folder), subject.device, subject.signature, tuple(sizes), files),
        *(str(work / "expected.pt"), checkpoint),
    )
    try:
        answer = answer_of("aotc.tools.bench.bench_setup", job, BenchSetup, work, own_caches(work / "prepare"))
        error = answer.error
    except ChildProcessError as ending:
        error = f"its process {ending}"
    if error:
        raise VerifyError(f"{subject.spec.name} cannot be run in eager: {error}")
    return job, answer


def prepare(job: PrepareJob) -> Iterator[str]:
    """Yield notes. Raises what the model raises."""
    import torch

    from aotc.models.calls import arguments_of, modes_of, signature_leaves
    from aotc.models.factory import build_module, told

    folder = Path(job.folder)
    module = build_module(job.spec, folder).to(job.device)
    if job.checkpoint:
        try:
            from safetensors.torch import save_model

            save_model(module, job.checkpoint)
        except Exception as error:  # tensors of subclasses
            Path(job.checkpoint).unlink(missing_ok=True)
            yield f"the weights cannot be written as a checkpoint, so nothing starts from one: {told(error)}"
    for number, (dims, path) in enumerate(zip(job.sizes, job.inputs, strict=True)):
        leaves = signature_leaves(job.spec, job.signature, dims, job.device, 0, folder)
        arguments = arguments_of(job.signature, leaves)
        torch.save(arguments, path)
        if number == 0:
            args, kwargs = arguments
            with modes_of(job.spec, job.device):
                torch.save(tensors_in(module(*args, **kwargs)), job.expected)


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def main() -> int:
    parent = Parent()
    from aotc.models.factory import told

    job = parent.job(PrepareJob)
    try:
        notes = tuple(prepare(job))
        parent.send(BenchSetup(gpu=_gpu() if job.device == "cuda" else "", notes=notes))
    except Exception as error:  # the model's own, too
        parent.send(BenchSetup(str(error) if isinstance(error, AotcError) else told(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
