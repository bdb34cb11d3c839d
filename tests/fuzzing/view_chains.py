"""Random chains of views of inputs, buffers and fresh tensors, some of which forward writes to.

    python tests/fuzzing/view_chains.py --models 20 --chains 40 --seed 1

One model returns the results of many chains. It is built for a range of sizes, and called in eager and compiled, with
inputs in the compiled layout and in another one. Both calls must agree on three things: values, which results share
which elements with inputs, buffers and one another, and all values again after each of these tensors is written to.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
from in_process import build_here

import aotc
from aotc.tensors.sharing import differences, sharing

SIZES = (5, 6, 7, 9)
"""Of the dim `n`, whose range is from the first to the last; the last but one is that of tuning."""
LONGEST = 4

SOURCES: Mapping[str, Callable[[int], Tensor]] = {
    "x": lambda n: torch.randn(n, 6),
    "c": lambda n: torch.randn(n, 6),
    "q": lambda n: torch.randint(0, 9, (2, n, 4), dtype=torch.int32),
    "z": lambda n: torch.randn(n, 4, dtype=torch.complex64),
    "self.b": lambda n: torch.randn(4, 6),
    "self.k": lambda n: torch.randn(4, 6),
    "y": lambda n: torch.randn(n, 6),
    "w": lambda n: torch.randn(6, 6),
}
"""What chains begin with, at a size: inputs, of which `c` and `q` are written to, buffers, of which `b` is, and tensors
that forward computes, of which `w` is written to."""
WRITTEN = ("c", "q", "self.b", "w")
WRITES = (
    "c[:, 2:4] = x[:, :2]",
    "c.add_(1)",
    "c[1:].mul_(2)",
    "q[0].add_(1)",
    "q.transpose(0, 2)[1].zero_()",
    "self.b[1] += 1",
    "self.b.t()[:2].copy_(self.k.t()[:2])",
    "w[:, :2] = 1",
    "w.mul_(2)",
)

TEXT = """
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.arange(24.0).view(4, 6))
        self.register_buffer("k", torch.arange(24.0).view(4, 6) / 3)

    def forward(self, x, c, q, z):
        y, w = x + 1, x.t() @ x
        {lines}
        return {{{results}}}
"""


class Chain(NamedTuple):
    source: str
    steps: tuple[str, ...]

    @property
    def text(self) -> str:
        text = self.source
        for step in self.steps:
            text = step.replace("@", text) if "@" in step else text + step
        return text


def step_of(random: Random, tensor: Tensor, first: bool) -> str:
    """One view of a tensor, as text: what is to follow the tensor's own, or with `@` in its place."""
    rank = tensor.dim()
    axis, other = (random.randrange(rank), random.randrange(rank)) if rank else (0, 0)
    before = ":, " * axis
    order = random.sample(range(rank), rank)
    steps = [
        *(f"[{before}{part}]" for part in ("1:", ":2", ":-1", "::2", "-2:", "1:2", "0", "-1", "None")),
        f".select({axis}, 1)",
        f".narrow({axis}, 0, 2)",
        f".transpose({axis}, {other})",
        f".permute({order})",
        f".movedim({axis}, {other})",
        f".unsqueeze({axis})",
        f".squeeze({axis})",
        f".unsqueeze(0).expand({[3, *[-1] * rank]})",
        f".chunk(2, {axis})[0]",
        f".split(2, {axis})[0]",
        f".unbind({axis})[1]",
        f".unfold({axis}, 2, 1)",
        f".unflatten({axis}, (2, -1))",
        *(".reshape(-1)", ".flatten()", ".view(-1)", ".flatten(-2)", ".diagonal()", ".mT", ".detach()", ".data"),
        *(".contiguous()", "@.view_as(@)", "[..., :0]", "[:1]", "F.pad(@, (0, 0))", "F.pad(@, (0, -1))"),
        *([".as_strided((2, 3), (1, 2))", ".as_strided((3,), (4,))"] if first else []),
        *({torch.float32: [".to(torch.float32)", ".view(torch.int32)", ".view(torch.float16)", ".view(torch.float64)"]}
          | {torch.complex64: ["torch.view_as_real(@)", ".real", ".imag", ".conj()", ".conj().imag"]}
          ).get(tensor.dtype, [".view(torch.uint8)"]),
    ]  # fmt: skip
    return random.choice(steps)


def chain_of(random: Random, source: str) -> Chain:
    """A chain that eager takes at all sizes."""
    tensors = {size: SOURCES[source](size) for size in SIZES}
    steps: list[str] = []
    for _ in range(random.randint(1, LONGEST)):
        tried = [*steps, step_of(random, tensors[SIZES[-2]], not steps)]
        try:
            found = {size: evaluated(Chain(source, tuple(tried)), SOURCES[source](size)) for size in SIZES}
        except (RuntimeError, IndexError, ValueError):
            continue
        steps, tensors = tried, found
    return Chain(source, tuple(steps))


def evaluated(chain: Chain, tensor: Tensor) -> Tensor:
    result: Tensor = eval(chain._replace(source="t").text, {"t": tensor, "torch": torch, "F": torch.nn.functional})
    return result


class Drawn(NamedTuple):
    """A model's text and its chains by the names of their results."""

    text: str
    chains: dict[str, Chain]
    any_layout: bool
    """Whether chains of inputs that are written to are views of inputs in other layouts, too."""


def draw(seed: int, count: int) -> Drawn:
    random = Random(f"views {seed}")
    chains = {f"v{number}": chain_of(random, random.choice([*SOURCES])) for number in range(count)}
    any_layout = seed % 2 == 0
    kept = ((name, chain) for name, chain in chains.items() if not any_layout or _is_view_in_any_layout(chain))
    chains = {name: chain for name, chain in kept if _exports(chain)}
    lines = [f"{name} = {chain.text}" for name, chain in chains.items()]
    for write in (*WRITES, *(f"{name}.add_(1)" for name, chain in chains.items() if _may_be_written(chain))):
        if random.random() < 0.5:
            after = 1 + next((at for at, line in enumerate(lines) if line.startswith(f"{write[:-8]} =")), -1)
            lines.insert(random.randint(after, len(lines)), write)
    results = ", ".join(f"{name!r}: {name}" for name in ("y", "w", *chains))
    return Drawn(TEXT.format(lines="\n        ".join(lines), results=results), chains, any_layout)


def _is_view_in_any_layout(chain: Chain) -> bool:
    """`view` refuses other strides than those of the build, and `reshape` makes a copy, of which later writes to the
    input are none."""
    return chain.source not in ("c", "q") or not re.search("view|reshape|flatten|contiguous|as_strided", chain.text)


def _may_be_written(chain: Chain) -> bool:
    tensor = evaluated(chain, SOURCES[chain.source](6))
    odd = any(part in step for step in chain.steps for part in ("expand", "unfold", "as_strided", "conj", "view(torch"))
    return chain.source in WRITTEN and not odd and tensor.numel() > 0


def _exports(chain: Chain) -> bool:
    """Whether torch.export takes the chain for all sizes of the range."""

    class One(torch.nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return evaluated(chain, t)

    example = SOURCES[chain.source](SIZES[-2])
    n = torch.export.Dim("n", min=SIZES[0], max=SIZES[-1])
    axes = {axis: n for axis, size in enumerate(SOURCES[chain.source](7).shape) if size == 7}
    try:
        torch.export.export(One(), (example,), dynamic_shapes=({**axes},), strict=False)
    except Exception:  # whatever it raises
        return False
    return True


MANIFEST = """
version: 1
defaults: {mode: default, make_contiguous: true}
models:
  views:
    factory: FILE:Model
    inputs:
      x: {shape: [n, 6]}
      c: {shape: [n, 6]}
      q: {shape: [2, n, 4], dtype: int32}
      z: {shape: [n, 4], dtype: complex64}
    buckets: [{n: [5, 9]}]
"""


class Tally(NamedTuple):
    """What came of a model: the sentences about what differs, and how many of its calls ran compiled code."""

    wrong: list[str]
    calls: int
    refused: str = ""


def try_model(drawn: Drawn, folder: Path, name: str) -> Tally:
    """Build the model, and call it at every size, as it comes and in another layout."""
    (folder / f"{name}.py").write_text(drawn.text)
    (folder / f"{name}.yaml").write_text(MANIFEST.replace("FILE", f"{name}.py"))
    report = build_here(folder / f"{name}.yaml", folder / name, jobs=1, share=False)
    if report.failed:
        return Tally([], 0, str(report.failed[0].error))
    spec = spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    wrong: list[str] = []
    module, eager = loaded.Model().eval(), loaded.Model().eval()
    compiled = aotc.load("views", module, store=folder / name)
    with torch.no_grad():
        for size in SIZES:
            for strided in {False, drawn.any_layout}:
                wrong += _difference(compiled, module, eager, size, strided)
    stats = compiled.stats()
    if stats.misses:
        wrong.append(f"{stats.misses} misses: {stats.miss_kinds}")
    return Tally(wrong, stats.calls)


def _inputs(size: int, strided: bool) -> dict[str, Tensor]:
    torch.manual_seed(size)
    inputs = {name: SOURCES[name](size) for name in ("x", "c", "q", "z")}
    if strided:  # as a part of a longer tensor, and with its axes the other way round
        inputs["c"] = torch.cat([inputs["c"], inputs["c"]], 1)[:, :6]
        inputs["q"] = inputs["q"].transpose(0, 2).contiguous().transpose(0, 2)
    return inputs


def _difference(compiled: Any, module: Any, eager: Any, size: int, strided: bool) -> list[str]:
    states = [dict(each.named_buffers()) for each in (eager, module)]
    inputs = [_inputs(size, strided) for _ in range(2)]
    results = [call(**given) for call, given in zip((eager, compiled), inputs, strict=True)]
    shared = [sharing(each, given | state) for each, given, state in zip(results, inputs, states, strict=True)]
    where = f"at {size}{' strided' if strided else ''}: "
    found = [where + sentence for sentence in differences(*shared)] + [where + name for name in _unequal(*results)]
    both = [{**each, **given, **state} for each, given, state in zip(results, inputs, states, strict=True)]
    for name in both[0]:
        done = [_written(every[name]) for every in both]
        found += [f"{where}after a write to {name}: {other}" for other in _unequal(*both)] if all(done) else []
        if done[0] != done[1]:
            found.append(f"{where}a write to {name} is refused in one of both")
    for ours, theirs in zip(states[1].values(), states[0].values(), strict=True):
        ours.copy_(theirs)
    return found


def _written(tensor: Tensor) -> bool:
    try:
        tensor.add_(1)
    except RuntimeError:  # elements that share a place
        return False
    return True


def _unequal(eager: Mapping[str, Tensor], compiled: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} differs"
        for name, expected in eager.items()
        if expected.shape != compiled[name].shape
        or expected.dtype != compiled[name].dtype
        or not torch.allclose(expected, compiled[name], rtol=1e-4, atol=1e-4, equal_nan=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--chains", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chains, calls, wrong, refused = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.models):
            seed = given.seed * 1000 + number
            drawn = draw(seed, given.chains)
            tally = try_model(drawn, Path(folder), f"views_{seed}")
            chains, calls = chains + len(drawn.chains), calls + tally.calls
            wrong, refused = wrong + bool(tally.wrong), refused + bool(tally.refused)
            for sentence in [*tally.wrong[:20], *filter(None, [tally.refused])]:
                print(f"{seed}: {sentence}", flush=True)
            if tally.wrong:
                print(drawn.text, flush=True)
    print(f"| {given.models} models | {chains} chains | {calls} compiled calls | {refused} refused | {wrong} WRONG |")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
