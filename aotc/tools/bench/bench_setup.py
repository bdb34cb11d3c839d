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
    factory's weights; "" if none is wanted. onnx: for the first of `sizes`, the files to export to."""

    spec: ModelSpec
    folder: str
    device: str
    signature: Signature
    sizes: tuple[Dims, ...]
    inputs: tuple[str, ...]
    expected: str
    checkpoint: str
    onnx: tuple[str, ...] = ()


class BenchSetup(msgspec.Struct, frozen=True):
    """error: why nothing can be measured. gpu: its name. notes: what could not be written."""

    error: str = ""
    gpu: str = ""
    notes: tuple[str, ...] = ()
    onnx: tuple[tuple[str, str], ...] = ()
    onnx_error: str = ""


def prepared(
    subject: BenchSubject, sizes: Sequence[Dims], work: Path, checkpoint: str, exported: int = 0
) -> tuple[PrepareJob, BenchSetup]:
    """Prepare in a process of its own, whose files are in `work`; the first `exported` of the sizes as ONNX files, too.
    Raises VerifyError where the model cannot be run."""
    files = tuple(str(work / f"inputs-{number}.pt") for number in range(len(sizes)))
    job = PrepareJob(
        subject.spec,
        str(subject.folder),
        subject.device,
        subject.signature,
        sizes=tuple(sizes),
        inputs=files,
        expected=str(work / "expected.pt"),
        checkpoint=checkpoint,
        onnx=tuple(str(work / f"{at}.onnx") for at in range(exported)),
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


def exported(job: PrepareJob) -> Iterator[tuple[str, str]]:
    """Write the ONNX files; yield each with the shapes of its inputs. Raises what torch.onnx raises."""
    import torch
    from torch.utils import _pytree as pytree

    from aotc.models.calls import modes_of
    from aotc.models.factory import build_module
    from aotc.tools.bench.peers import export_onnx, shapes_of

    if not job.onnx:
        return
    module = build_module(job.spec, Path(job.folder))
    for path, inputs in zip(job.onnx, job.inputs, strict=False):
        args, kwargs = torch.load(inputs, weights_only=False)
        with modes_of(job.spec, job.device):
            export_onnx(module, args, kwargs, Path(path))
        yield path, shapes_of([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def main() -> int:
    parent = Parent()
    from aotc.models.factory import told

    job = parent.job(PrepareJob)
    try:
        notes = tuple(prepare(job))
        answer = BenchSetup(gpu=_gpu() if job.device == "cuda" else "", notes=notes)
        try:
            answer = msgspec.structs.replace(answer, onnx=tuple(exported(job)))
        except Exception as error:  # the exporter's, of a model that it does not take
            answer = msgspec.structs.replace(answer, onnx_error=told(error))
        parent.send(answer)
    except Exception as error:  # the model's own, too
        parent.send(BenchSetup(str(error) if isinstance(error, AotcError) else told(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
