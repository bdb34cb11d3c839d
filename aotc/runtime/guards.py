"""The conditions under which the variants of an artifact may run, beyond sizes: checked on every call.

`Guards.hold` answers in a microsecond or two; `Guards.issues` says why not, every reason with both values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from aotc.errors import Issue
from aotc.layouts import MEMORY_FORMATS
from aotc.records import Ambient, Artifact, ConstantLeaf, TensorLeaf
from aotc.runtime.call import describe
from aotc.runtime.dims import Shape
from aotc.runtime.state import State
from aotc.snapshot import dtype_name, dtype_of, matmul_precision, take_ambient

_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The transform of torch.func (vmap, grad, jvp) around this call, or None. Its tensors look like any other."""
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes that are told of each operator, as FakeTensorMode's and make_fx's are, are around this call."""
_traced: Callable[[], bool] = torch._C._is_tracing
"""Whether torch.jit.trace writes this call down."""

_PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


def is_followed() -> bool:
    """Whether somebody is told of each operator of this call: who hears nothing of compiled code, and takes what it
    gives for a constant."""
    return _dispatch_modes() > 0 or _traced()


FOLLOWED = Issue(
    "it is called within torch.jit.trace, make_fx or another dispatch mode, which cannot look into compiled code",
    hint='call it outside of them, or load with on_miss="eager"',
)


class Guards:
    """The guards of one artifact, for inputs on `device` and, if given, the module whose training flag counts."""

    def __init__(self, artifact: Artifact, device: torch.device, module: nn.Module | None) -> None:
        leaves = artifact.signature.leaves
        self.tensors = [
            (index, leaf, dtype_of(leaf.dtype), MEMORY_FORMATS[leaf.layout])
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, TensorLeaf)
        ]
        self.constants = [(index, leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, ConstantLeaf)]
        self.device = device
        self.module = module
        self.training = artifact.module.training
        self.ambient = artifact.ambient
        self.copies = artifact.signature.make_contiguous
        self.mutated = sorted({index for variant in artifact.variants for index in variant.mutated_leaves})
        written = {name for variant in artifact.variants for name in variant.mutated_state}
        self.written_state = [
            (index, spec.name)
            for index, spec in enumerate(artifact.state)
            if artifact.weights == "live" and {spec.name, *spec.aliases} & written
        ]
        self._state_names = [spec.name for spec in artifact.state] if artifact.weights == "live" else []
        self._written_inputs = [(index, leaf.path) for index, leaf, *_ in self.tensors if index in self.mutated]
        self.may_share = bool(self.written_state or (self.mutated and self._state_names))
        self._owners: tuple[Callable[[], State | None], Mapping[int, str], Mapping[int, str]] = (lambda: None, {}, {})
        self._ambient_holds = _ambient_check(artifact.ambient, device.type)
        self._fast = [
            (index, dtype, None if memory_format is torch.contiguous_format else memory_format)
            for index, _, dtype, memory_format in self.tensors
        ]
        self._complex = any(dtype.is_complex for _, _, dtype, _ in self.tensors)

    def hold(self, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> bool:
        """True if a call with these leaves may run a variant whose leaves have these shapes, as they lie in memory."""
        device, plain, strided, may_be_conj = self.device, _PLAIN_TENSORS, torch.strided, self._complex
        for index, dtype, memory_format in self._fast:
            tensor = leaves[index]
            if (
                type(tensor) not in plain
                or tensor.dtype is not dtype
                or tensor.is_nested
                or tensor.shape != shapes[index]
                or tensor.device != device
                or tensor.layout is not strided
                or tensor.is_neg()
                or (may_be_conj and tensor.is_conj())
                # The same question without the argument costs half.
                or not (tensor.is_contiguous() if memory_format is None else _has_layout(tensor, memory_format))
                or (tensor.requires_grad and torch.is_grad_enabled())
            ):
                return False
        for index, leaf in self.constants:
            if not _equal_constant(leaves[index], leaf.value):
                return False
        if self.mutated and self._aliased(leaves):
            return False
        return (
            self._ambient_holds()
            and (self.module is None or self.module.training is self.training)
            and _transform() is None
            and (forward_ad._current_level < 0 or not self._dual(leaves))
        )

    def _dual(self, leaves: Sequence[Any]) -> list[Issue]:
        """Inputs that carry a tangent of forward-mode differentiation, which compiled code would drop."""
        return [
            Issue("it has a tangent, and an inference artifact gives none", where=leaf.path)
            for index, leaf, *_ in self.tensors
            if _tangent_of(leaves[index]) is not None
        ]

    def wrong_layout_only(self, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> list[Any] | None:
        """The leaves with every tensor in the compiled layout, if that is all that was wrong with them, else None."""
        copies = list(leaves)
        for index, _, _, memory_format in self.tensors:
            tensor = copies[index]
            if type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided:
                return None
            try:
                copies[index] = tensor.resolve_conj().resolve_neg().contiguous(memory_format=memory_format)
            except RuntimeError:
                return None
        if not self.hold(copies, shapes) or (self.mutated and self._aliased(leaves)):
            return None  # the copies of tensors that share memory do not
        return copies

    def _aliased(self, leaves: Sequence[Any]) -> bool:
        return bool(self._alias_issues(leaves))

    def _alias_issues(self, leaves: Sequence[Any]) -> list[Issue]:
        """Inputs that share memory with one that the model writes to: the code was compiled for distinct ones."""
        return [
            issue
            for index, leaf, *_ in self.tensors
            if index in self.mutated and leaves[index].numel()
            for issue in self._sharing(leaves, {_memory_of(leaves[index]): f"`{leaf.path}`"}, but=index)
        ]

    def state_alias_issues(self, leaves: Sequence[Any], state: State) -> list[Issue]:
        """Inputs that share memory with the module, as what a call returned may, where the model writes to either."""
        known, written, owners = self._owners
        if known() is not state:
            written = {_memory_of(state[index]): f"the buffer `{name}`" for index, name in self.written_state}
            owners = {_memory_of(tensor): name for name, tensor in zip(self._state_names, state, strict=True)}
            owners = {memory: name for memory, name in owners.items() if memory not in written}
            self._owners = weakref.ref(state), written, owners
        return self._sharing(leaves, written) + [
            Issue(
                f"is written to by the model, and shares memory with the module's `{owners[memory]}`",
                where=path,
                hint="pass a clone",
            )
            for index, path in self._written_inputs
            if leaves[index].numel() and (memory := _memory_of(leaves[index])) in owners
        ]

    def _sharing(self, leaves: Sequence[Any], owners: Mapping[int, str], but: int = -1) -> list[Issue]:
        """Inputs, all `but` one, that lie in memory which the model writes to; `owners` says whose it is."""
        return [
            Issue(
                f"shares memory with {owners[memory]}, which the model writes to",
                where=leaf.path,
                hint="pass a clone of one of them",
            )
            for index, leaf, *_ in self.tensors
            if index != but and leaves[index].numel() and (memory := _memory_of(leaves[index])) in owners
        ]

    def issues(self, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> list[Issue]:
        """Every reason why `hold` is False."""
        found = [
            issue
            for index, leaf, *_ in self.tensors
            for issue in self._tensor_issues(leaves[index], leaf, shapes[index])
        ]
        layouts = [
            issue
            for index, leaf, _, memory_format in self.tensors
            for issue in _layout_issues(leaves[index], leaf, memory_format)
            if not self.copies
        ]
        for index, leaf in self.constants:
            if not _equal_constant(leaves[index], leaf.value):
                found.append(
                    Issue(
                        f"built for {leaf.value!r}, {describe(leaves[index])} came",
                        where=leaf.path,
                        expected=repr(leaf.value),
                        actual=describe(leaves[index]),
                        hint="it was left out at build: name it in the manifest's `inputs`"
                        if leaf.value is None and isinstance(leaves[index], torch.Tensor)
                        else "a Python argument is part of the compiled code: give each value a model of its own",
                    )
                )
        if not found and self.mutated:
            found += self._alias_issues(leaves)
        if not found:
            found += self._dual(leaves)
        if _transform() is not None:
            found.append(Issue("it is called within a transform of torch.func, which cannot look into compiled code"))
        found += self.mode_issues()
        if not found and all(shapes[index] is not None for index, *_ in self.tensors):
            more = ", or set `make_contiguous: true` in the manifest"
            layouts = [msgspec.structs.replace(issue, hint=issue.hint + more) for issue in layouts]
        return layouts + found

    def _tensor_issues(self, tensor: Any, leaf: TensorLeaf, shape: Shape | None) -> list[Issue]:
        if type(tensor) not in _PLAIN_TENSORS:
            return [Issue(f"a tensor is expected, {describe(tensor)} came", where=leaf.path)]
        if tensor.is_nested:  # which has no sizes to ask for
            return [Issue("a tensor of one shape is expected, a nested one came", where=leaf.path)]
        pairs: list[tuple[str, object, object, str]] = [
            ("dtype", leaf.dtype, dtype_name(tensor.dtype), "convert it, or build the model for that dtype"),
            ("device", str(self.device), str(tensor.device), "move it with .to()"),
        ]
        if shape is not None:
            pairs.append(("shape", list(shape), list(tensor.shape), ""))
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
        if tensor.requires_grad and torch.is_grad_enabled():
            found.append(
                Issue(
                    "it requires a gradient, and an inference artifact gives none",
                    where=leaf.path,
                    hint="call under torch.no_grad() or torch.inference_mode()",
                )
            )
        return found

    def mode_issues(self) -> list[Issue]:
        """The modes of the process or the module that are not those of the build."""
        now = take_ambient(self.device.type)
        found = [
            Issue(
                f"built with {label} {expected}, it is {actual} now",
                expected=str(expected),
                actual=str(actual),
                hint=hint,
            )
            for label, expected, actual, hint in (
                (
                    "autocast",
                    self.ambient.autocast or "off",
                    now.autocast or "off",
                    "set `autocast:` in the manifest to match",
                ),
                (
                    "default dtype",
                    self.ambient.default_dtype,
                    now.default_dtype,
                    "call torch.set_default_dtype to match",
                ),
                (
                    "float32 matmul precision",
                    self.ambient.float32_matmul_precision,
                    now.float32_matmul_precision,
                    "call torch.set_float32_matmul_precision, or set `float32_matmul_precision:` in the manifest",
                ),
                (
                    "deterministic algorithms",
                    self.ambient.deterministic,
                    now.deterministic,
                    "call torch.use_deterministic_algorithms to match",
                ),
            )
            if expected != actual
        ]
        threads = self.ambient.num_threads
        if threads is not None and threads != torch.get_num_threads():
            found.append(
                Issue(
                    f"compiled for {threads} threads, torch uses {torch.get_num_threads()} now",
                    expected=str(threads),
                    actual=str(torch.get_num_threads()),
                    hint="call torch.set_num_threads, or drop the option `cpp.dynamic_threads: false`",
                )
            )
        if self.module is not None and self.module.training is not self.training:
            found.append(
                Issue(
                    f"built with module.training {self.training}, it is {self.module.training} now",
                    expected=str(self.training),
                    actual=str(self.module.training),
                    hint="call module.eval()",
                )
            )
        return found


def _layout_issues(tensor: Any, leaf: TensorLeaf, memory_format: torch.memory_format) -> Iterator[Issue]:
    """What a copy into the compiled layout mends."""
    if type(tensor) not in _PLAIN_TENSORS or tensor.is_nested or tensor.layout is not torch.strided:
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
    elif not _has_layout(tensor, memory_format):
        given = "" if memory_format is torch.contiguous_format else f"memory_format={memory_format}"
        yield Issue(
            f"the layout {leaf.layout} is expected, strides {list(tensor.stride())} came",
            where=leaf.path,
            expected=leaf.layout,
            actual=str(list(tensor.stride())),
            hint=f"call .contiguous({given})",
        )


def _equal_constant(value: Any, expected: Any) -> bool:
    if type(value) is float and type(expected) is float:
        return value.hex() == expected.hex()  # tells -0.0 from 0.0
    return type(value) is type(expected) and bool(value == expected)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tangent_of(tensor: Tensor) -> Tensor | None:
    return cast("Tensor | None", forward_ad.unpack_dual(tensor).tangent)  # type: ignore[no-untyped-call]


def _has_layout(tensor: Tensor, memory_format: torch.memory_format) -> bool:
    try:
        return tensor.is_contiguous(memory_format=memory_format)
    except RuntimeError:
        return False


def _ambient_check(ambient: Ambient, device: str) -> Callable[[], bool]:
    """The quick form of comparing `take_ambient(device)` with the record."""
    autocast = None if ambient.autocast is None else dtype_of(ambient.autocast)
    default_dtype = dtype_of(ambient.default_dtype)
    precision, deterministic, threads = ambient.float32_matmul_precision, ambient.deterministic, ambient.num_threads
    is_autocast, autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    get_default, get_precision = torch.get_default_dtype, matmul_precision
    is_deterministic, get_threads = torch.are_deterministic_algorithms_enabled, torch.get_num_threads

    def holds() -> bool:
        if is_autocast(device):
            if autocast is None or autocast_dtype(device) is not autocast:
                return False
        elif autocast is not None:
            return False
        return (
            get_default() is default_dtype
            and get_precision() == precision
            and is_deterministic() is deterministic
            and (threads is None or get_threads() == threads)
        )

    return holds
