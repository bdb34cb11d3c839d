"""`python -m aotc.tools.bench.prepare JOB.json`: write what all contenders read, once, in a process that is not
measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aotc.errors import AotcError
from aotc.machine.processes import die_with_parent, message_stream
from aotc.manifest.types import ModelSpec
from aotc.records import Dims, Signature
from aotc.tools.bench.worker import tensors_in


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


class Prepared(msgspec.Struct, frozen=True):
    """error: why nothing can be measured. gpu: its name. notes: what could not be written."""

    error: str = ""
    gpu: str = ""
    notes: tuple[str, ...] = ()


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
    die_with_parent()
    stream = message_stream()
    from aotc.models.factory import told

    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=PrepareJob)
    try:
        notes = tuple(prepare(job))
        prepared = Prepared(gpu=_gpu() if job.device == "cuda" else "", notes=notes)
    except Exception as error:  # the model's own, too
        prepared = Prepared(str(error) if isinstance(error, AotcError) else told(error))
    stream.write(msgspec.json.encode(prepared).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
