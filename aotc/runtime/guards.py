"""The conditions under which the variants of an artifact may run, beyond sizes: checked on every call.

`Guards.hold` answers in a microsecond or two; `Guards.issues` says why not, every reason with both values.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from aotc.errors import Issue
from aotc.records import Ambient, Artifact, ConstantLeaf, TensorLeaf
from aotc.runtime.call import describe
from aotc.runtime.dims import Shape
from aotc.runtime.state import State
from aotc.snapshot import dtype_name, dtype_of, matmul_precision, take_ambient
from aotc.tensors.layouts import MEMORY_FORMATS
from aotc.tensors.overlaps import Places, has_memory, overlapping, overlaps_itself

_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The transform of torch.func (vmap, grad, jvp) around this call, or None. Its tensors look like any other."""
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes that are told of each operator, as FakeTensorMode's and make_fx's are, are around this call."""
_traced: Callable[[], bool] = torch._C._is_tracing
"""Whether torch.jit.trace writes this call down."""

_training_of = operator.itemgetter("training")

PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


def is_followed() -> bool:
    """Whether somebody is told of each operator of this call: who hears nothing of compiled code, and takes what it
    gives for a constant."""
    return _dispatch_modes() > 0 or _traced()


FOLLOWED = Issue(
    "it is called within torch.jit.trace, make_fx or another dispatch mode, which cannot look into compiled code",
    hint='call it outside of them, or load with on_miss="eager"',
)


class Owned:
    """Tensors by what a message calls them, to be asked in whose memory an input lies."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names, self._places = list(tensors), Places(list(tensors.values()))

    def of(self, tensor: Tensor) -> list[str]:
        """The first that shares memory with the tensor, if one does."""
        return [self._names[index] for index in self._places.overlapped_by(tensor)[:1]]


def _shared(owner: str, path: str) -> Issue:
    return Issue(
        f"shares memory with {owner}, which the model writes to", where=path, hint="pass a clone of one of them"
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
        self._reads = artifact.reads
        self.refresh()
        self.ambient = artifact.ambient
        self.copies = artifact.signature.make_contiguous
        self.mutated = sorted({index for variant in artifact.variants for index in variant.mutated_leaves})
        self._from_storage = sorted({index for variant in artifact.variants for index in variant.storage_leaves})
        written = {name for variant in artifact.variants for name in variant.mutated_state}
        self.written_state = [
            (index, spec.name)
            for index, spec in enumerate(artifact.state)
            if artifact.weights == "live" and {spec.name, *spec.aliases} & written
        ]
        self._state_names = [spec.name for spec in artifact.state] if artifact.weights == "live" else []
        self._written_inputs = [(index, leaf.path) for index, leaf, *_ in self.tensors if index in self.mutated]
        self.may_share = bool(self.written_state or (self.mutated and self._state_names))
        self._spans = [(index, index in self.mutated) for index, *_ in self.tensors]
        self._owners: tuple[Callable[[], State | None], Owned, Owned] = (lambda: None, Owned({}), Owned({}))
        self._ambient_holds = _ambient_check(artifact.ambient, device.type)
        self._fast = [
            (index, dtype, None if memory_format is torch.contiguous_format else memory_format)
            for index, _, dtype, memory_format in self.tensors
        ]
        self._complex = any(dtype.is_complex for _, _, dtype, _ in self.tensors)

    def refresh(self) -> None:
        """Take the training flags of the module's submodules as they are now, where the captures read them."""
        self._moded = [
            (path, vars(part))
            for path, part in (self.module.named_modules() if self.module is not None else ())
            if f"{type(part).__qualname__}.training" in self._reads
        ]
        self._with_mode = [attributes for _, attributes in self._moded]
        self._modes = list(map(_training_of, self._with_mode))

    def hold(self, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> bool:
        """True if a call with these leaves may run a variant whose leaves have these shapes, as they lie in memory."""
        if _transform() is not None:  # its tensors look like any other, and have no memory to be asked for
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
                or not (tensor.is_contiguous() if memory_format is None else _has_layout(tensor, memory_format))
                or (tensor.requires_grad and torch.is_grad_enabled())
                or (not tensor.data_ptr() and tensor.numel())
            ):
                return False
        for index, leaf in self.constants:
            if not _equal_constant(leaves[index], leaf.value):
                return False
        if self.mutated and self._ranges_meet(leaves):
            return False
        for index in self._from_storage:
            if leaves[index].storage_offset():
                return False
        return (
            self._ambient_holds()
            and (self.module is None or self.module.training is self.training)
            and list(map(_training_of, self._with_mode)) == self._modes
            and (forward_ad._current_level < 0 or not self._dual(leaves))
        )

    def fit(self, leaves: Sequence[Any]) -> bool:
        """Whether the sizes of these leaves can be read at all: tensors of the signature's numbers of axes."""
        return not any(
            type(leaves[index]) not in PLAIN_TENSORS
            or leaves[index].is_nested
            or leaves[index].dim() != len(leaf.shape)
            for index, leaf, *_ in self.tensors
        )

    def form_of(self, leaves: Sequence[Any]) -> object:
        """What tells kinds of misses apart, as a value that can be hashed: no values of tensors or constants."""
        forms: list[object] = [torch.is_grad_enabled(), self._ambient_holds(), _transform() is None]
        forms.append(self.module is None or self.module.training)
        for leaf in leaves:
            plain = type(leaf) in PLAIN_TENSORS and not leaf.is_nested
            dense = plain and leaf.layout is torch.strided
            forms += (type(leaf), leaf.dtype, leaf.shape, leaf.device) if plain else (type(leaf),)
            forms += (leaf.stride(), leaf.requires_grad, leaf.is_neg(), leaf.is_conj()) if dense else ()
        return tuple(forms)

    def _dual(self, leaves: Sequence[Any]) -> list[Issue]:
        """Inputs that carry a tangent of forward-mode differentiation, which compiled code would drop."""
        return [
            Issue("it has a tangent, and an inference artifact gives none", where=leaf.path)
            for index, leaf, *_ in self.tensors
            if _tangent_of(leaves[index]) is not None
        ]

    def wrong_layout_only(self, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> list[Any] | None:
        """The leaves with every tensor in the compiled layout, if that is all that was wrong with them, else None."""
        if self._from_storage:
            return None  # the copies have other storages
        copies = list(leaves)
        for index, _, _, memory_format in self.tensors:
            tensor = copies[index]
            if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
                return None
            try:
                copies[index] = tensor.resolve_conj().resolve_neg().contiguous(memory_format=memory_format)
            except RuntimeError:
                return None
        if not self.hold(copies, shapes) or (self.mutated and self._alias_issues(leaves)):
            return None  # the copies of tensors that share memory do not
        return copies

    def _ranges_meet(self, leaves: Sequence[Any]) -> bool:
        """Whether inputs, which are dense, share memory with one that the model writes to: it was compiled for others.

        Memory is told by its addresses, as others than torch make several tensors of one buffer.
        """
        spans = []
        for index, written in self._spans:
            tensor = leaves[index]
            first = tensor.data_ptr()
            spans.append((first, first + tensor.nbytes, written))
        spans.sort()
        read_end = written_end = 0
        for first, end, written in spans:
            if first < end:  # an empty one may lie anywhere
                if first < written_end or (written and first < read_end):
                    return True
                if written:
                    written_end = max(written_end, end)
                else:
                    read_end = max(read_end, end)
        return False

    def _alias_issues(self, leaves: Sequence[Any]) -> list[Issue]:
        """Why inputs as they came, dense or not, are none that the model may write to."""
        tensors = [leaves[index] for index, *_ in self.tensors]
        paths = [leaf.path for _, leaf, *_ in self.tensors]
        written = {position for position, (index, *_) in enumerate(self.tensors) if index in self.mutated}
        found = []
        for pair in sorted(overlapping(tensors, written)):
            other, one = pair if pair[0] in written else pair[::-1]
            found.append(_shared(f"`{paths[other]}`", paths[one]))
        return found + [
            Issue(
                f"the model writes to it, and elements lie at one place: its strides are {list(tensor.stride())}",
                where=paths[position],
                hint="pass a clone",
            )
            for position, tensor in enumerate(tensors)
            if position in written and tensor.numel() and overlaps_itself(tensor.shape, tensor.stride())
        ]

    def state_alias_issues(self, leaves: Sequence[Any], state: State) -> list[Issue]:
        """Inputs that share memory with the module, as what a call returned may, where the model writes to either."""
        known, written, read = self._owners
        if known() is not state:
            names = {index: f"the buffer `{name}`" for index, name in self.written_state}
            others = {index: name for index, name in enumerate(self._state_names) if index not in names}
            written = Owned({name: state[index] for index, name in names.items()})
            read = Owned({name: state[index] for index, name in others.items()} if self.mutated else {})
            self._owners = weakref.ref(state), written, read
        return [_shared(name, leaf.path) for index, leaf, *_ in self.tensors for name in written.of(leaves[index])] + [
            Issue(
                f"is written to by the model, and shares memory with the module's `{name}`",
                where=path,
                hint="pass a clone",
            )
            for index, path in self._written_inputs
            for name in read.of(leaves[index])
        ]

    def issues(
        self, leaves: Sequence[Any], shapes: Sequence[Shape | None], shown: Callable[[Any], str] = describe
    ) -> list[Issue]:
        """Every reason why `hold` is False; `shown` puts an argument into words."""
        found = [
            issue
            for index, leaf, *_ in self.tensors
            for issue in self._tensor_issues(leaves[index], leaf, shapes[index], shown)
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
                        f"built for {leaf.value!r}, {shown(leaves[index])} came",
                        where=leaf.path,
                        expected=repr(leaf.value),
                        actual=shown(leaves[index]),
                        hint="it was left out at build: name it in the manifest's `inputs`"
                        if leaf.value is None and isinstance(leaves[index], torch.Tensor)
                        else "a Python argument is part of the compiled code: give each value a model of its own",
                    )
                )
        if _transform() is not None:
            found.append(Issue("it is called within a transform of torch.func, which cannot look into compiled code"))
        if not found and self.mutated:
            found += self._alias_issues(leaves)
        if not found:
            found += self._dual(leaves)
            found += [
                Issue(
                    "forward counts from the beginning of its storage (`as_strided` with an offset), and compiled code "
                    f"from the tensor's, which is {offset} elements behind",
                    where=leaf.path,
                    expected="0",
                    actual=str(offset),
                    hint="pass a clone, if forward means the tensor's own beginning",
                )
                for index, leaf, *_ in self.tensors
                if index in self._from_storage and (offset := leaves[index].storage_offset())
            ]
        found += self.mode_issues()
        if not found and all(shapes[index] is not None for index, *_ in self.tensors):
            more = ", or set `make_contiguous: true` in the manifest"
            layouts = [msgspec.structs.replace(issue, hint=issue.hint + more) for issue in layouts]
        return layouts + found

    def _tensor_issues(
        self, tensor: Any, leaf: TensorLeaf, shape: Shape | None, shown: Callable[[Any], str]
    ) -> list[Issue]:
        if type(tensor) not in PLAIN_TENSORS:
            return [Issue(f"a tensor is expected, {shown(tensor)} came", where=leaf.path)]
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
        elif not found and tensor.numel() and not has_memory(tensor) and _transform() is None:
            found.append(
                Issue("a tensor with values in memory is expected, one without came", leaf.path, hint="call .clone()")
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
        found += [
            Issue(
                f"its training flag was {mode} at the load, it is {attributes['training']} now",
                where=f"module.{path}" if path else "module",
                expected=str(mode),
                actual=str(attributes["training"]),
                hint="call module.eval()",
            )
            for (path, attributes), mode in zip(self._moded, self._modes, strict=True)
            if attributes["training"] is not mode
        ][:3]
        return found


def _layout_issues(tensor: Any, leaf: TensorLeaf, memory_format: torch.memory_format) -> Iterator[Issue]:
    """What a copy into the compiled layout mends."""
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
