"""Artifacts made by hand, and libraries that compute with eager torch: the runtime without anything compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from small_artifact import small_artifact
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.lifting.result_tree import result_tree
from aotc.digest import sha256_json
from aotc.provenance import BuiltArtifact, BuiltVariant
from aotc.reads.modes import take_ambient
from aotc.reads.state_specs import state_specs
from aotc.reads.tensors import named_state
from aotc.reads.watch import ModuleWatch
from aotc.records import (
    Ambient,
    Argument,
    Artifact,
    Bucket,
    File,
    Leaf,
    ModuleGuard,
    Output,
    Parameter,
    ResultContainer,
    Signature,
    StateSpec,
    TensorLeaf,
)
from aotc.runtime.call import BoundModule, CompiledCall
from aotc.runtime.compiled_regions import CompiledRegions, check_regions
from aotc.runtime.options import LoadOptions
from aotc.runtime.select import Chosen
from aotc.runtime.state.binding import bind_state
from aotc.tensors.subclasses import descriptions, unwrapped, wrappers

CPU = torch.device("cpu")
LIBRARY = File("library.so", "sha256:" + "0" * 64, 1, "sha256:" + "1" * 64, 20)
PLAIN_OUTPUT = (Output(index=0),)


class FakeLibrary:
    """A library that computes with a Python function of its arguments; `seen` holds the arguments of every run."""

    counts = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seen: list[tuple[Tensor, ...]] = []

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        self.seen.append(tuple(arguments))
        result = self.function(*arguments)
        return list(result) if isinstance(result, tuple | list) else [result]


def tensor(path: str, *shape: int | str, dtype: str = "float32", **fields: Any) -> TensorLeaf:
    return TensorLeaf(path=path, dtype=dtype, shape=shape, **fields)


def tree_of(sample: Any) -> int | ResultContainer:
    """The record's structure of a model's result like `sample`."""
    return result_tree(pytree.tree_structure(sample))


def make_artifact(
    leaves: Sequence[Leaf],
    buckets: Sequence[Bucket] = ({},),
    parameters: Sequence[Parameter] | None = None,
    state: Sequence[StateSpec] = (),
    outputs: Sequence[Output] = PLAIN_OUTPUT,
    output_sample: Any = 0,
    conditions: dict[int, tuple[str, ...]] | None = None,
    mutated_leaves: tuple[int, ...] = (),
    padded: Sequence[str] = (),
    make_contiguous: bool = False,
    **fields: Any,
) -> BuiltArtifact:
    """An artifact whose libraries take every tensor leaf in order, then every tensor of the module.

    Without `parameters`, each leaf is one, named as its path. `conditions` are by the variant's index.
    """
    if parameters is None:
        parameters = [Parameter(name=leaf.path, tree=index) for index, leaf in enumerate(leaves)]
    arguments = [Argument(leaf=index) for index, leaf in enumerate(leaves) if isinstance(leaf, TensorLeaf)]
    if fields.get("weights", "live") == "live":
        arguments += [Argument(state=spec.name) for spec in state]
    variants = tuple(
        BuiltVariant(
            bucket=bucket,
            key=f"sha256:{index:064}",
            library="library.so",
            files=(LIBRARY,),
            arguments=tuple(arguments),
            outputs=tuple(outputs),
            output_tree=tree_of(output_sample),
            conditions=(conditions or {}).get(index, ()),
            mutated_leaves=mutated_leaves,
            padded=tuple(padded),
        )
        for index, bucket in enumerate(buckets)
    )
    whole: dict[str, Any] = {
        "model": "handmade",
        "signature": Signature(tuple(parameters), tuple(leaves), make_contiguous=make_contiguous),
        "state": tuple(state),
        "module": ModuleGuard(class_name="Model", training=False, sources={}, attributes=sha256_json({})),
        "variants": variants,
    }
    return small_artifact(**{**whole, **fields})


def specs_of(module: nn.Module, names: Sequence[str] | None = None, digests: bool = False) -> tuple[StateSpec, ...]:
    named = named_state(module)
    state, subclasses = (named, wrappers(named)) if digests else (unwrapped(named), descriptions(named))
    return state_specs(state, list(state) if names is None else names, digests, subclasses)


def make_compiled(
    function: Callable[..., Any],
    leaves: Sequence[Leaf],
    buckets: Sequence[Bucket] = ({},),
    *,
    module: nn.Module | None = None,
    on_miss: Any = "error",
    **fields: Any,
) -> CompiledCall:
    """A callable over a hand-built artifact; every bucket runs `function`. `.libraries` are its fakes."""
    return attach_fakes(make_artifact(leaves, buckets, **fields), function, module=module, on_miss=on_miss)


def attach_fakes(
    artifact: BuiltArtifact, function: Callable[..., Any], *, module: nn.Module | None = None, on_miss: Any = "error"
) -> Any:
    libraries = [FakeLibrary(function) for _ in artifact.variants]
    watch = ModuleWatch(module, (), {}, artifact.model, hooks=False) if module is not None else None
    bound = BoundModule(module, bind_state(artifact, module, CPU), watch)
    compiled: Any = CompiledCall(artifact, libraries, bound, CPU, on_miss)
    compiled.libraries = libraries
    return compiled


def ambient_now(**fields: Any) -> Ambient:
    """The modes of this process, so that an artifact was built under them."""
    now = take_ambient("cpu")
    return Ambient(**{**{name: getattr(now, name) for name in now.__struct_fields__}, **fields})


def attach_regions(
    artifact: Artifact, libraries: Sequence[Any], module: nn.Module | None, **options: Any
) -> CompiledRegions:
    """A module with these libraries in its regions; `options` are those of `aotc.load`."""
    chosen, asked = Chosen(artifact, CPU, never, lambda file: b""), LoadOptions(**options)
    return CompiledRegions(artifact, libraries, check_regions(chosen, module, asked), CPU, asked.on_miss, asked.graphs)


def never(variant: object) -> Any:
    raise AssertionError("no library is opened")
