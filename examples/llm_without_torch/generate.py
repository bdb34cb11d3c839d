"""Tokens from a compiled language model, in a process without torch and numpy.

python generate.py 5 17 42 8
python generate.py 5 17 42 8 --temperature 0.8 --seed 1 --device cuda
"""

from __future__ import annotations

import argparse
import array
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import aotc.standalone

FOLDER = Path(__file__).resolve().parent


class RequestError(ValueError):
    """The model cannot take this prompt, or has no room for so many tokens."""


class Generator:
    """A loaded model, `TokenLM` of ../language_models.py. It has one cache, so it generates one text at a time.

    `room`: tokens that the cache holds. `vocabulary`: the number of tokens.
    """

    def __init__(self, model: aotc.standalone.StandaloneModel, ends: Sequence[int] = ()) -> None:
        self._model, self._ends, self._cache = model, frozenset(ends), threading.Lock()
        self._sizes = sorted((int(variant.bucket["seq"]) for variant in model.artifact.variants), reverse=True)
        shapes = {spec.name: spec.shape for spec in model.artifact.state}
        self.room = int(shapes["keys_0"][2])
        self.vocabulary = next(int(shape[0]) for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))

    def generate(self, prompt: Sequence[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """At most `count` tokens after `prompt`: the text ends with one of `ends`. Raises RequestError."""
        self._check(prompt, count)
        chosen = tensor("f", [temperature]), tensor("q", [seed])
        found: list[int] = []
        with self._cache:
            start, tokens = 0, prompt
            while len(found) < count and self._ends.isdisjoint(found[-1:]):
                for chunk in self._chunks(tokens):
                    (token,) = self._model(tensor("q", chunk, 1, len(chunk)), tensor("q", [start]), *chosen)
                    start += len(chunk)
                found.append(token)
                tokens = [token]
        return found

    def _check(self, prompt: Sequence[int], count: int) -> None:
        if not prompt:
            raise RequestError("the prompt has no tokens")
        if others := [token for token in prompt if not 0 <= token < self.vocabulary]:
            raise RequestError(f"the prompt has token {others[0]}, and the model those of 0 to {self.vocabulary - 1}")
        if len(prompt) + count > self.room:
            asked = f"the prompt has {len(prompt)} tokens, and {count} more are asked for"
            raise RequestError(f"{asked}: the cache has room for {self.room} in all")

    def _chunks(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """The tokens by sizes of buckets, the largest first: no size in between needs code of its own."""
        begin = 0
        for size in self._sizes:
            while begin + size <= len(tokens):
                yield tokens[begin : begin + size]
                begin += size


def tensor(kind: str, values: Sequence[float], *shape: int) -> memoryview:
    """A tensor of a type of `array`, which is all that a call needs; without a shape, of one number without axes."""
    return memoryview(array.array(kind, values)).cast("B").cast(kind, shape)  # type: ignore[call-overload, no-any-return]


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that say which model is loaded."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ref", default=f"{FOLDER}/aotc-store#llm", help="the artifact, like `aotc-store#llm`")
    made.add_argument("--weights", default=FOLDER / "model.safetensors", help="a safetensors file or its folder")
    made.add_argument("--device", default="cpu", help="`cpu`, `cuda`, `cuda:1`, …")
    made.add_argument("--end", type=int, action="append", default=[], help="a token that ends a text; may be repeated")
    return made


def generator_of(options: argparse.Namespace) -> Generator:
    model = aotc.standalone.load(options.ref, weights=options.weights, device=options.device)
    return Generator(model, options.end)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("prompt", nargs="+", type=int, help="token ids")
    made.add_argument("--max-tokens", type=int, default=16)
    made.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token is taken")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    try:
        print(*generator_of(options).generate(options.prompt, options.max_tokens, options.temperature, options.seed))
    except RequestError as error:
        made.error(str(error))


if __name__ == "__main__":
    main()
