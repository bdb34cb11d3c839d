"""The conditions under which the variants of an artifact may run, beyond sizes: checked on every call.

`Guards.hold` answers in a microsecond or two; `aotc.runtime.explain.guards` says why not.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from aotc.reads.modes import ASKED, OF_INPUT, OF_STATE, matmul_precision
from aotc.reads.tensors import dtype_of
from aotc.records import Ambient, Artifact, ConstantLeaf, TensorLeaf
from aotc.runtime.dispatch import Shape
from aotc.tensors.layouts import MEMORY_FORMATS

if TYPE_CHECKING:
    from aotc.runtime.aliases import StateAliases

transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The transform of torch.func (vmap, grad, jvp) around this call, or None. Its tensors look like any other."""
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes that are told of each operator, as FakeTensorMode's and make_fx's are, are around this call."""
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes that are told of each function of torch are around this call."""
_traced: Callable[[], bool] = torch._C._is_tracing
"""Whether torch.jit.trace writes this call down."""

_training_of = operator.itemgetter("training")

PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


def is_followed() -> bool:
    """True while a mode of torch follows operators or functions, or `torch.jit.trace` is recording: outputs of compiled
    code would be recorded as constants, and the mode would not see what runs in it. The default device is such a mode,
    and changes compiled code only where forward asks for it."""
    return (
        _dispatch_modes() > 0 or _traced() or (_function_modes() > 0 and any(map(_follows, range(_function_modes()))))
    )


def _follows(index: int) -> bool:
    return type(torch._C._get_function_stack_at(index)) is not DeviceContext


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
        self.trains = artifact.trains
        self._reads = artifact.reads
        self.asked = {name: mode for variant in artifact.variants for name, mode in variant.asked.items()}
        self.refresh()
        self.ambient = artifact.ambient
        self.copies = artifact.signature.make_contiguous
        self.mutated = sorted({index for variant in artifact.variants for index in variant.mutated_leaves})
        self.from_storage = sorted({index for variant in artifact.variants for index in variant.storage_leaves})
        live = artifact.weights == "live"
        writes_state = live and any(variant.mutated_state for variant in artifact.variants)
        self.state_aliases: StateAliases | None = None
        if writes_state or (self.mutated and live and artifact.state):
            from aotc.runtime.aliases import StateAliases

            self.state_aliases = StateAliases(self, artifact)
        self._meet: Callable[[Sequence[Any]], bool] | None = None
        if self.mutated:
            from aotc.runtime.aliases import meeting_inputs

            self._meet = meeting_inputs(self)
        self.ambient_holds = _ambient_check(artifact.ambient, device.type)
        with_gradients = [variant.with_gradients for variant in artifact.variants if variant.backward is not None]
        self.with_gradients = frozenset[int]().union(*with_gradients)
        self._fast = [
            (index, dtype, None if memory_format is torch.contiguous_format else memory_format)
            for index, _, dtype, memory_format in self.tensors
        ]
        self._complex = any(dtype.is_complex for _, _, dtype, _ in self.tensors)

    def refresh(self) -> None:
        """Take the training flags of the module's submodules as they are now, where the captures read them."""
        self.moded = [
            (path, vars(part))
            for path, part in (self.module.named_modules() if self.module is not None else ())
            if f"{type(part).__qualname__}.training" in self._reads
        ]
        self.asked_now = asked_readers(self.asked, self.module)
        self._asked = [(read, self.asked[name]) for name, read in self.asked_now.items()]
        self._with_mode = [attributes for _, attributes in self.moded]
        self.modes = list(map(_training_of, self._with_mode))

    def hold(self, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> bool:
        """True if a call with these leaves may run a variant whose leaves have these shapes, as they lie in memory."""
        if transform() is not None:  # its tensors look like any other, and have no memory to be asked for
            return False
        device, plain, strided, may_be_conj = self.device, PLAIN_TENSORS, torch.strided, self._complex
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
                or not (tensor.is_contiguous() if memory_format is None else has_layout(tensor, memory_format))
                or (tensor.requires_grad and torch.is_grad_enabled() and index not in self.with_gradients)
                or (not tensor.data_ptr() and tensor.numel())
            ):
                return False
        for index, leaf in self.constants:
            if not equal_constant(leaves[index], leaf.value):
                return False
        return (
            self.lie_apart(leaves)
            and self.ambient_holds()
            and (self.module is None or self.module.training is self.training)
            and list(map(_training_of, self._with_mode)) == self.modes
            and not any(read() is not mode and read() != mode for read, mode in self._asked)
            and not (OF_INPUT in self.asked and any(leaves[index].requires_grad for index, *_ in self.tensors))
            and not (forward_ad._current_level >= 0 and has_tangent(leaves[index] for index, *_ in self.tensors))
        )

    def lie_apart(self, leaves: Sequence[Any]) -> bool:
        """Whether inputs that are written to meet no other one, and those read as storages begin where these do."""
        if self._meet is not None and self._meet(leaves):
            return False
        return not any(leaves[index].storage_offset() for index in self.from_storage)


def asked_readers(asked: Iterable[str], module: nn.Module | None) -> dict[str, Callable[[], Any]]:
    """What reads each mode that forward asked for; of the module's tensors only with a module."""
    readers: dict[str, Callable[[], Any]] = {name: ASKED[name] for name in asked if name in ASKED}
    for name in asked:
        if name.startswith(OF_STATE) and module is not None:
            path, _, key = name.removeprefix(OF_STATE).rpartition(".")
            part = module.get_submodule(path)
            table: dict[str, Any] = part._parameters if key in part._parameters else part._buffers
            readers[name] = functools.partial(_requires_grad, table, key)
    return readers


def _requires_grad(table: dict[str, Any], key: str) -> bool:
    tensor = table.get(key)
    return tensor is not None and tensor.requires_grad


def equal_constant(value: Any, expected: Any) -> bool:
    if type(value) is float and type(expected) is float:
        return value.hex() == expected.hex()  # tells -0.0 from 0.0
    return type(value) is type(expected) and bool(value == expected)


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them has a tangent of forward-mode differentiation, which compiled code would drop."""
    return any(tangent_of(tensor) is not None for tensor in tensors)


def tangent_of(tensor: Tensor) -> Tensor | None:
    return cast("Tensor | None", forward_ad.unpack_dual(tensor).tangent)  # type: ignore[no-untyped-call]


def has_layout(tensor: Tensor, memory_format: torch.memory_format) -> bool:
    try:
        return tensor.is_contiguous(memory_format=memory_format)
    except RuntimeError:
        return False


def _ambient_check(ambient: Ambient, device: str) -> Callable[[], bool]:
    """The quick form of comparing what `aotc.reads.modes.mode_readers` read with the record."""
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
