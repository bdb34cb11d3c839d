"""The operators that a module runs in one call: modules with the same behaviour have equal traces.

Two blocks of one class, with weights of equal shapes, may still differ: one may hold another activation function, or
scale by its own index. And blocks with different attributes may be equal: many know their own index and never use it.
So the operators are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from aotc.compiler.scoped import replaced
from aotc.digest import sha256_json
from aotc.reads.tensors import tensor_digests


class OperatorTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records every operator with its arguments: a tensor by its source (a leaf of the call, the module's
    state by name, an earlier operator), any other tensor by its bytes, other arguments by value; in `steps`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled while this mode is active. torch's own method would import its compiler."""
        return False

    def __init__(self, leaves: Iterable[Any], state: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Any] = []
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        for name, tensor in state.items():
            self._name(tensor, f"state {name}")
        for index, leaf in enumerate(leaves):
            self._name(leaf, f"leaf {index}")

    def _name(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor) and self._name_of(value) is None:
            self._names[id(value)] = weakref.ref(value), name

    def _name_of(self, tensor: Tensor) -> str | None:
        """The tensor's recorded name, or None; also None if the id belonged to another tensor before."""
        known, name = self._names.get(id(tensor), (None, None))
        return name if known is not None and known() is tensor else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = [self._text(value) for value in pytree.tree_leaves((args, kwargs or {}))]
        result = func(*args, **(kwargs or {}))
        number = len(self.steps)
        for index, value in enumerate(pytree.tree_leaves(result)):
            self._name(value, f"result {number}.{index}")
        self.steps.append([str(func), *taken])
        return result

    @contextmanager
    def with_gradients(self) -> Iterator[None]:
        """While active, also records what changes gradients and no result: functions with a backward of their own, and
        where gradients are disabled."""

        def note(what: str) -> None:
            self.steps.append([what])

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            note(f"{function.__module__}.{function.__qualname__}")
            return cast("Any", super(_SingleLevelFunction, function)).apply(*args, **kwargs)

        with replaced(_SingleLevelFunction, "apply", classmethod(apply), create=True), _GradModesNoted(note):
            yield

    def _text(self, value: Any) -> str:
        if not isinstance(value, Tensor):
            return f"{type(value).__name__} {value!r}"
        name = self._name_of(value)
        if name is None:
            name = f"constant {list(value.shape)} {tensor_digests({'': value})['']}"
            self._name(value, name)
        return name

    def digest(self, result: Any) -> str:
        """The digest of all operators, and of the call's result."""
        given = [self._text(value) for value in pytree.tree_leaves(result)]
        return sha256_json([self.steps, given])


class _GradModesNoted(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            self._note(f"gradients {args}")
        return func(*args, **(kwargs or {}))
