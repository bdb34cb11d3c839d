"""Other runtimes that serve a model on a CPU: ONNX Runtime and OpenVINO, from an ONNX file for each set of sizes.

Their settings are those that their own guides name for latency; products of float32 stay float32. A process of theirs
imports torch only after its start was timed, to read the inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from aotc.tools.bench.contenders import Attachment

Arrays = list[Any]
RunSession = Callable[[Mapping[str, Any]], Arrays]
"""From numpy's arrays by the names of a graph's inputs to its outputs, in order."""


def export_onnx(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> None:
    """Write the model for inputs of these sizes, with its weights. Other arguments become constants.

    Raises ImportError without onnx and onnxscript, and whatever `torch.onnx` raises of a model that it cannot export.
    """
    import torch
    from torch import nn
    from torch.utils import _pytree as pytree

    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    class OfTensors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = pytree.tree_unflatten([given.get(at, leaf) for at, leaf in enumerate(leaves)], structure)
            return tuple(_tensors_of(self.module(*args, **kwargs)))

    torch.onnx.export(
        OfTensors().eval(),
        tuple(leaves[place] for place in places),
        path,
        input_names=[f"input{number}" for number in range(len(places))],
        dynamo=True,
        external_data=True,
        verbose=False,
    )


def _tensors_of(value: Any) -> list[Any]:
    """In the order of `tensors_in` of aotc.tools.bench.measure_worker."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if hasattr(value, "values") else value
    return [leaf for item in values for leaf in _tensors_of(item)] if isinstance(value, dict | list | tuple) else []


def onnxruntime_session(path: str, threads: int) -> RunSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]  # of those that the graph reads

    def run(given: Mapping[str, Any]) -> Arrays:
        outputs: Arrays = session.run(None, {name: given[name] for name in names})
        return outputs

    return run


def openvino_session(path: str, threads: int, precision: str = "f32") -> RunSession:
    """`precision` is OpenVINO's name of the dtype of products: f32, bf16."""
    import threading

    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
    }
    model = openvino.Core().compile_model(path, "CPU", settings)
    names = [each.get_any_name() for each in model.inputs]
    own = threading.local()  # a request serves one thread at a time

    def run(given: Mapping[str, Any]) -> Arrays:
        if not hasattr(own, "request"):
            own.request = model.create_infer_request()
        found = own.request.infer({name: given[name] for name in names})
        return [found[output].copy() for output in model.outputs]

    return run


def peer(make: Callable[[str, int], RunSession]) -> Callable[[Any, Attachment], Callable[..., Any]]:
    """How a contender attaches: a session for each file of `Attachment.onnx`, chosen by the sizes of a call."""

    def attach(module: Any, attachment: Attachment) -> Callable[..., Any]:
        threads = max(1, len(os.sched_getaffinity(0)) // attachment.threads)
        sessions = {shapes: make(path, threads) for path, shapes in attachment.onnx}

        def call(*args: Any, **kwargs: Any) -> Any:
            import torch
            from torch.utils import _pytree as pytree

            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            run = sessions[shapes_of(tensors)]
            outputs = run({f"input{number}": tensor.numpy() for number, tensor in enumerate(tensors)})
            return [torch.from_numpy(output) for output in outputs]

        return call

    return attach


def shapes_of(tensors: Sequence[Any]) -> str:
    """Of all tensors of a call: `[1, 128] [1, 128, 256]`."""
    return " ".join(str(list(tensor.shape)) for tensor in tensors)


def missing_packages(names: Sequence[str]) -> list[str]:
    """Of the peers among these contenders, what they need and is not installed."""
    from importlib.util import find_spec

    needed = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino", "onnx", "onnxscript")}
    return sorted({package for name in names for package in needed.get(name, ()) if find_spec(package) is None})
