"""Why the module's tensors are not those that an artifact was built for: every reason, with both values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from aotc.errors import BindError, Issue
from aotc.reads.tensors import dtype_name, dtype_of
from aotc.records import Artifact, StateSpec
from aotc.runtime.state.weights import (
    ALIGNMENT,
    DENSE_COPY,
    is_special,
    is_unaligned,
    is_written,
    lacks_values,
    used_strides,
)
from aotc.tensors.overlaps import overlapping


def state_error(
    specs: Sequence[StateSpec],
    tensors: Sequence[Tensor | None],
    device: torch.device,
    aliases: Sequence[Tensor | None],
    written: frozenset[str],
) -> BindError:
    """Of tensors that `check_state` refuses."""
    issues = [
        issue
        for spec, tensor in zip(specs, tensors, strict=True)
        for issue in _state_issues(spec, tensor, device, writes=is_written(spec, written))
    ]
    tied = ((spec.name, tensor, alias) for spec, tensor in zip(specs, tensors, strict=True) for alias in spec.aliases)
    loose = [
        Issue(f"was one tensor with `{name}` at build, and is another one here", where=alias, hint="tie them again")
        for (name, tensor, alias), other in zip(tied, aliases, strict=True)
        if other is not tensor
    ]
    if issues:
        return BindError(
            "the module's tensors are not those that the artifact was built for",
            issues=(*issues, *loose),
            hint=_state_hint(issues, specs, tensors, device),
        )
    if loose:
        return BindError("weights that were tied at build are not tied here", issues=tuple(loose))
    return BindError(
        "the model writes to tensors of the module that share memory, and was compiled for distinct ones",
        issues=tuple(_shared_issues(specs, cast("Sequence[Tensor]", tensors), written)),
        hint="give each memory of its own, both where it is built and here",
    )


def _state_hint(
    issues: Sequence[Issue], specs: Sequence[StateSpec], tensors: Sequence[Tensor | None], device: torch.device
) -> str:
    """How to cast or move the whole module back; where that is not enough, which module is expected."""
    pairs = [(spec, tensor) for spec, tensor in zip(specs, tensors, strict=True) if tensor is not None]
    if any(tensor.is_meta for _, tensor in pairs):
        return "give it values: module.to_empty(device=…), then load_state_dict"
    cast = {spec.dtype for spec, tensor in pairs if spec.dtype != dtype_name(tensor.dtype)}
    moved = any(tensor.device != device for _, tensor in pairs)
    only = all(issue.message.startswith(("built for dtype ", "built for device ")) for issue in issues)
    # A cast would change others, too: complex numbers lose a part, and buffers of float64 their precision.
    others = [spec for spec, tensor in pairs if tensor.is_complex() or tensor.is_floating_point()]
    kept = bool(cast) and any(spec.dtype not in cast for spec in others)
    if not only or kept or len(cast) > 1 or any(not dtype_of(dtype).is_floating_point for dtype in cast):
        return "load the artifact with the model and dtype of its manifest, on the device that it runs on"
    to = [f"torch.{dtype}" for dtype in cast]
    return f"call module.to({', '.join([repr(str(device))] * moved + to)})" + (
        "; or set `dtype:` in the manifest, and build again" if cast else ""
    )


def _shared_issues(specs: Sequence[StateSpec], tensors: Sequence[Tensor], written: frozenset[str]) -> list[Issue]:
    own = {index for index, spec in enumerate(specs) if is_written(spec, written)}
    found = []
    for pair in overlapping(tensors, own):
        one, other = (specs[index] for index in pair)
        found.append(
            Issue(
                f"lies in the memory of `{one.name}`",
                where=other.name,
                expected="memory of its own",
                actual=f"that of `{one.name}`",
                hint="put a clone in its place",
            )
        )
    return found


def _state_issues(spec: StateSpec, tensor: Tensor | None, device: torch.device, *, writes: bool) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such parameter or buffer", where=spec.name)]
    if is_special(tensor):
        hint = "build the model as it is here, quantised, or load it with plain weights"
        return [
            Issue(f"a plain tensor is expected, the module's is a {type(tensor).__name__}", where=spec.name, hint=hint)
        ]
    if not tensor.is_meta and (lack := lacks_values(tensor)):
        return [Issue(f"built for a dense tensor, the module's is {lack}", where=spec.name, hint=DENSE_COPY)]
    if tensor.device == device and is_unaligned(tensor, device, writes):
        used = "the model writes to it" if writes else "products with int8 weights need that"
        what = f"its memory begins at an address that {ALIGNMENT} does not divide, and {used}"
        return [Issue(what, where=spec.name, hint="put a clone in its place")]
    pairs = (
        ("dtype", spec.dtype, dtype_name(tensor.dtype)),
        ("shape", list(spec.shape), list(tensor.shape)),
        ("stride", used_strides(spec.shape, spec.stride), used_strides(tensor.shape, tensor.stride())),
        ("device", str(device), str(tensor.device)),
        ("lazy view", "none", "conj or neg" if tensor.is_conj() or tensor.is_neg() else "none"),
    )
    return [
        Issue(
            f"built for {label} {expected}, the module's is {actual}",
            where=spec.name,
            expected=str(expected),
            actual=str(actual),
        )
        for label, expected, actual in pairs
        if expected != actual
    ]


def no_weights_error(artifact: Artifact) -> BindError:
    return BindError(
        f"the artifact of `{artifact.model}` uses the module's own weights, and no module was given",
        hint="pass the module: aotc.load(ref, module); or a checkpoint: aotc.load(ref, "
        'weights="model.safetensors"); or build it with `weights: frozen`',
    )


def unchanging_error(artifact: Artifact) -> BindError:
    """Of weights that would be put in the place of those of the library, or of none."""
    why = "holds frozen weights" if artifact.weights == "frozen" else "has no weights"
    return BindError(
        f"the artifact of `{artifact.model}` {why}, and none can be put in their place",
        hint="build it with `weights: live`, or load the artifact that was built for the new weights",
    )
