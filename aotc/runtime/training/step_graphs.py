"""Whole training steps as CUDA graphs: see `aotc.runtime.training.step`.

The first step with inputs of some shapes runs directly, on the stream of the captures. It loads kernels, and makes the
optimizer's states, which would be cleared in every replay if they were made in a capture. The second is captured, with
the inputs and `lr` in static buffers. Gradients and activations live in the graphs' pool, and within a replay only.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from aotc.call_table.dispatch import Plan, Shape
from aotc.errors import BindError, LibraryError
from aotc.machine.cuda_capture import capturing
from aotc.reads.tensors import named_state
from aotc.runtime.cuda.driver import make_stream
from aotc.runtime.cuda.graphs import Turn
from aotc.runtime.cuda.memset_nodes import clear_by_kernels
from aotc.runtime.guards import is_followed
from aotc.runtime.state.weights import slots_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from aotc.runtime.call import CompiledCall

MOST = 16
"""Sets of shapes that get a graph; steps with others are launched directly."""

_log = logging.getLogger("aotc")


class CapturedStep(NamedTuple):
    """A graph, the buffers that it reads its inputs from (None for other values), and the loss that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    loss: Tensor


class Checked(NamedTuple):
    """A call whose guards hold: of a model that was compiled whole, the plan for it, and its sizes."""

    plan: Plan | None = None
    sizes: Shape = ()


class StepGraphs:
    """The graphs of one step's function, by the forms of its inputs."""

    def __init__(self, step: Callable[[Any, Any], Tensor], call: CompiledCall, optimizer: Optimizer) -> None:
        """Raises BindError where the optimizer's step cannot be captured."""
        for group in optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                raise BindError(
                    f"a step of {type(optimizer).__name__} with fused={group.get('fused')} waits for the GPU, and "
                    "cannot be captured as a CUDA graph",
                    hint="use aotc.optim.AdamW or SGD, or fused=True; or TrainingStep(…, cuda_graph=False)",
                )
        self._step, self._call, self._optimizer = step, call, optimizer
        self._parts = [*getattr(call, "regions", {}).values()] or [call]
        assert call.module is not None
        self._slots = slots_of(call.module, list(named_state(call.module)))
        self._modules = list(call.module.modules())
        self._turn = Turn(call.device)
        self._stream = make_stream(self, call.device)
        self._rates: list[Tensor] = []
        self._set_to: list[float] = []
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: the addresses and values that they hold have changed."""
        self._captured: list[tuple[Any, list[Any], CapturedStep | None]] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._facts: list[Any] = []
        self._states = self._current_states()

    def __call__(self, args: Any, kwargs: Any) -> Tensor:
        with self._turn.lock, torch.cuda.device(self._call.device):
            self._turn.follow()
            checked = self._checked(args, kwargs)
            facts, states = self._current_facts(), self._current_states()
            if facts != self._facts or not _are_same(states, self._states):
                self.forget()
                self._facts = facts
            leaves, tree = pytree.tree_flatten((args, kwargs))
            form = _form_of(leaves, self._call.device)
            if checked is None or form is None:
                return self._step(args, kwargs)
            for place, (own_tree, own_form, captured) in enumerate(self._captured):
                if own_form == form and own_tree == tree:
                    if captured is None:
                        captured = self._capture(leaves, tree)
                        self._captured[place] = tree, form, captured
                    else:
                        self._count(checked)
                    return self._replay(captured, leaves)
            loss = self._run_aside(args, kwargs)
            self._states = self._current_states()  # the first step makes them
            if len(self._captured) < MOST:
                self._captured.append((tree, form, None))
            elif len(self._captured) == MOST:
                _log.debug("%s: more than %d forms of inputs; others are launched directly", self._call, MOST)
            return loss

    # -- what has to be as it was at the capture ----------------------------------------------------------------------

    def _checked(self, args: Any, kwargs: Any) -> Checked | None:
        """The checks of a call of the model. None where it has to be made, as it may be a miss, or writes to inputs."""
        if is_followed():
            return None
        if self._parts[0] is not self._call:
            self._call._check_edges()  # type: ignore[attr-defined]
            checked = Checked()
        elif (found := self._plan_of(args, kwargs)) is None:
            return None
        else:
            checked = found
        for part in self._parts:
            if part._watch is not None:
                part._watch.check()
            part._take_state()
        return checked

    def _plan_of(self, args: Any, kwargs: Any) -> Checked | None:
        call, guards = self._call, self._call._guards
        try:
            leaves = call._bind(args, kwargs)
            sizes = call._dispatcher.dims.read(leaves)
            plan = call._dispatcher.plan(sizes)
        except Exception:  # the call raises it, or it is a miss
            return None
        if plan is None or guards.mutated or not guards.hold(leaves, plan.shapes):
            return None
        aliases = guards.state_aliases
        if aliases is not None and aliases.issues(leaves, call._take_state()):
            return None
        return Checked(plan, sizes)

    def _count(self, checked: Checked) -> None:
        """A replay, as a call of the model is counted."""
        if checked.plan is not None:
            if self._call.on_sizes is not None:
                self._call.on_sizes(checked.sizes)
            self._call._counters.count_call(checked.plan, None)

    def _current_facts(self) -> list[Any]:
        """The addresses and values that a graph holds: the module's tensors and modes, and the optimizer's options."""
        tensors = [owner.get(key) for owner, key in self._slots]
        device = self._call.device.type
        facts: list[Any] = [
            each if each is None else (id(each), each.data_ptr(), each.requires_grad) for each in tensors
        ]
        facts += [each.training for each in self._modules]
        facts += torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        for group in self._optimizer.param_groups:
            facts.append([id(each) for each in group["params"]])
            facts.append({name: value for name, value in group.items() if name not in ("params", "lr")})
            facts.append(id(group["lr"]) if _on(group["lr"], self._call.device) else None)
        return facts

    def _current_states(self) -> list[Tensor]:
        """The tensors of the optimizer's state, of which some may have been loaded, or dropped."""
        states = self._optimizer.state.values()
        return [each for state in states for each in state.values() if isinstance(each, Tensor)]

    # -- running ------------------------------------------------------------------------------------------------------

    def _run_aside(self, args: Any, kwargs: Any) -> Tensor:
        """Run a step directly, on the stream of the captures: autograd remembers the stream of each parameter."""
        current = torch.cuda.current_stream(self._call.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                loss = self._step(args, kwargs)
        finally:
            current.wait_stream(self._stream)
        loss.record_stream(current)
        return loss

    def _capture(self, leaves: Sequence[Any], tree: Any) -> CapturedStep:
        """Record a step; nothing of it runs. Raises LibraryError where the step cannot be captured."""
        first: dict[int, Tensor] = {}
        inputs = [
            first.setdefault(id(leaf), torch.empty_like(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(
            [leaf if static is None else static for leaf, static in zip(leaves, inputs, strict=True)], tree
        )
        current = torch.cuda.current_stream(self._call.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.empty_cache()  # what direct steps used, the pool of the graphs cannot
        self._stream.wait_stream(current)
        try:
            with self._as_tensors(), torch.cuda.stream(self._stream):
                with capturing(graph, self._pool):
                    loss = self._step(args, kwargs)
                clear_by_kernels(graph)
            graph.instantiate()
        except BaseException as error:
            self.forget()  # torch 2.11 takes no further graph into this pool
            if not isinstance(error, RuntimeError):  # raised by a signal's handler
                raise
            raise LibraryError(
                f"the training step cannot be captured as a CUDA graph: {error}",
                hint="TrainingStep(…, cuda_graph=False); a graph holds no host synchronisation and no CPU operator",
            ) from error
        current.wait_stream(self._stream)
        return CapturedStep(graph, inputs, loss)

    @contextmanager
    def _as_tensors(self) -> Iterator[None]:
        """Each group's `lr` as a tensor on the GPU, which the graph reads, and its step as one that can be captured."""
        groups = self._optimizer.param_groups
        if len(self._rates) != len(groups):
            self._rates = [torch.zeros((), device=self._call.device) for _ in groups]
            self._set_to = [math.nan] * len(groups)
        before: list[Mapping[str, Any]] = [dict(group) for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                if not _on(group["lr"], self._call.device):
                    group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = True
            yield
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update({name: old[name] for name in ("lr", "capturable") if name in old})

    def _replay(self, captured: CapturedStep, leaves: Sequence[Any]) -> Tensor:
        for index, group in enumerate(self._optimizer.param_groups):
            lr = group["lr"]
            if not _on(lr, self._call.device):
                if not isinstance(lr, int | float | Tensor):
                    raise BindError(f"lr is {lr!r}", hint="set it to a number, or a tensor of one value")
                if (value := float(lr)) != self._set_to[index]:
                    self._rates[index].fill_(value)
                    self._set_to[index] = value
        for static, leaf in zip(captured.inputs, leaves, strict=True):
            if static is not None:
                static.copy_(leaf, non_blocking=True)
        captured.graph.replay()
        return captured.loss.clone()


def _are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device


def _form_of(leaves: Sequence[Any], device: torch.device) -> list[Any] | None:
    """The properties of the inputs that a graph has fixed. None where it could not read an input, on another device."""
    form: list[Any] = []
    places: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.device != device:
                return None
            first = places.setdefault(id(leaf), place)
            form.append((first, leaf.dtype, leaf.shape, leaf.stride()))
        else:
            form.append((type(leaf), leaf))
    return form
