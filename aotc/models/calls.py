"""Calls of a model with example inputs: its signature's leaves filled in, and the modes that a manifest asks for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.errors import BuildError
from aotc.manifest.inputs import InputTree, parse_inputs
from aotc.manifest.types import ModelSpec
from aotc.models.example_inputs import example_leaves
from aotc.reads.tensors import plain_state, same_bits
from aotc.records import TUPLE, ConstantLeaf, Parameter, Signature
from aotc.tensors.layouts import has_memory
from aotc.tensors.rounding import Result
from aotc.tensors.sharing import Sharing, kept_in_place, module_tensors, sharing


def signature_leaves(
    spec: ModelSpec, signature: Signature, dims: Mapping[str, int], device: torch.device | str, seed: int, folder: Path
) -> list[Any]:
    """Example leaves in the signature's order; `folder` is the manifest's, where its init functions are found."""
    _, inputs = parse_inputs(spec.inputs)
    values = example_leaves(spec, dict(dims), device, seed, folder=folder)
    by_path = {leaf.path: value for leaf, value in zip(inputs, values, strict=True)}
    return [leaf.value if isinstance(leaf, ConstantLeaf) else by_path[leaf.path] for leaf in signature.leaves]


@contextmanager
def modes_of(spec: ModelSpec, device: str, *, autocast: bool = True) -> Iterator[None]:
    """The modes that the manifest asks for: no gradients, its autocast (unless left out), its float32 precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(spec.float32_matmul_precision)
    dtype = getattr(torch, spec.autocast) if spec.autocast and autocast else None
    try:
        with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def arguments_of(signature: Signature, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The `(args, kwargs)` that pass these leaves, positional as far as forward allows; see `passed`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    given = passed(signature)
    for parameter, next_given in zip(signature.parameters, given, strict=False):
        if next_given is not parameter or parameter.kind in ("keyword", "extra"):
            break
        args.append(fill(parameter.tree, leaves))
    for parameter in given[len(args) :]:
        kwargs[parameter.name] = fill(parameter.tree, leaves)
    return tuple(args), kwargs


def passed(signature: Signature) -> list[Parameter]:
    """The parameters that a call passes: those with their default value are left out, as in handwritten code.

    Decorators of forward may behave differently for a value that is passed: those of transformers add what is not
    passed by name.
    """
    return [parameter for parameter in signature.parameters if not _has_default(parameter, signature)]


def _has_default(parameter: Parameter, signature: Signature) -> bool:
    if parameter.kind == "positional" or not isinstance(parameter.tree, int):
        return False
    leaf, default = signature.leaves[parameter.tree], parameter.default
    return isinstance(leaf, ConstantLeaf) and type(leaf.value) is type(default) and leaf.value == default


def fill(tree: InputTree, leaves: Sequence[Any]) -> Any:
    """The value of a tree: containers with the leaves in their places."""
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, Mapping):
        return {name: fill(subtree, leaves) for name, subtree in tree.items()}
    if tree[:1] == [TUPLE]:
        return tuple(fill(subtree, leaves) for subtree in tree[1:])
    return [fill(subtree, leaves) for subtree in tree]


class ContainersChanged(BuildError):
    """Forward has changed the lists or dicts among its arguments."""


def containers_changed(before: tuple[list[Any], pytree.TreeSpec], arguments: Any) -> bool:
    """Whether arguments, flattened as `before` at the start, have changed since."""
    leaves, structure = before
    now, structure_now = pytree.tree_flatten(arguments)
    return structure != structure_now or not all(map(operator.is_, leaves, now))


def call_model(
    module: nn.Module,
    signature: Signature,
    written: Collection[str],
    leaves: Sequence[Any],
    look: Callable[[], None] = lambda: None,
    seed: int = 0,
    call: Callable[..., Any] | None = None,
    shared: Sharing | None = None,
) -> Result:
    """The model's result, its inputs after the call, and its state called `written`, which is then restored.

    Raises ContainersChanged where forward puts other things into a list or dict that it is given.

    `look` is called before that. Random numbers are those of the `seed`. `call` is what is called in the place of the
    module, as its compiled code. `shared` is told what the results share with one another, with the inputs, and with
    the module.
    """
    values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = arguments_of(signature, values)
    before, state = pytree.tree_flatten((args, kwargs)), plain_state(module)
    with state_put_back(module, written):
        torch.manual_seed(seed)
        returned = pytree.tree_leaves((call or module)(*args, **kwargs))
        if containers_changed(before, (args, kwargs)):
            raise ContainersChanged(
                "forward puts other things into a list or dict that it is given; compiled code leaves them as is",
                hint="let forward work on a copy, `d = dict(d)`, and return what its caller reads",
                stage="export",
            )
        look()
        after = plain_state(module)
        if shared is not None:
            inputs = {f"the input `{leaf.path}`": value for leaf, value in zip(signature.leaves, values, strict=True)}
            own = module_tensors(kept_in_place(state, after))
            outputs = {f"output {number}": value for number, value in enumerate(returned)}
            shared |= sharing(_tensors(outputs), _tensors(inputs) | own)
        found = (*returned, *values, *(after[name] for name in written))
        return [item.detach().clone() if isinstance(item, Tensor) else item for item in found]


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class Called(NamedTuple):
    """Calls a module, or its compiled code, with these leaves, and restores the state after each call."""

    module: nn.Module
    signature: Signature
    written: Sequence[str]
    leaves: Sequence[Any]

    def call(self, function: Callable[..., Any], seed: int = 0, shared: Sharing | None = None) -> Result:
        return call_model(
            self.module, self.signature, self.written, self.leaves, seed=seed, call=function, shared=shared
        )


def has_drawn(device: torch.device) -> bool:
    """Whether anything was drawn from torch's generator since `torch.manual_seed(0)`; the generator is reset to that
    seed."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    after = generator.get_state()
    torch.manual_seed(0)
    return not torch.equal(after, generator.get_state())


def names_of(result: Result, signature: Signature, written: Collection[str]) -> list[str]:
    """Names for messages: what each part of a result of `call_model` is."""
    behind = [*(f"what is left in the input `{leaf.path}`" for leaf in signature.leaves)]
    behind += [f"what is written to `{name}`" for name in written]
    return [*(f"output {number}" for number in range(len(result) - len(behind))), *behind]


@contextmanager
def state_put_back(module: nn.Module, written: Collection[str]) -> Iterator[None]:
    """While active, the module may be called; its state called `written` is restored at the end."""
    state = plain_state(module)
    before = {name: state[name].detach().clone() for name in written}
    scripted = torch.jit.ScriptModule  # its buffers are not in a dict
    parts = (part for part in module.modules() if not isinstance(part, scripted))
    tables = [(part._buffers, dict(part._buffers)) for part in parts]
    try:
        yield
    finally:
        for table, tensors in tables:  # what is None at first is kept in Python
            table.update({name: tensor for name, tensor in tensors.items() if tensor is not None})
        for name, tensor in before.items():
            if not same_bits(state[name], tensor):  # views in which elements share memory cannot be written to
                state[name].detach().copy_(tensor)


def written_integers_reset(tensors: Collection[Tensor]) -> Callable[[], None]:
    """Return a function that restores the integers among these tensors, which a call writes to, to their values now.

    Repeated calls with the same arguments would otherwise count on. The lengths of a cache, or the positions in a
    buffer, would then leave the tensors that they index, and a GPU's context would end.
    """
    counters = [each for each in tensors if not (each.is_floating_point() or each.is_complex())]
    before = [each.detach().clone() for each in counters]

    def reset() -> None:
        if counters:
            torch._foreach_copy_(counters, before, non_blocking=True)

    return reset


def writable_buffers(module: nn.Module) -> list[str]:
    """The names of the buffers that forward may write to and `state_put_back` can put back."""
    plain = {
        id(buffer)
        for buffer in module.buffers()
        if has_memory(buffer) and not buffer.is_nested and not buffer.is_inference()
    }
    return [name for name, tensor in plain_state(module).items() if id(tensor) in plain]
