"""Compare the model's results for None with those for the default that the manifest has for an input."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aotc.compiler.capture.module_objects import KeptObjects
from aotc.errors import BuildError
from aotc.models.calls import call_model
from aotc.records import Signature, TensorLeaf
from aotc.tensors.rounding import Result, first_difference


def check_defaults(
    module: nn.Module, signature: Signature, written: Collection[str], kept: KeptObjects, leaves: Sequence[Any]
) -> None:
    """Raises BuildError where the model fails for None, or does something else than for the default.

    Also with ids that are all padding, by the module's configuration: some models make a mask of these for None.
    Rounding and random numbers make no difference, see `aotc.tensors.rounding`. Afterwards the state called `written`
    and the objects of `kept` are restored.
    """
    defaults = [
        (index, leaf, values)
        for index, leaf in enumerate(signature.leaves)
        if isinstance(leaf, TensorLeaf) and leaf.default is not None
        for values in (leaves, _of_padding(module, signature, leaves))
        if values
    ]
    for index, leaf, values in defaults:
        filled, without = list(values), list(values)
        filled[index], without[index] = torch.full_like(values[index], leaf.default), None  # type: ignore[arg-type]

        def run(values: Sequence[Any], seed: int = 0, index: int = index) -> Result:
            """The result of a call, and the state after it, without this input."""
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


def _of_padding(module: nn.Module, signature: Signature, leaves: Sequence[Any]) -> list[Any]:
    """The leaves with `input_ids` that are all padding; none if the module's configuration has no padding id."""
    config = getattr(module, "config", None)
    padding, known = (getattr(config, name, None) for name in ("pad_token_id", "vocab_size"))
    if type(padding) is not int or type(known) is not int or not 0 <= padding < known:
        return []
    return [
        torch.full_like(value, padding) if isinstance(value, Tensor) and leaf.path.endswith("input_ids") else value
        for leaf, value in zip(signature.leaves, leaves, strict=True)
    ]


def _not_the_default(leaf: TensorLeaf, what: str) -> BuildError:
    return BuildError(
        f"the input `{leaf.path}` has `default: {leaf.default}` in the manifest, and the model {what}",
        hint="leave out `default`, or give the value that the model itself takes for None",
        stage="export",
    )
