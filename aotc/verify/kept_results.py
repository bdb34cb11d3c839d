"""Checks that results belong to the caller alone: those of earlier calls, and the memory of this call's.

A result may lie in the memory of an input, of the module's state or of another result only where eager's does too. Else
the next call, or a caller who writes to what he was given, changes something that in eager stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from aotc.reads.tensors import plain_state, same_bits
from aotc.tensors.contents import Contents
from aotc.tensors.overlaps import overlapping
from aotc.verify.other_weights import is_plain

Findings = set[str]


class Kept(NamedTuple):
    """The tensors of a result as the caller holds them, by their names, and what they held when they were given."""

    tensors: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]

    def changed(self) -> Findings:
        """What has changed in them since."""
        return {
            f"{name} of one call is changed by the next call"
            for name, tensor in self.tensors.items()
            if not same_bits(tensor, self.copies[name])
        }


def keep(outputs: Contents) -> Kept:
    tensors = _plain({f"output{path}": value for path, value in outputs.items() if isinstance(value, Tensor)})
    return Kept(tensors, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def shared(result: Kept, inputs: Mapping[str, Tensor], module: nn.Module, earlier: Kept | None) -> Findings:
    """Which tensors of a result have elements in the memory of something else."""
    others = {
        **{f"the input {path}": tensor for path, tensor in inputs.items()},
        **{f"the module's {name}": tensor for name, tensor in plain_state(module).items()},
        **{f"{name} of the call before": tensor for name, tensor in (earlier.tensors if earlier else {}).items()},
    }
    named = [*result.tensors.items(), *_plain(others).items()]
    pairs = overlapping([tensor for _, tensor in named], range(len(result.tensors)))
    return {f"{named[one][0]} lies in the memory of {named[other][0]}" for one, other in pairs}


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose memory and bits can be looked at."""
    return {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}
