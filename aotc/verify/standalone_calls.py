"""Calls of an artifact in a process without torch, from one with torch: what `aotc verify --standalone` compares."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aotc.call_table.bind import make_binder
from aotc.errors import VerifyError
from aotc.machine.processes import child_command, child_environment
from aotc.machine.targets import parse_target
from aotc.reads.tensors import named_state
from aotc.records import Artifact, ResultContainer, Variant, bucket_name
from aotc.runtime.variant import result_builder
from aotc.standalone.state_tensors import written_names
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.reference import parse_reference
from aotc.verify.other_python import other_python
from aotc.verify.standalone_child import ALIGNMENT, decoded, encoded


class StandaloneCalls:
    """`aotc.standalone.load`'s model, for tensors of torch. It has the weights that the module has now, and in each
    call the buffers that the model writes to, which then have what was written. Tensors on a GPU come to the process
    without torch in the CPU's memory."""

    def __init__(self, ref: str, store: str, target: str, module: nn.Module, python: str = "") -> None:
        """`python` is the command of another Python, which has aotc. Raises VerifyError with the reason where a process
        without torch cannot load it."""
        opened = StoreReader.open(Path(store))
        bundle = read_bundle(opened, parse_reference(ref))
        (entry,) = [each for each in bundle.artifacts if each.target == target]
        self.artifact: Artifact = read_artifact(opened, entry)
        self.device = torch.device(parse_target(target).device)
        self._bind = make_binder(self.artifact.signature)
        self._module = module
        self._folder = tempfile.TemporaryDirectory(prefix="aotc-standalone-")
        module_name = "aotc.verify.standalone_child"
        self._process = subprocess.Popen(
            other_python(python, "-m", module_name) if python else child_command(module_name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if python else child_environment(),
            text=True,
        )
        weights = {} if self.artifact.weights == "frozen" else module.state_dict()
        data = bytearray()
        held = encoded(dict(weights), lambda part: _placed(part, data, []) if isinstance(part, Tensor) else None)
        self._ask(held, data, ref=ref, store=store, target=target, device=self.device.type)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result as `aotc.load`'s code gives it, and what it writes written. Raises VerifyError with what the call
        raised."""
        own = named_state(self._module)
        state = {name: own[name] for name in sorted(written_names(self.artifact))}
        data, places = bytearray(), list[tuple[int, Tensor]]()
        value = encoded(
            {"state": state, "args": args, "kwargs": kwargs},
            lambda part: _placed(part, data, places) if isinstance(part, Tensor) else None,
        )
        answer = self._ask(value, data)
        for begin, tensor in places[len(state) :]:
            if span := _span(tensor):
                _bytes_of(tensor).copy_(torch.frombuffer(data, dtype=torch.uint8, count=span, offset=begin))
        with torch.no_grad():
            for name, held in answer["state"].items():
                own[name].copy_(self._tensor(data, *held[1:]))
        (variant,) = [each for each in self.artifact.variants if bucket_name(each.bucket) == answer["bucket"]]
        outputs: list[Any] = [None] * len(variant.outputs)
        result = decoded(answer["value"], lambda held: self._result(held, data, places, own))
        _put_outputs(variant.output_tree, result, outputs)
        self._put_given(variant, outputs, self._bind(args, kwargs))
        return result_builder(variant.output_tree, len(outputs), plain=True)(outputs)

    def _put_given(self, variant: Variant, outputs: list[Any], leaves: list[Any]) -> None:
        """A result that is an argument or a weight is that very object, which no other process can give."""
        state = named_state(self._module)
        for place, output in enumerate(variant.outputs):
            if output.leaf is not None and output.axis is None and not output.view:
                outputs[place] = leaves[output.leaf]
            elif output.state is not None and not output.view:
                outputs[place] = state[output.state]

    def _tensor(self, data: bytearray, begin: int, dtype: str, shape: list[int], strides: list[int]) -> Tensor:
        made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
        ctypes.memmove(made.data_ptr(), bytes(data[begin : begin + made.nbytes]), made.nbytes)
        return made.to(self.device)

    def _result(
        self, held: list[Any], data: bytearray, places: list[tuple[int, Tensor]], state: Mapping[str, Tensor]
    ) -> Tensor:
        """A tensor that came: in the memory of one of `places` or of the module's state where it lay there, else a new
        one."""
        name, begin, dtype, shape, strides = held
        owners = [(0, state[name])] if name else places
        for first, owner in owners if math.prod(shape) else ():
            if first <= begin < first + _span(owner):
                seen = _bytes_of(owner).view(getattr(torch, dtype))
                return seen.as_strided(shape, strides, seen.storage_offset() + (begin - first) // seen.element_size())
        places.append((begin, made := self._tensor(data, begin, dtype, shape, strides)))
        return made

    def _ask(self, value: Any, data: bytearray, **more: str) -> dict[str, Any]:
        """The answer; `data` has then the bytes that came with it."""
        file = Path(self._folder.name) / "tensors"
        file.write_bytes(data)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"file": str(file), "value": value, **more}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise VerifyError(f"the process without torch ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise VerifyError(f"without torch: {answer['error']}")
        data[:] = file.read_bytes()
        return answer

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.communicate()
            self._folder.cleanup()


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _placed(tensor: Tensor, data: bytearray, places: list[tuple[int, Tensor]]) -> list[Any]:
    """Append the tensor's bytes, as they lie; note where."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    data.extend(bytes(-len(data) % ALIGNMENT))
    places.append((len(data), plain))
    place = ["", len(data), str(plain.dtype).removeprefix("torch."), list(plain.shape), list(plain.stride())]
    if span := _span(plain):
        here = _bytes_of(plain).cpu()
        data.extend(ctypes.string_at(here.data_ptr(), span))
    return place


def _bytes_of(tensor: Tensor) -> Tensor:
    """Of dtype uint8, in the memory of a tensor that has elements."""
    flat = tensor.detach().as_strided((_span(tensor) // tensor.element_size(),), (1,))
    return flat.view(torch.uint8)


def _put_outputs(tree: int | ResultContainer, value: Any, outputs: list[Any]) -> None:
    """Put each part of a result of builtins at its number in the tree."""
    if isinstance(tree, int):
        outputs[tree] = value
        return
    for item, part in zip(tree.items, value.values() if isinstance(value, dict) else value, strict=True):
        _put_outputs(item, part, outputs)
