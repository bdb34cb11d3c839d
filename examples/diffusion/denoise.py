"""Denoise a latent image with compiled blocks, and compare with eager.

python denoise.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from flux import transformer

import aotc

FOLDER = Path(__file__).resolve().parent
SIDE, STEPS = 8, 4


@torch.no_grad()
def denoise(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """A latent image, float32 `[1, 64, 4]`, in STEPS calls of the transformer."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, SIDE * SIDE, 4, generator=generator)
    prompt, pooled = torch.randn(1, 16, 32, generator=generator), torch.randn(1, 32, generator=generator)
    along = torch.arange(float(SIDE))
    places = torch.cartesian_prod(torch.zeros(1), along, along)  # [64, 3]
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    for step in scheduler.timesteps:
        noise = model(
            hidden_states=image,
            encoder_hidden_states=prompt,
            pooled_projections=pooled,
            timestep=step.expand(1) / 1000,
            img_ids=places,
            txt_ids=torch.zeros(16, 3),
            return_dict=False,
        )[0]
        image = scheduler.step(noise, step, image, return_dict=False)[0]
    return image


if __name__ == "__main__":
    model = transformer().eval()
    eager = denoise(model)
    compiled = aotc.load("flux", model, store=FOLDER / "aotc-store")
    torch.testing.assert_close(denoise(model), eager, rtol=1e-3, atol=1e-3)  # the module runs its compiled blocks
    print(compiled.stats().calls, "calls of compiled blocks")
    compiled.detach()
    torch.testing.assert_close(denoise(model), eager)
