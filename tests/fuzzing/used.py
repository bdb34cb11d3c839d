"""The models of `uses.py`, and one side of a case: a module in eager or compiled, and what is noted of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import aotc
from aotc.manifest import ModelSpec, read_manifest
from aotc.manifest.inputs import TensorInput, parse_inputs
from aotc.models.calls import fill
from aotc.models.example_inputs import example_leaves
from aotc.models.factory import build_module
from aotc.records import SizeRange

HERE = Path(__file__).resolve().parent
MANIFESTS = (HERE.with_name("training") / "training.yaml", HERE / "uses.yaml")


class Model(NamedTuple):
    spec: ModelSpec
    folder: Path
    sizes: tuple[dict[str, int], ...]
    """Sizes that its buckets take."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.spec.autocast else getattr(torch, self.spec.dtype or "float32")

    @property
    def writes(self) -> bool:
        """Whether a call writes to buffers that the backward of an earlier one may need."""
        return self.spec.name in ("average", "mixed")

    @property
    def is_exact(self) -> bool:
        """Whether its reference is of its own dtype: what is random, or rounded by autocast, is another value in
        float64."""
        return bool(self.spec.autocast) or "random" in self.spec.name


def models_of(manifests: Sequence[Path] = MANIFESTS) -> dict[str, Model]:
    found = {}
    for path in manifests:
        for spec in read_manifest(path).models.values():
            if spec.name != "random":  # its numbers are not eager's
                sizes = tuple(each for bucket in spec.buckets for each in _sizes(bucket))
                found[spec.name] = Model(spec, path.parent, sizes)
    return found


def _sizes(bucket: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Of a range: both ends, and one between."""
    for place in (0.0, 0.5, 1.0):
        yield {
            dim: size.min + int((size.max - size.min) * place) // size.multiple_of * size.multiple_of
            if isinstance(size, SizeRange)
            else size
            for dim, size in bucket.items()
        }


class Run:
    """The module that is trained, in eager or compiled, and what is noted of it.

    `random` draws the same for both sides. `around` wraps each call, `later` runs once after the load, and `between`
    after each step of an optimizer. Without `writes`, a step writes to nothing that the backward may need.
    """

    def __init__(self, model: Model, case: str, *, wide: bool, writes: bool = True) -> None:
        self.model, self.wide, self.writes = model, wide and not model.is_exact, writes
        self.random = Random(case)
        self.seed = self.random.randrange(1 << 20)
        torch.manual_seed(self.seed)
        self.module = build_module(model.spec, model.folder).train()
        if self.wide:
            self.module.double()
        self.call: Any = self.module
        self.around: list[Callable[[Any], Any]] = []
        self.later: list[Callable[[], None]] = []
        self.between: list[Callable[[], None]] = []
        self.notes: list[tuple[str, Any]] = []
        self.inputs: list[Tensor] = []
        self.compiled = False

    def load(self, store: Path) -> None:
        self.call, self.compiled = aotc.load(f"{store}#{self.model.spec.name}", self.module, on_miss="error"), True

    def note(self, name: str, value: Any) -> None:
        """Tensors as they are now."""
        leaves = pytree.tree_map(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, value)
        self.notes.append((name, leaves))

    # -- arguments and results ----------------------------------------------------------------------------------------

    def batch(self, *, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Arguments by name; those with gradients are leaves, which are noted in the end."""
        spec = self.model.spec
        sizes = sizes or self.random.choice(self.model.sizes)
        trees, inputs = parse_inputs(spec.inputs)
        leaves = example_leaves(spec, sizes, "cpu", self.random.randrange(1 << 10), folder=self.model.folder)
        for index, (leaf, given) in enumerate(zip(leaves, inputs, strict=True)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[index] = leaf = leaf.double() if self.wide else leaf
                if isinstance(given, TensorInput) and given.requires_grad:
                    self.inputs.append(leaf.requires_grad_())
        return {name: fill(tree, leaves) for name, tree in trees.items()}

    def forward(self, batch: Mapping[str, Any] | None = None) -> list[Tensor]:
        """The results that have a gradient. The others are noted."""
        call = self.call
        for wrap in self.around:
            call = wrap(call)
        with self.autocast():
            result = call(**(self.batch() if batch is None else batch))
        leaves = pytree.tree_leaves(result)
        self.note("results", leaves)
        return [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.model.spec.autocast else nullcontext()

    def some(self, values: Sequence[Any]) -> list[Any]:
        """A subset that is not empty, in its order."""
        chosen = {self.random.randrange(len(values)) for _ in range(self.random.randint(1, len(values)))}
        return [each for place, each in enumerate(values) if place in chosen]

    def drawn(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 20))
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)

    def loss(self, results: Sequence[Tensor]) -> Tensor:
        """Of some of the results, each weighted."""
        with warnings.catch_warnings():
            chosen = self.some(results)
            weighted = [(each * self.drawn(each.shape, each.dtype)).sum().double() for each in chosen]
        return torch.stack(weighted).sum()

    def parameters(self) -> list[nn.Parameter]:
        return [each for each in self.module.parameters() if each.requires_grad]

    def close(self) -> None:
        self.note("gradients", {name: each.grad for name, each in self.module.named_parameters()})
        self.note("gradients of inputs", [each.grad for each in self.inputs])
        self.note("state", {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())})
