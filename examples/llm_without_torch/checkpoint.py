"""Write the weights of a manifest's model as it names them: random ones, or those of a checkpoint of transformers.

    python checkpoint.py
    python checkpoint.py --manifest ../../manifests/llm.yaml --model llm-2gb-tokens --output llm-2gb.safetensors
    python checkpoint.py --checkpoint FOLDER

The configuration of a checkpoint must be that of the manifest. Where the model is served, this is not needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM

from aotc.manifest import read_manifest
from aotc.models.factory import build_module

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--manifest", default=FOLDER / "manifest.yaml")
    made.add_argument("--model", default="llm")
    made.add_argument("--checkpoint", help="a folder of transformers, or a name on its hub")
    made.add_argument("--output", default=FOLDER / "model.safetensors")
    options = made.parse_args()
    manifest = read_manifest(options.manifest, [options.model])
    torch.manual_seed(0)
    module = build_module(manifest.models[options.model], manifest.folder)
    if options.checkpoint:
        trained = AutoModelForCausalLM.from_pretrained(options.checkpoint)
        module.get_submodule("model").load_state_dict(trained.state_dict())
    save_model(module, str(options.output))


if __name__ == "__main__":
    main()
