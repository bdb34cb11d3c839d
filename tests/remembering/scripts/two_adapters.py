"""A whole pipeline of diffusers with two LoRA adapters: loaded, set, scaled, fused, unloaded."""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

import aotc


def pipeline():
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=8,
        attention_head_dim=4,
    )
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    return StableDiffusionPipeline(
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        unet=unet.eval(),
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def lora(unet, of, rank):
    """As a file of `save_lora_weights` has it."""
    found = {}
    for name, part in unet.named_modules():
        if name.endswith(of) and isinstance(part, torch.nn.Linear):
            found[f"unet.{name}.lora_A.weight"] = torch.randn(rank, part.in_features) / 4
            found[f"unet.{name}.lora_B.weight"] = torch.randn(part.out_features, rank) / 4
    return found


def main():
    torch.manual_seed(0)
    pipe = pipeline()
    pipe.set_progress_bar_config(disable=True)
    first, second = lora(pipe.unet, "to_q", 2), lora(pipe.unet, "to_k", 3)
    prompt, negative = torch.randn(1, 5, 8), torch.zeros(1, 5, 8)
    pipe.unet = aotc.compile(pipe.unet)
    pipe.vae.decode = aotc.compile(pipe.vae.decode)

    def image(what):
        found = pipe(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(0),
            height=8,
            width=8,
            output_type="np",
        ).images
        print(f"{what}: {found.mean():.4f} {found.std():.4f}")

    image("base")
    pipe.load_lora_weights(first, adapter_name="first")
    image("first")
    pipe.load_lora_weights(second, adapter_name="second")
    pipe.set_adapters(["first", "second"], [0.7, 0.3])
    image("both")
    pipe.fuse_lora()
    image("fused")
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    image("base again")


if __name__ == "__main__":
    main()
