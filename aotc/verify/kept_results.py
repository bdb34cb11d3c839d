"""Checks that results belong to the caller as in eager: those of earlier calls, and the memory of this call's.

A result may share memory with an input, with the module's state or with another result only where eager's does, and
must share it there. Otherwise the next call, or a caller's write to a result, changes other tensors than in eager.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from aotc.reads.tensors import same_bits
from aotc.tensors.contents import Contents
from aotc.tensors.sharing import Sharing, module_tensors, sharing
from aotc.verify.other_weights import is_plain

ChangedNames = set[str]


class KeptResult(NamedTuple):
    """The tensors of a result as the caller holds them, by their names, and what they held when they were given."""

    tensors: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]

    def changed(self) -> ChangedNames:
        """What has changed in them since."""
        return {
            f"{name} of one call is changed by the next call"
            for name, tensor in self.tensors.items()
            if not same_bits(tensor, self.copies[name])
        }


def keep(outputs: Contents) -> KeptResult:
    tensors = _plain({f"output{path}": value for path, value in outputs.items() if isinstance(value, Tensor)})
    return KeptResult(tensors, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def shared(
    result: KeptResult, inputs: Mapping[str, Tensor], own: Mapping[str, Tensor], earlier: Mapping[str, Tensor]
) -> Sharing:
    """Which tensors of a result have elements in the memory of one another or something else; `own` are the module's,
    `earlier` of the call before."""
    return sharing(
        result.tensors,
        {f"the input {path}": tensor for path, tensor in inputs.items()} | module_tensors(own) | dict(earlier),
    )


def of_call_before(kept: KeptResult | None) -> dict[str, Tensor]:
    return {f"{name} of the call before": tensor for name, tensor in (kept.tensors if kept else {}).items()}


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose memory and bits can be looked at."""
    return {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}
