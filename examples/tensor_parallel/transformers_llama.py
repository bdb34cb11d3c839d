"""A model of transformers, split by the plan that it comes with: parameters are DTensors."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM


def pretrained(checkpoint: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """This rank's part of a checkpoint; the whole model without a mesh.

    transformers makes a mesh of its own, of as many ranks as torchrun's variables say; aotc sets these for a factory.
    By most plans each rank has rows of the embedding, and the number of its first row in its code: a library each.
    """
    plan = {} if mesh is None else {"tp_plan": "auto"}
    return AutoModelForCausalLM.from_pretrained(checkpoint, **plan).eval()
