"""Calls of an artifact in a process without torch, from one with torch: what `aotc verify --standalone` compares."""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aotc.call_table.bind import make_binder
from aotc.errors import VerifyError
from aotc.machine.processes import child_command, child_environment
from aotc.reads.tensors import named_state
from aotc.records import Artifact, ResultContainer, Variant, bucket_name
from aotc.runtime.variant import result_builder
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.reference import parse_reference
from aotc.verify.standalone_child import ALIGNMENT, decoded, encoded


class StandaloneCalls:
    """`aotc.standalone.load`'s model, for tensors of torch. It has the weights that the module has now."""

    device = torch.device("cpu")

    def __init__(self, ref: str, store: str, target: str, module: nn.Module) -> None:
        """Raises VerifyError with the reason where a process without torch cannot load it."""
        opened = StoreReader.open(Path(store))
        bundle = read_bundle(opened, parse_reference(ref))
        (entry,) = [each for each in bundle.artifacts if each.target == target]
        self.artifact: Artifact = read_artifact(opened, entry)
        self._bind = make_binder(self.artifact.signature)
        self._module = module
        self._folder = tempfile.TemporaryDirectory(prefix="aotc-standalone-")
        self._process = subprocess.Popen(
            child_command("aotc.verify.standalone_child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            text=True,
        )
        weights = {} if self.artifact.weights == "frozen" else module.state_dict()
        self._ask(dict(weights), ref=ref, store=store, target=target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result as `aotc.load`'s code gives it. Raises VerifyError with what the call raised."""
        answer, data = self._ask({"args": args, "kwargs": kwargs})
        (variant,) = [each for each in self.artifact.variants if bucket_name(each.bucket) == answer["bucket"]]
        result = decoded(answer["value"], lambda held: _tensor(data, *held))
        outputs: list[Any] = [None] * len(variant.outputs)
        _put_outputs(variant.output_tree, result, outputs)
        self._put_given(variant, outputs, self._bind(args, kwargs))
        return result_builder(variant.output_tree, len(outputs), plain=True)(outputs)

    def _put_given(self, variant: Variant, outputs: list[Any], leaves: list[Any]) -> None:
        """A result that is an argument or a weight is that very object, which no other process can give."""
        state = named_state(self._module)
        for place, output in enumerate(variant.outputs):
            if output.leaf is not None and output.axis is None:
                outputs[place] = leaves[output.leaf]
            elif output.state is not None:
                outputs[place] = state[output.state]

    def _ask(self, value: Any, **more: str) -> tuple[dict[str, Any], bytearray]:
        file = Path(self._folder.name) / "tensors"
        data = bytearray()
        held = encoded(value, lambda part: _placed(part, data) if isinstance(part, Tensor) else None)
        file.write_bytes(data)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"file": str(file), "value": held, **more}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise VerifyError(f"the process without torch ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise VerifyError(f"without torch: {answer['error']}")
        return answer, bytearray(file.read_bytes())

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.communicate()
            self._folder.cleanup()


def _placed(tensor: Tensor, data: bytearray) -> list[Any]:
    """Append the tensor's bytes, as they lie."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    data.extend(bytes(-len(data) % ALIGNMENT))
    begin = len(data)
    if plain.numel():
        span = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        data.extend(ctypes.string_at(plain.data_ptr(), span * plain.element_size()))
    return [begin, str(plain.dtype).removeprefix("torch."), list(plain.shape), list(plain.stride())]


def _tensor(data: bytearray, begin: int, dtype: str, shape: list[int], strides: list[int]) -> Tensor:
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    ctypes.memmove(made.data_ptr(), bytes(data[begin : begin + made.numel() * made.element_size()]), made.nbytes)
    return made


def _put_outputs(tree: int | ResultContainer, value: Any, outputs: list[Any]) -> None:
    """Put each part of a result of builtins at its number in the tree."""
    if isinstance(tree, int):
        outputs[tree] = value
        return
    for item, part in zip(tree.items, value.values() if isinstance(value, dict) else value, strict=True):
        _put_outputs(item, part, outputs)
