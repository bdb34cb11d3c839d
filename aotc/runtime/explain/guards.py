"""Why the guards do not hold: every reason, with both values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from aotc.errors import Issue
from aotc.reads.modes import OF_INPUT, mode_readers
from aotc.reads.module_issues import call_of_mode
from aotc.reads.tensors import dtype_name
from aotc.records import TensorLeaf
from aotc.runtime.aliases import input_alias_issues
from aotc.runtime.dispatch import Shape
from aotc.runtime.explain.values import describe
from aotc.runtime.guards import PLAIN_TENSORS, Guards, equal_constant, has_layout, tangent_of, transform
from aotc.tensors.layouts import has_memory


def guard_issues(
    guards: Guards, leaves: Sequence[Any], shapes: Sequence[Shape | None], shown: Callable[[Any], str] = describe
) -> list[Issue]:
    """Every reason why `guards.hold` is False; `shown` puts an argument into words."""
    found = [
        issue
        for index, leaf, *_ in guards.tensors
        for issue in _tensor_issues(guards, leaves[index], leaf, shapes[index], shown)
    ]
    found += _gradient_issues(guards, leaves)
    layouts = [
        issue
        for index, leaf, _, memory_format in guards.tensors
        for issue in _layout_issues(leaves[index], leaf, memory_format)
        if not guards.copies
    ]
    for index, leaf in guards.constants:
        if not equal_constant(leaves[index], leaf.value):
            found.append(
                Issue(
                    f"built for {leaf.value!r}, {shown(leaves[index])} came",
                    where=leaf.path,
                    expected=repr(leaf.value),
                    actual=shown(leaves[index]),
                    hint=_constant_hint(leaf.value, leaves[index]),
                )
            )
    if not found and guards.mutated:
        found += input_alias_issues(guards, leaves)
    if not found:
        found += _tangent_issues(guards, leaves)
        found += [
            Issue(
                "forward counts from the beginning of its storage (`as_strided` with an offset), and compiled code "
                f"from the tensor's, which is {offset} elements behind",
                where=leaf.path,
                expected="0",
                actual=str(offset),
                hint="pass a clone, if forward means the tensor's own beginning",
            )
            for index, leaf, *_ in guards.tensors
            if index in guards.from_storage and (offset := leaves[index].storage_offset())
        ]
    found += [*mode_issues(guards), *_asked_issues(guards, leaves)]
    if not found and all(shapes[index] is not None for index, *_ in guards.tensors):
        more = ", or set `make_contiguous: true` in the manifest"
        layouts = [msgspec.structs.replace(issue, hint=issue.hint + more) for issue in layouts]
    return layouts + found


def _constant_hint(built: Any, came: Any) -> str:
    if built is None and isinstance(came, torch.Tensor):
        return "it was left out at build: name it in the manifest's `inputs`"
    if built is None and isinstance(came, dict | list | tuple):
        empty = f"pass None, as {came!r} is another argument; or " if not came else ""
        return f"{empty}name it with what it holds in the manifest's `inputs`, and build again"
    return "a Python argument is part of the compiled code: give each value a model of its own"


def _gradient_issues(guards: Guards, leaves: Sequence[Any]) -> list[Issue]:
    """Inputs that require a gradient, which compiled code would not give."""
    what, hint = "an inference artifact gives none", "call under torch.no_grad() or torch.inference_mode()"
    if guards.trains:
        what = "its gradient was not compiled"
        hint = "give this input `requires_grad: true` in the manifest, and build again; or pass x.detach()"
    return [
        Issue(f"it requires a gradient, and {what}", where=leaf.path, hint=hint)
        for index, leaf, *_ in guards.tensors
        if index not in guards.with_gradients
        and isinstance(leaves[index], torch.Tensor)
        and leaves[index].requires_grad
        and torch.is_grad_enabled()
    ]


def _tangent_issues(guards: Guards, leaves: Sequence[Any]) -> list[Issue]:
    """Inputs that carry a tangent of forward-mode differentiation, which compiled code would drop."""
    return tangent_issues((leaf.path, leaves[index]) for index, leaf, *_ in guards.tensors)


def tangent_issues(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Issue]:
    """The tensors, by their names, that carry a tangent."""
    return [
        Issue("it has a tangent of forward-mode differentiation, which compiled code would drop", where=name)
        for name, tensor in tensors
        if tangent_of(tensor) is not None
    ]


_TAKEN_FOR_NONE = {"attention_mask": "ones", "token_type_ids": "zeros"}


def no_sizes(value: Any, leaf: TensorLeaf, shown: Callable[[Any], str]) -> Issue | None:
    """The issue of an argument that has no sizes to ask for: no tensor, or a nested one. None for others."""
    if type(value) in PLAIN_TENSORS:
        nested = Issue("a tensor of one shape is expected, a nested one came", where=leaf.path)
        return nested if value.is_nested else None
    hint = ""
    if value is None:
        hint = (
            "pass a tensor; for calls without it, give it a `default:` in the manifest, if the model takes one value "
            "for None, and build again; else build a second model, whose `inputs` leave it out or say `null`"
        )
        if (same := _TAKEN_FOR_NONE.get(leaf.path)) is not None:
            value_of = "1" if same == "ones" else "0"
            hint = (
                f"pass torch.{same}_like(input_ids), for which models of transformers take None; or give it "
                f"`default: {value_of}` in the manifest's `inputs`, and build again"
            )
    elif isinstance(value, bool | int | float | list | tuple):
        hint = f"pass torch.tensor(…, dtype=torch.{leaf.dtype})"
    return Issue(f"a tensor is expected, {shown(value)} came", where=leaf.path, hint=hint)


def _tensor_issues(
    guards: Guards, tensor: Any, leaf: TensorLeaf, shape: Shape | None, shown: Callable[[Any], str]
) -> list[Issue]:
    if tensor is None and leaf.default is not None:  # it has the sizes of other tensors, of which one is wrong
        return []
    if without_sizes := no_sizes(tensor, leaf, shown):
        return [without_sizes]
    pairs: list[tuple[str, object, object, str]] = [
        ("dtype", leaf.dtype, dtype_name(tensor.dtype), "convert it, or build the model for that dtype"),
        ("device", str(guards.device), str(tensor.device), "move it with .to()"),
    ]
    if shape is not None:
        pairs.append(("shape", list(shape), list(tensor.shape), shape_hint(leaf, tensor)))
    found = [
        Issue(
            f"{label} {expected} is expected, {actual} came",
            where=leaf.path,
            expected=str(expected),
            actual=str(actual),
            hint=hint,
        )
        for label, expected, actual, hint in pairs
        if expected != actual
    ]
    if tensor.layout is not torch.strided:
        found.append(
            Issue(
                f"a dense tensor is expected, {tensor.layout} came",
                where=leaf.path,
                expected="torch.strided",
                actual=str(tensor.layout),
                hint="call .to_dense()",
            )
        )
    elif not found and tensor.numel() and not has_memory(tensor) and transform() is None:
        found.append(
            Issue("a tensor with values in memory is expected, one without came", leaf.path, hint="call .clone()")
        )
    return found


def shape_issue(leaf: TensorLeaf, tensor: Tensor, hint: str = "") -> Issue:
    expected, actual = f"[{', '.join(map(str, leaf.shape))}]", str(list(tensor.shape))
    return Issue(f"shape {expected} is expected, {actual} came", leaf.path, expected, actual, hint)


def shape_hint(leaf: TensorLeaf, tensor: Tensor) -> str:
    """What to change in the manifest for an input in which a size varies that is written there as a number."""
    sizes = zip(leaf.shape, tensor.shape, strict=True)
    fixed = [str(size) for size, here in sizes if isinstance(size, int) and size != here]
    if not fixed:
        return ""
    return (
        f"the manifest fixes {' and '.join(dict.fromkeys(fixed))} in `shape:`: where a size varies, write a dim there, "
        "give its sizes in the buckets, and build again"
    )


_MODE_HINTS = {
    "default_dtype": "call torch.set_default_dtype to match",
    "float32_matmul_precision": "call torch.set_float32_matmul_precision, or set `float32_matmul_precision:` in the "
    "manifest",
    "deterministic": "call torch.use_deterministic_algorithms to match",
    "num_threads": "call torch.set_num_threads, or drop the option `cpp.dynamic_threads: false`",
}


def _autocast_hint(device: str, built: str) -> str:
    under = "outside of torch.autocast" if built == "off" else f"under torch.autocast({device!r}, dtype=torch.{built})"
    return f"call {under}, or set `autocast:` in the manifest to match, and build again"


_ASKED_HINTS = {
    "grad": ("gradients are enabled", "call under torch.no_grad() as the build did, or build with `train: true`"),
    "inference": ("inference mode is on", "call under torch.no_grad() in place of torch.inference_mode()"),
    "device": ("the default device", "call outside of torch.device(…), or let forward say `device=x.device`"),
}


def _asked_issues(guards: Guards, leaves: Sequence[Any]) -> Iterator[Issue]:
    """The modes that forward asks for, which are not those of the build."""
    for name, read in guards.asked_now.items():
        expected, now = str(guards.asked[name]), str(read())
        if expected != now:
            label, hint = _ASKED_HINTS.get(name, (name, "set it as it was at the build"))
            yield Issue(f"forward asks for it ({label}): {expected} at the build, {now} now", "", expected, now, hint)
    if OF_INPUT in guards.asked:
        for index, leaf, *_ in guards.tensors:
            if isinstance(leaves[index], Tensor) and leaves[index].requires_grad:
                what = "forward asks whether it requires a gradient, which it did not at the build"
                yield Issue(what, leaf.path, "False", "True", "pass x.detach()")


def mode_issues(guards: Guards) -> list[Issue]:
    """The modes of the process or the module that are not those of the build."""
    found = []
    for name, read in mode_readers(guards.device.type).items():
        expected, now = getattr(guards.ambient, name), read()
        actual = dtype_name(now) if isinstance(now, torch.dtype) else now
        if expected != actual and not (name == "num_threads" and expected is None):
            expected, actual = ("off" if mode is None else str(mode) for mode in (expected, actual))
            label = name.replace("_", " ")
            hint = _MODE_HINTS[name] if name != "autocast" else _autocast_hint(guards.device.type, expected)
            found.append(Issue(f"built with {label} {expected}, it is {actual} now", "", expected, actual, hint))
    if guards.module is not None and guards.module.training is not guards.training:
        found.append(
            Issue(
                f"built with module.training {guards.training}, it is {guards.module.training} now",
                expected=str(guards.training),
                actual=str(guards.module.training),
                hint=call_of_mode(guards.training, ""),
            )
        )
    mixed = {guards.training, *guards.modes} == {True, False}
    found += [
        Issue(
            f"its training flag was {mode} at the load, it is {attributes['training']} now",
            where=f"module.{path}" if path else "module",
            expected=str(mode),
            actual=str(attributes["training"]),
            hint=call_of_mode(mode, path if mixed else ""),
        )
        for (path, attributes), mode in zip(guards.moded, guards.modes, strict=True)
        if attributes["training"] is not mode
    ][:3]
    return found


def _layout_issues(tensor: Any, leaf: TensorLeaf, memory_format: torch.memory_format) -> Iterator[Issue]:
    """Differences that a copy into the compiled layout removes."""
    if type(tensor) not in PLAIN_TENSORS or tensor.is_nested or tensor.layout is not torch.strided:
        return
    if tensor.is_conj() or tensor.is_neg():
        lazy = "conjugated" if tensor.is_conj() else "negated"
        yield Issue(
            f"its values are expected in memory, a lazily {lazy} view came",
            where=leaf.path,
            expected="values in memory",
            actual=f"lazily {lazy}",
            hint="call .resolve_conj().resolve_neg()",
        )
    elif not has_layout(tensor, memory_format):
        given = "" if memory_format is torch.contiguous_format else f"memory_format={memory_format}"
        yield Issue(
            f"the layout {leaf.layout} is expected, strides {list(tensor.stride())} came",
            where=leaf.path,
            expected=leaf.layout,
            actual=str(list(tensor.stride())),
            hint=f"call .contiguous({given})",
        )
