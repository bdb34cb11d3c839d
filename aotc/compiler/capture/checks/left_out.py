"""Compare the model's results for None with those for the default that the manifest has for an input."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from aotc.compiler.capture.module_objects import KeptObjects
from aotc.errors import BuildError
from aotc.models.calls import call_model
from aotc.records import Signature, TensorLeaf
from aotc.tensors.comparison import Result, first_difference


def check_defaults(
    module: nn.Module, signature: Signature, written: Collection[str], kept: KeptObjects, leaves: Sequence[Any]
) -> None:
    """Raises BuildError where the model fails for None, or does something else than for the default.

    Rounding and random numbers make no difference, see `aotc.tensors.comparison`. Afterwards the state called `written`
    and the objects of `kept` are restored.
    """
    for index, leaf in enumerate(signature.leaves):
        if not isinstance(leaf, TensorLeaf) or leaf.default is None:
            continue
        filled, without = list(leaves), list(leaves)
        filled[index], without[index] = torch.full_like(leaves[index], leaf.default), None  # type: ignore[arg-type]

        def run(values: Sequence[Any], seed: int = 0, index: int = index) -> Result:
            """All that a call gives and leaves, but for this input."""
            result = list(call_model(module, signature, written, values, seed=seed))
            del result[len(result) - len(written) - len(leaves) + index]
            return result

        try:
            given, left_out = run(filled), run(without)
            same = len(given) == len(left_out) and (
                first_difference(given, left_out, lambda seed, filled=filled: run(filled, seed)) is None  # type: ignore[misc]
            )
        except Exception as error:  # whatever the model raises
            raise _not_the_default(leaf, f"fails for None: {type(error).__name__}: {error}") from error
        finally:
            kept.put_back()
        if not same:
            raise _not_the_default(leaf, "does something else for None")


def _not_the_default(leaf: TensorLeaf, what: str) -> BuildError:
    return BuildError(
        f"the input `{leaf.path}` has `default: {leaf.default}` in the manifest, and the model {what}",
        hint="leave out `default`, or give the value that the model itself takes for None",
        stage="export",
    )
