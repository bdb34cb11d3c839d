"""Adapters in one artifact: selected, scaled, swapped, switched off, and fused.

python lora.py
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import peft
import tiny
import torch
from denoise import STORE
from peft.utils.hotswap import hotswap_adapter_from_state_dict

import aotc
from aotc import adapters

CALL = {
    "hidden_states": torch.randn(1, 64, 16),
    "encoder_hidden_states": torch.randn(1, 16, 32),
    "pooled_projections": torch.randn(1, 32),
    "timestep": torch.ones(1),
    "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
    "txt_ids": torch.zeros(16, 3),
    "joint_attention_kwargs": {},
    "return_dict": False,
}


def config(rank: int) -> peft.LoraConfig:
    return peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


def adapted(*names: str, rank: int = 2, seed: int = 1) -> Any:
    """The model with adapters as peft makes them: what a pipeline's `load_lora_weights` gives."""
    model = tiny.flux()
    torch.manual_seed(seed)
    for name in names:
        model.add_adapter(config(rank), name)
    return model.eval()


if __name__ == "__main__":
    eager, model = (adapted("style", "subject") for _ in range(2))
    adapters.prepare(model, rank=4).eval()  # as in the factory
    compiled = aotc.load("flux-lora", model, store=STORE)

    @torch.no_grad()
    def check(what: str, expected: Any = eager) -> Any:
        found = compiled(**CALL)[0]
        torch.testing.assert_close(found, expected(**CALL)[0], rtol=1e-4, atol=1e-4)
        print(what)
        return found

    results = []
    for names, weights in ((["style"], [1.0]), (["subject"], [0.5]), (["style", "subject"], [0.7, 0.2])):
        for each in (eager, model):
            each.set_adapters(names, weights)
        results.append(check(f"{' and '.join(names)}, by {weights}"))
    for each in (eager, model):
        each.disable_adapters()
    results.append(check("none"))
    assert all(not torch.allclose(one, other) for one, other in itertools.pairwise(results))

    for each in (eager, model):
        each.enable_adapters()
        each.set_adapters(["style"], [1.0])
    other = adapted("style", rank=3, seed=2)
    state = {name: tensor for name, tensor in other.state_dict().items() if "lora_" in name}
    hotswap_adapter_from_state_dict(model, state, "style", config(3))  # as load_lora_weights(…, hotswap=True)
    check("another adapter, of rank 3, in the place of the first", other)

    fused = copy.deepcopy(eager)
    fused.fuse_lora()
    compiled.detach()
    fused.unload_lora()
    compiled = aotc.load("flux", fused, store=STORE)  # what was built for the base model
    check("fused, in the base model's code", eager)
