"""Greedy generation with a language model of `manifests/llm.yaml`: one call for the prompt, one for each further token.

    aotc build manifests/llm.yaml --model llm
    python examples/generate.py llm --count 16 --eager

Both phases are buckets of one artifact, so they write to one key-value cache: the buffers of the module.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

if not __package__:  # run as a file: its own folder is on the path, and the package's is not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aotc

Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids `[1, seq]` and the position of the first; gives the logits of the last. See CachedLM."""


def generate(model: Model, prompt: Sequence[int], count: int, device: torch.device | str = "cpu") -> list[int]:
    """The `count` most likely tokens after `prompt`, one after another."""
    tokens = torch.tensor([prompt], device=device)
    start = torch.zeros((), dtype=torch.int64, device=device)
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(count):
            start, tokens = start + tokens.shape[1], model(tokens, start).argmax(dim=-1, keepdim=True)
            found.append(tokens)
    return torch.cat(found, dim=1)[0].tolist() if found else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", help="the artifact, like `llm` or `aotc-store#llm:latest`")
    parser.add_argument("--manifest", default="manifests/llm.yaml", help="where the module's factory stands")
    parser.add_argument("--store", help="the store, if the reference names none")
    parser.add_argument("--prompt", default="1,2,3,4,5,6,7,8", help="token ids")
    parser.add_argument("--count", type=int, default=16, help="how many tokens to generate")
    parser.add_argument("--eager", action="store_true", help="also generate with the module itself, and compare")
    arguments = parser.parse_args()

    from aotc.manifest import read_manifest
    from aotc.models.factory import build_module

    name = arguments.ref.rpartition("#")[2].partition(":")[0].partition("@")[0]
    manifest = read_manifest(arguments.manifest, [name])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = build_module(manifest.models[name], manifest.folder).to(device)
    start = time.perf_counter()
    compiled = aotc.load(arguments.ref, module, store=arguments.store)
    print(f"loaded in {time.perf_counter() - start:.3f} s")
    models: dict[str, Model] = {"aotc": compiled, **({"eager": module} if arguments.eager else {})}
    prompt = [int(token) for token in arguments.prompt.split(",")]
    results = {}
    for kind, model in models.items():
        generate(model, prompt, 2, device)  # what only the first call does
        start = time.perf_counter()
        results[kind] = generate(model, prompt, arguments.count, device)
        milliseconds = 1000 * (time.perf_counter() - start) / arguments.count
        print(f"{kind}: {milliseconds:.2f} ms per token: {results[kind]}")
    if arguments.eager and results["eager"] != results["aotc"]:
        sys.exit("the tokens differ")


if __name__ == "__main__":
    main()
