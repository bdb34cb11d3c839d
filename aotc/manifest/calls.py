"""Calls of a model with example inputs: the leaves of its signature, filled in, and the modes that a manifest asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotc.manifest.types import ModelSpec
from aotc.manifest.example import example_leaves
from aotc.manifest.inputs import Tree, parse_inputs
from aotc.records import ConstantLeaf, Signature, TensorLeaf


def example_values(spec: ModelSpec, dims: Mapping[str, int], device: str, seed: int) -> dict[str, Any]:
    """An example value for each leaf of the manifest, by the leaf's path."""
    _, inputs = parse_inputs(spec.inputs)
    values = example_leaves(spec, dict(dims), device, seed)
    return {leaf.path: value for leaf, value in zip(inputs, values, strict=True)}


def leaf_value(leaf: TensorLeaf | ConstantLeaf, by_path: Mapping[str, Any]) -> Any:
    return leaf.value if isinstance(leaf, ConstantLeaf) else by_path[leaf.path]


def signature_leaves(spec: ModelSpec, signature: Signature, dims: Mapping[str, int], device: str, seed: int) -> list[Any]:
    """Example leaves in the signature's order."""
    by_path = example_values(spec, dims, device, seed)
    return [leaf_value(leaf, by_path) for leaf in signature.leaves]


def ambient_of(spec: ModelSpec, device: str) -> torch.autocast | torch.no_grad:
    """The modes that the manifest asks for, as a context."""
    if spec.autocast is None:
        return torch.no_grad()
    return torch.autocast(device, dtype=getattr(torch, spec.autocast))


def arguments_of(signature: Signature, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The `(args, kwargs)` that pass these leaves, positional as far as forward allows."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in signature.parameters:
        value = fill(parameter.tree, leaves)
        if parameter.kind == "keyword" or kwargs:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def fill(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The value of a tree: containers with the leaves in their places."""
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, Mapping):
        return {name: fill(subtree, leaves) for name, subtree in tree.items()}
    return [fill(subtree, leaves) for subtree in tree]
