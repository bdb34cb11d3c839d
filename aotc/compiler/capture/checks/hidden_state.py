"""Find models that keep state between calls which their graph does not keep, by calling the model.

A graph writes the state that forward keeps in tensors of the module, but not the state that it keeps in Python. So the
model is called: if that changes its Python objects, it is restored, called with other inputs, and called again with the
first ones. Then it must give the first result.

Of buffers to which forward assigns another tensor, torch.export knows only those of the module itself, not those of
submodules, and mixes them up where some are None. So buffers are compared, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.module_objects import KeptObjects, ObjectChange
from aotc.compiler.explain_failure import is_model_code, lines_shown, stack_of
from aotc.errors import BuildError
from aotc.models.calls import ContainersChanged, arguments_of, call_model, containers_changed, state_put_back
from aotc.reads.tensors import plain_state, same_bits
from aotc.records import Signature
from aotc.tensors.rounding import Result, is_repeated

TRIED = 32
"""The number of changes that are tried alone, to name the one that matters."""


def check_second_call(
    module: nn.Module,
    signature: Signature,
    written: Collection[str],
    kept: KeptObjects,
    leaves: Sequence[Any],
    other_leaves: Sequence[Any],
) -> Result:
    """The result of `call_model` for `leaves`.

    Raises BuildError if a call with other inputs before it changes the result, through the objects of `kept`, if the
    model assigns to a buffer or parameter that is not in `written`, or replaces a submodule. Exceptions of the model
    pass through. Afterwards `kept` is restored.
    """

    def call(values: Sequence[Any], look: Callable[[], None] = lambda: None) -> Result:
        return call_model(module, signature, written, values, look)

    kept.put_back()
    others = _Others(module, written)
    try:
        try:
            first = call(leaves, others.look)
        except ContainersChanged as error:
            raise error.with_fields(source=_line_of_change(module, signature, leaves)) from None
        if others.replaced:
            raise _lost(others.replaced, _line_of(others.are_replaced, lambda: call(leaves)))
        if problem := _reshaped(module, signature, written, leaves, first):
            raise problem
        changes = kept.changes()
        if replaced := [change for change in changes if change.is_of_submodule()]:
            kept.put_back()
            raise _replaced(replaced, _line_of(replaced[0].is_made, lambda: call(leaves)))
        if changes and (problem := _problem(first, call, kept, leaves, other_leaves)):
            raise problem
        return first
    finally:
        kept.put_back()


def _line_of_change(module: nn.Module, signature: Signature, leaves: Sequence[Any]) -> str:
    """The line of forward that changes a list or dict among its arguments."""
    arguments = arguments_of(signature, [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    before, (args, kwargs) = pytree.tree_flatten(arguments), arguments
    return _line_of(lambda: containers_changed(before, arguments), lambda: module(*args, **kwargs))


def _reshaped(
    module: nn.Module, signature: Signature, written: Collection[str], leaves: Sequence[Any], first: Result
) -> BuildError | None:
    """The error for inputs that have another shape, or other strides, after a call."""
    after = first[len(first) - len(written) - len(leaves) :]
    changed = [index for index, leaf in enumerate(leaves) if _form(leaf) != _form(after[index])]
    if not changed:
        return None
    values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def call() -> None:
        args, kwargs = arguments_of(signature, values)
        with state_put_back(module, written):
            module(*args, **kwargs)

    source = _line_of(lambda: any(_form(values[index]) != _form(leaves[index]) for index in changed), call)
    listed = "; ".join(
        f"`{signature.leaves[index].path}` from {_form(leaves[index])} to {_form(after[index])}" for index in changed
    )
    return BuildError(
        f"forward changes the form of its inputs in place, which compiled code cannot: {listed}",
        hint="let forward create a new tensor: `x = x.unsqueeze(0)` in place of `x.unsqueeze_(0)`, and in the same way "
        "for other operators whose names end in `_`",
        stage="export",
        source=source,
    )


def _form(value: Any) -> str:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return ""
    value = value.clone()  # which leaves no gaps
    return f"{list(value.shape)} with strides {list(value.stride())}"


def _problem(
    first: Result,
    call: Callable[[Sequence[Any]], Result],
    kept: KeptObjects,
    leaves: Sequence[Any],
    other_leaves: Sequence[Any],
) -> BuildError | None:
    def differs() -> bool:
        try:
            again = call(leaves)
        except Exception:
            return True
        return not is_repeated(first, again)

    kept.put_back()
    with suppress(Exception):
        call(other_leaves)
    changes = kept.changes()
    if not differs():
        return None
    for change in changes[:TRIED]:
        kept.put_back()
        change.make()
        if differs():
            changes = [change]
            break
    kept.put_back()
    return _forgotten(changes, _line_of(changes[0].is_made, lambda: call(leaves)) if changes else "")


class _Others:
    """The tensors of a module's state except those with these names."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        state = plain_state(module)
        named = {id(state[name]) for name in names}
        self.module = module
        self.before = {name: tensor for name, tensor in state.items() if id(tensor) not in named}
        self.replaced: list[str] = []

    def look(self) -> None:
        """Find the tensors that were replaced by unequal ones."""
        now = plain_state(self.module)
        self.replaced = [name for name, tensor in self.before.items() if not _same(tensor, now.get(name, tensor))]

    def are_replaced(self) -> bool:
        self.look()
        return self.replaced != []


def _same(one: Tensor, other: Tensor) -> bool:
    forms = [(tensor.dtype, tensor.shape, tensor.device) for tensor in (one, other)]
    return one is other or (forms[0] == forms[1] and same_bits(one, other))


def _line_of(is_made: Callable[[], bool], call: Callable[[], Any]) -> str:
    """The line of the model's code that makes a change; "" if there is none."""
    seen: list[tuple[FrameType, int]] = []
    found: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if found or not is_model_code(frame.f_code.co_filename):
            return None
        if is_made():
            if seen:
                found.append(lines_shown(stack_of(*seen[-1])))
            return None
        caller = frame.f_back if event == "return" else frame
        while caller is not None and not is_model_code(caller.f_code.co_filename):
            caller = caller.f_back
        seen[:] = [(caller, caller.f_lineno)] if caller is not None else []
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Exception:
        return ""
    finally:
        sys.settrace(before)
    return next(iter(found), "")


def _forgotten(changes: Sequence[ObjectChange], source: str) -> BuildError:
    names = ", ".join(f"`{change.path}`" for change in changes[:3]) or "an object outside its attributes"
    return BuildError(
        f"forward keeps a value for its next call in {names}, which is not a buffer before the first call: the model's "
        "second call gives another result, and compiled code would not",
        hint="keep the value in a buffer of the module, even if it is a number, and let forward write to it: "
        "register_buffer(name, tensor, persistent=False); or let forward take and return it",
        stage="export",
        source=source,
    )


def _replaced(changes: Sequence[ObjectChange], source: str) -> BuildError:
    def kind_of(part: Any) -> str:
        return f"a {type(part).__qualname__}" if isinstance(part, nn.Module) else "none"

    first, *others = changes
    more = f", and {len(others)} more" if others else ""
    return BuildError(
        f"forward replaces submodules of its own model, to which compiled code is bound: `{first.path}` is "
        f"{kind_of(first.before)} before the call and {kind_of(first.now)} after it{more}",
        hint="build and load the model as this call leaves it: by the option of its configuration that decides this "
        "(BigBird in transformers: `attention_type: original_full`), or let the factory do what this line does",
        stage="export",
        source=source,
    )


def _lost(names: Sequence[str], source: str) -> BuildError:
    listed = ", ".join(f"`{name}`" for name in names[:3])
    own = names[0].rpartition(".")[2]
    return BuildError(
        f"forward assigns another tensor to {listed}, and the graph that torch.export has captured does not",
        hint=f"write into the existing tensor: `self.{own}.copy_(…)`",
        stage="export",
        source=source,
    )
