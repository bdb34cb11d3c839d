"""The calling convention of a model: its forward's parameters, filled with the leaves that the manifest describes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import msgspec
from torch import nn

from aotc.manifest import ModelSpec
from aotc.manifest.inputs import ConstantInput, LeafInput, Tree, parse_inputs
from aotc.models.calls import KINDS, plain_default
from aotc.records import ConstantLeaf, Leaf, Parameter, Signature, TensorLeaf


def make_signature(spec: ModelSpec, module: nn.Module) -> Signature:
    """Parameters in forward's order, leaves numbered in that order. A parameter that the manifest leaves out is a
    constant of its default value, if that is a plain value, and else not part of the artifact's convention."""
    trees, inputs = parse_inputs(spec.inputs)
    forward = inspect.signature(module.forward).parameters
    leaves: list[Leaf] = []
    parameters: list[Parameter] = []
    skipped = False
    for name, parameter in forward.items():
        if parameter.kind not in KINDS:
            continue
        default = plain_default(parameter)
        if name in trees:
            tree = _renumber(trees[name], inputs, leaves, spec)
        elif default is not msgspec.UNSET:
            leaves.append(ConstantLeaf(name, default))
            tree = len(leaves) - 1
        else:
            skipped = True
            continue
        # Behind a parameter that is left out, a position would mean another one than in the module's forward.
        kind = "keyword" if skipped else KINDS[parameter.kind]
        parameters.append(Parameter(name, tree, kind, default))
    for name in sorted(trees.keys() - forward.keys()):
        parameters.append(Parameter(name, _renumber(trees[name], inputs, leaves, spec), "extra"))
    return Signature(tuple(parameters), tuple(leaves), make_contiguous=spec.make_contiguous)


def _renumber(tree: Tree, inputs: Sequence[LeafInput], leaves: list[Leaf], spec: ModelSpec) -> Tree:
    if isinstance(tree, int):
        leaves.append(_leaf(inputs[tree], spec))
        return len(leaves) - 1
    if isinstance(tree, list):
        return [_renumber(subtree, inputs, leaves, spec) for subtree in tree]
    return {name: _renumber(subtree, inputs, leaves, spec) for name, subtree in tree.items()}


def _leaf(leaf: LeafInput, spec: ModelSpec) -> Leaf:
    if isinstance(leaf, ConstantInput):
        return ConstantLeaf(leaf.path, leaf.value)
    return TensorLeaf(
        path=leaf.path,
        dtype=leaf.dtype or spec.dtype or "float32",
        shape=leaf.shape,
        layout=leaf.layout,  # type: ignore[arg-type]
        pad=leaf.pad,
    )
