"""A graph of nodes as ComfyUI runs it: each node once, from its inputs, with what it gave kept for the next prompt."""

import torch
from models import Denoiser, Layer

import aotc


class LoadModel:
    def run(self):
        torch.manual_seed(0)
        return aotc.compile(Denoiser().eval()), aotc.compile(Layer().eval())


class Encode:
    def run(self, models, text):
        with torch.inference_mode():
            words = torch.tensor([[float(ord(letter) % 7)] * 8 for letter in text[:6].ljust(6)])
            return models[1](words)[None]


class Sample:
    def run(self, models, positive, negative, steps, cfg, seed):
        x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            for step in range(steps, 0, -1):
                time = torch.full((2,), step / steps)
                found = models[0](torch.cat([x, x]), time, torch.cat([negative, positive]))
                without, given = found.chunk(2)
                x = x - (without + cfg * (given - without)) / steps
        return x


class Preview:
    def run(self, samples):
        print(f"{samples.mean().item():.5f} {samples.std().item():.5f}")


NODES = {"LoadModel": LoadModel, "Encode": Encode, "Sample": Sample, "Preview": Preview}


class Executor:
    def __init__(self):
        self.kept = {}

    def execute(self, prompt):
        for node in prompt:
            self.output_of(prompt, node)

    def output_of(self, prompt, name):
        node = prompt[name]
        given = {
            key: self.output_of(prompt, value[0]) if isinstance(value, list) else value
            for key, value in node["inputs"].items()
        }
        key = name, repr(self.signature(prompt, name))
        if key not in self.kept:
            self.kept[key] = NODES[node["class_type"]]().run(**given)
        return self.kept[key]

    def signature(self, prompt, name):
        inputs = prompt[name]["inputs"]
        return [self.signature(prompt, value[0]) if isinstance(value, list) else value for value in inputs.values()]


def prompt(text, seed, cfg):
    return {
        "1": {"class_type": "LoadModel", "inputs": {}},
        "2": {"class_type": "Encode", "inputs": {"models": ["1"], "text": text}},
        "3": {"class_type": "Encode", "inputs": {"models": ["1"], "text": "blurry"}},
        "4": {
            "class_type": "Sample",
            "inputs": {"models": ["1"], "positive": ["2"], "negative": ["3"], "steps": 6, "cfg": cfg, "seed": seed},
        },
        "5": {"class_type": "Preview", "inputs": {"samples": ["4"]}},
    }


def main():
    executor = Executor()
    for text, seed, cfg in (("a cat", 1, 4.0), ("a cat", 2, 4.0), ("a lighthouse", 2, 5.5), ("a fox", 3, 7.0)):
        executor.execute(prompt(text, seed, cfg))


if __name__ == "__main__":
    main()
