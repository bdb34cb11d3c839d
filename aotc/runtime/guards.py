"""The conditions under which the variants of an artifact may run, beyond sizes: checked in every call of Python's.

Each is one comparison, with its words beside it: a call may run where there is nothing to say.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from aotc.call_table.refusals import constant_hint, equal_constant, expected_issue, shape_hint
from aotc.errors import Issue
from aotc.reads.modes import ASKED, OF_INPUT, OF_STATE, mode_readers
from aotc.reads.module_check import call_of_mode
from aotc.reads.tensors import dtype_name, dtype_of
from aotc.records import Artifact, ConstantLeaf, TensorLeaf
from aotc.tensors.layouts import MEMORY_FORMATS, has_memory

if TYPE_CHECKING:
    from aotc.call_table.dispatch import Shape
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
        readers = mode_readers(device.type)
        expected = {name: getattr(artifact.ambient, name) for name in readers}
        expected |= {name: dtype_of(expected[name]) for name in ("autocast", "default_dtype") if expected[name]}
        self._ambient = [
            (name, read, expected[name])
            for name, read in readers.items()
            if name != "num_threads" or expected[name] is not None
        ]
        with_gradients = [variant.with_gradients for variant in artifact.variants if variant.backward is not None]
        self.with_gradients = frozenset[int]().union(*with_gradients)

    def refresh(self) -> None:
        """Take the training flags of the module's submodules as they are now, where the captures read them."""
        self.moded = [
            (path, vars(part))
            for path, part in (self.module.named_modules() if self.module is not None else ())
            if f"{type(part).__qualname__}.training" in self._reads
        ]
        self.asked_now = asked_readers(self.asked, self.module)
        self._with_mode = [attributes for _, attributes in self.moded]
        self.modes = list(map(_training_of, self._with_mode))

    def hold(self, leaves: Sequence[Any], shapes: Sequence[Shape | None]) -> bool:
        """True if a call with these leaves, of their strides, may run a variant whose leaves have these shapes."""
        if transform() is not None:  # its tensors look like any other, and have no memory to be asked for
            return False
        layouts, others = self._differences(leaves, shapes, lambda value: "")
        return not layouts and not others

    def issues(self, leaves: Sequence[Any], shapes: Sequence[Shape | None], shown: Callable[[Any], str]) -> list[Issue]:
        """Every reason why a call does not run; where inputs are copied, their layouts do not count. `shown` formats an
        argument. Where a shape is None, a leaf's is not compared."""
        layouts, others = self._differences(leaves, shapes, shown)
        if self.copies:
            return others
        if not others and all(shapes[index] is not None for index, *_ in self.tensors):
            more = ", or set `make_contiguous: true` in the manifest"
            layouts = [msgspec.structs.replace(issue, hint=issue.hint + more) for issue in layouts]
        return layouts + others

    def _differences(
        self, leaves: Sequence[Any], shapes: Sequence[Shape | None], shown: Callable[[Any], str]
    ) -> tuple[list[Issue], list[Issue]]:
        """The issues that a copy into the compiled layout removes, and all others."""
        found: list[Issue] = []
        layouts: list[Issue] = []
        for index, leaf, dtype, memory_format in self.tensors:
            found += self._tensor_issues(leaves[index], leaf, dtype, shapes[index], shown)
            layouts += _layout_issues(leaves[index], leaf, memory_format)
        found += self._gradient_issues(leaves)
        for index, constant in self.constants:
            if not equal_constant(leaves[index], constant.value):
                built, came = repr(constant.value), shown(leaves[index])
                hint = constant_hint(constant.value, leaves[index], is_tensor=isinstance(leaves[index], torch.Tensor))
                found.append(Issue(f"built for {built}, {came} came", constant.path, built, came, hint))
        if not found:
            found += self._memory_issues(leaves, dense=not layouts)
        return layouts, [*found, *self._mode_issues(), *self._asked_issues(leaves)]

    def _tensor_issues(
        self, tensor: Any, leaf: TensorLeaf, dtype: torch.dtype, shape: Shape | None, shown: Callable[[Any], str]
    ) -> list[Issue]:
        if tensor is None and leaf.default is not None and shape is None:
            return []  # it has the sizes of other tensors, of which one is wrong
        if without_sizes := no_sizes(tensor, leaf, shown):
            return [without_sizes]
        found = []
        if tensor.dtype is not dtype:
            hint = "convert it, or build the model for that dtype"
            found.append(expected_issue("dtype", leaf.dtype, dtype_name(tensor.dtype), leaf, hint))
        if tensor.device != self.device:
            found.append(expected_issue("device", str(self.device), str(tensor.device), leaf, "move it with .to()"))
        if shape is not None and tensor.shape != shape:
            came, hint = str(list(tensor.shape)), shape_hint(leaf, tensor)
            found.append(expected_issue("shape", str(list(shape)), came, leaf, hint))
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
            said = "a tensor with values in memory is expected, one without came"
            found.append(Issue(said, leaf.path, hint="call .clone()"))
        return found

    def _gradient_issues(self, leaves: Sequence[Any]) -> list[Issue]:
        """Inputs that require a gradient, which compiled code would not give."""
        if not torch.is_grad_enabled():
            return []
        what, hint = "an inference artifact gives none", "call under torch.no_grad() or torch.inference_mode()"
        if self.trains:
            what = "its gradient was not compiled"
            hint = "give this input `requires_grad: true` in the manifest, and build again; or pass x.detach()"
        return [
            Issue(f"it requires a gradient, and {what}", where=leaf.path, hint=hint)
            for index, leaf, *_ in self.tensors
            if index not in self.with_gradients and isinstance(leaves[index], Tensor) and leaves[index].requires_grad
        ]

    def _memory_issues(self, leaves: Sequence[Any], *, dense: bool) -> list[Issue]:
        """Of tensors that are otherwise as they must be: memory that is shared with what is written to, tangents, and
        storages that begin elsewhere."""
        found: list[Issue] = []
        if self.mutated and not (dense and self.do_not_overlap(leaves)):
            from aotc.runtime.aliases import input_alias_issues

            found += input_alias_issues(self, leaves)
        if not found and forward_ad._current_level >= 0:
            found += tangent_issues((leaf.path, leaves[index]) for index, leaf, *_ in self.tensors)
        return found + [
            Issue(
                "forward counts from the beginning of its storage (`as_strided` with an offset), and compiled code "
                f"from the tensor's, which is {offset} elements behind",
                where=leaf.path,
                expected="0",
                actual=str(offset),
                hint="pass a clone, if forward means the tensor's own beginning",
            )
            for index, leaf, *_ in self.tensors
            if index in self.from_storage and (offset := leaves[index].storage_offset()) and not found
        ]

    def ambient_holds(self) -> bool:
        """Whether the modes of the process are those of the build."""
        return all(read() == expected for _, read, expected in self._ambient)

    def _mode_issues(self) -> list[Issue]:
        """The modes of the process or the module that are not those of the build."""
        found = []
        for name, read, mode in self._ambient:
            if (now := read()) != mode:
                built, here = ("off" if each is None else _mode_name(each) for each in (mode, now))
                hint = _mode_hint(name, self.device.type, built)
                said = f"built with {name.replace('_', ' ')} {built}, it is {here} now"
                found.append(Issue(said, "", built, here, hint))
        if self.module is not None and self.module.training is not self.training:
            found.append(
                Issue(
                    f"built with module.training {self.training}, it is {self.module.training} now",
                    expected=str(self.training),
                    actual=str(self.module.training),
                    hint=call_of_mode(self.training, ""),
                )
            )
        mixed = {self.training, *self.modes} == {True, False}
        return (
            found
            + [
                Issue(
                    f"its training flag was {mode} at the load, it is {attributes['training']} now",
                    where=f"module.{path}" if path else "module",
                    expected=str(mode),
                    actual=str(attributes["training"]),
                    hint=call_of_mode(mode, path if mixed else ""),
                )
                for (path, attributes), mode in zip(self.moded, self.modes, strict=True)
                if attributes["training"] != mode
            ][:3]
        )

    def _asked_issues(self, leaves: Sequence[Any]) -> list[Issue]:
        """The modes that forward asks for, which are not those of the build."""
        found = []
        for name, read in self.asked_now.items():
            built, now = self.asked[name], read()
            if now is not built and now != built:
                label, hint = _ASKED.get(name, (name, "set it as it was at the build"))
                said = f"forward asks for it ({label}): {built} at the build, {now} now"
                found.append(Issue(said, "", str(built), str(now), hint))
        if OF_INPUT in self.asked:
            what = "forward asks whether it requires a gradient, which it did not at the build"
            found += [
                Issue(what, leaf.path, "False", "True", "pass x.detach()")
                for index, leaf, *_ in self.tensors
                if isinstance(leaves[index], Tensor) and leaves[index].requires_grad
            ]
        return found

    def do_not_overlap(self, leaves: Sequence[Any]) -> bool:
        """Whether inputs that are written to overlap no other input, and those read as storages begin at offset 0."""
        if self._meet is not None and self._meet(leaves):
            return False
        return not any(leaves[index].storage_offset() for index in self.from_storage)


def asked_readers(asked: Iterable[str], module: nn.Module | None) -> dict[str, Callable[[], Any]]:
    """A function for each mode that forward asked for, which reads it; of the module's tensors only with a module."""
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


# -- in words ---------------------------------------------------------------------------------------------------------


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
        if not value.is_nested:
            return None
        return Issue("a tensor of one shape is expected, a nested one came", where=leaf.path)
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


def _mode_name(mode: Any) -> str:
    return dtype_name(mode) if isinstance(mode, torch.dtype) else str(mode)


def _mode_hint(name: str, device: str, built: str) -> str:
    if name == "autocast":
        under = f"under torch.autocast({device!r}, dtype=torch.{built})"
        under = "outside of torch.autocast" if built == "off" else under
        return f"call {under}, or set `autocast:` in the manifest to match, and build again"
    return {
        "default_dtype": "call torch.set_default_dtype to match",
        "float32_matmul_precision": "call torch.set_float32_matmul_precision, or set `float32_matmul_precision:` in "
        "the manifest",
        "deterministic": "call torch.use_deterministic_algorithms to match",
        "num_threads": "call torch.set_num_threads, or drop the option `cpp.dynamic_threads: false`",
    }[name]


_ASKED = {
    "grad": ("gradients are enabled", "call under torch.no_grad() as the build did, or build with `train: true`"),
    "inference": ("inference mode is on", "call under torch.no_grad() in place of torch.inference_mode()"),
    "device": ("the default device", "call outside of torch.device(…), or let forward say `device=x.device`"),
}


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
