"""Whole pipelines of diffusers with compiled code in them, compared with eager.

python denoise.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import tiny
import torch

import aotc

STORE = Path(__file__).resolve().parent / "aotc-store"
PROMPT = {"prompt_embeds": torch.randn(1, 16, 32)}
POOLED = {"pooled_prompt_embeds": torch.randn(1, 32)}
NEGATIVE = {"negative_prompt_embeds": torch.zeros(1, 16, 32)}
NEGATIVE_POOLED = {"negative_pooled_prompt_embeds": torch.zeros(1, 32)}
FLOW = diffusers.FlowMatchEulerDiscreteScheduler


def pipeline(cls: Any, encoders: int, **components: Any) -> Any:
    """A pipeline without text encoders: the calls below pass what these would have made of a prompt."""
    for number in ("", "_2", "_3")[:encoders]:
        components |= {f"text_encoder{number}": None, f"tokenizer{number}": None}
    made = cls(**components)
    for module in filter(lambda part: isinstance(part, torch.nn.Module), components.values()):
        module.eval()  # as from_pretrained does
    made.set_progress_bar_config(disable=True)
    return made


def flux() -> Any:
    return pipeline(diffusers.FluxPipeline, 2, scheduler=FLOW(), vae=None, transformer=tiny.flux())


def sd3() -> Any:
    return pipeline(diffusers.StableDiffusion3Pipeline, 3, scheduler=FLOW(), vae=tiny.vae(), transformer=tiny.sd3())


def sdxl() -> Any:
    parts = {"scheduler": diffusers.EulerDiscreteScheduler(), "vae": tiny.vae(), "unet": tiny.sdxl_unet()}
    return pipeline(diffusers.StableDiffusionXLPipeline, 2, **parts, force_zeros_for_empty_prompt=False)


def wan() -> Any:
    return pipeline(diffusers.WanPipeline, 1, scheduler=FLOW(), vae=None, transformer=tiny.wan())


def compare(make: Callable[[], Any], models: dict[str, str], *calls: dict[str, Any]) -> Any:
    """Run each call by a pipeline in eager and by one with compiled code, which is returned."""
    eager, pipe = make(), make()
    aotc.attach(pipe, STORE, models=models)  # all that a service adds
    for call in calls:
        images = [
            each(**call, num_inference_steps=4, generator=torch.Generator().manual_seed(0), return_dict=False)[0]
            for each in (eager, pipe)
        ]
        torch.testing.assert_close(images[1], images[0], rtol=1e-3, atol=1e-3)
    counts = {name: getattr(pipe, name).stats() for name in models}
    assert all(count.calls and not count.misses for count in counts.values())
    print(f"{make.__name__}: {', '.join(f'{count.calls} calls of {name}' for name, count in counts.items())}, as eager")
    return pipe


if __name__ == "__main__":
    latent = {"output_type": "latent"}
    pooled = PROMPT | POOLED
    both = pooled | NEGATIVE | NEGATIVE_POOLED
    compare(
        flux,
        {"transformer": "flux"},
        pooled | latent | {"height": 128, "width": 128},
        pooled | latent | {"height": 128, "width": 192},
    )
    compare(sd3, {"transformer": "sd3"}, both | latent | {"height": 16, "width": 16})
    compare(sdxl, {"unet": "unet", "vae": "vae"}, both | {"output_type": "pt", "height": 32, "width": 32})
    video = PROMPT | NEGATIVE | latent | {"height": 64, "num_frames": 9}
    compare(wan, {"transformer": "wan"}, video | {"width": 96}, video | {"width": 64})
