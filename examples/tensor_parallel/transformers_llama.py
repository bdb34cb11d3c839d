"""Models of transformers, split by the plans that they come with: parameters are DTensors."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SAME_ON_EVERY_RANK = ("embedding_rowwise",)
"""Styles that are left out: each rank would look its own part of the vocabulary up, by code of its own."""


def llama(mesh: DeviceMesh | None = None, **config: int) -> nn.Module:
    """This rank's part of a Llama with random weights; the whole model without a mesh."""
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **config)).eval()
    if mesh is None:
        return model
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {}
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        style = model.tp_plan.get(re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight"))
        if style and style not in SAME_ON_EVERY_RANK:
            plan[name] = style
    return apply_tensor_parallelism(model, mesh, plan)


def pretrained(checkpoint: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """This rank's part of a checkpoint, by all of its plan; the whole model without a mesh.

    transformers makes a mesh of its own, of as many ranks as torchrun's variables say; aotc sets these for a factory.
    """
    plan = {} if mesh is None else {"tp_plan": "auto"}
    return AutoModelForCausalLM.from_pretrained(checkpoint, **plan).eval()
