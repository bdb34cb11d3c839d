"""One step of training as one call: forward, backward, the optimizer's step, and gradients that are let go."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from aotc.errors import BindError, GradientError, Issue
from aotc.runtime.compiled import Compiled
from aotc.runtime.state.weights import slots_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from aotc.runtime.training.step_graphs import StepGraphs


class TrainingStep:
    """A training step of a model with `train: true`: forward, backward, `optimizer.step()`, and gradients set to None.

    A call takes the model's arguments and returns its loss: detached, of no axes, on the model's device. On a GPU, the
    whole step is one CUDA graph for each set of input shapes: the first call with them is launched directly, the second
    one is captured, and later ones copy their inputs and replay it. A call is checked as a call of the model is. A new
    `lr` in `param_groups`, as schedulers set it, is used by the next step. Where another option of the groups, a tensor
    of the optimizer's state or of the module, its `requires_grad`, or the mode of a part of the module is another one,
    the next step is direct, and graphs are captured anew.

    Hooks (of the optimizer's step, to clip gradients say, or of parameters), `loss`, and what stays eager of a model by
    regions run in direct steps and while a graph is captured: what they launch is part of it. They do not run when it
    is replayed, so values of Python that they read are those of the capture. For one thread at a time.

    Args:
        model: what `aotc.load` gave.
        optimizer: one over parameters of that model: of `aotc.optim`, which imports no compiler, or of `torch.optim`.
        loss: from the model's result to the loss. By default the result itself, its first item, its item "loss", or
            its attribute `loss`.
        cuda_graph: False launches every step directly. By default steps on a GPU are graphs, and need an optimizer with
            `fused=True` or `capturable=True`.

    Raises:
        BindError: the model was not built to be trained; the optimizer has parameters that are not the model's, as
            after `update_weights`; the result has no loss; the optimizer cannot be captured.
        GradientError: parameters have gradients from before the call, or an input requires one, which would be lost.
        LibraryError: the step cannot be captured. All else as a call of the model. The parameters are as before.

    Example:
        >>> step = aotc.TrainingStep(compiled, aotc.optim.AdamW(compiled.parameters(), lr=3e-4))
        >>> for batch in batches:
        ...     loss = step(batch)
    """

    def __init__(
        self,
        model: Compiled,
        optimizer: Optimizer,
        *,
        loss: Callable[[Any], Any] | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        if loss is not None and not callable(loss):
            raise BindError(f"loss is {loss!r}, and may be a function of the model's result")
        if not isinstance(model, Compiled) or model.module is None or not model.artifact.trains:
            given = repr(model) if isinstance(model, Compiled) else f"a {type(model).__name__}"
            raise BindError(
                f"{given} gives no gradients",
                hint="write `train: true` in the manifest, build, and give what aotc.load(ref, module) returns",
            )
        self.model, self.optimizer = model, optimizer
        self._loss = loss or _loss_of
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        slots = slots_of(model.module, names)
        self._owners, self._keys = [owner for owner, _ in slots], [key for _, key in slots]
        self._parameters = self._current()
        self._check_optimizer()
        self._graphs: StepGraphs | None = None
        if model.device.type == "cuda" and cuda_graph is not False:
            from aotc.runtime.training.step_graphs import StepGraphs

            self._graphs = StepGraphs(self._run, model._aotc, optimizer)
        elif cuda_graph:
            raise BindError(
                f"a step on {model.device} cannot be a CUDA graph", hint="leave out `cuda_graph`, or load it on a GPU"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not all(map(operator.is_, self._current(), self._parameters)):
            raise BindError(
                "parameters of the model were replaced, and the optimizer has the old ones",
                hint="make a new optimizer over compiled.parameters(), load the old one's state_dict(), and "
                "a new TrainingStep",
            )
        if any(parameter.grad is not None for parameter in self._parameters):
            raise GradientError(
                "parameters have gradients from before this step, which would be lost",
                hint="call optimizer.zero_grad(); to accumulate gradients, call the model and the optimizer yourself",
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))):
            raise GradientError(
                "an input requires a gradient, which a TrainingStep does not give",
                hint="detach it; or call the model and the optimizer yourself",
            )
        return self._run(args, kwargs) if self._graphs is None else self._graphs(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Tensor:
        """The step itself, launched directly or within a capture."""
        try:
            with torch.enable_grad():
                loss: Tensor = self._loss(self.model(*args, **kwargs))
            _check_loss(loss)
            with torch.autocast(self.model.device.type, enabled=False):
                torch.autograd.backward(loss)
                self.optimizer.step()
            return loss.detach()
        finally:
            torch.clear_autocast_cache()  # it has casts of the parameters before the step
            for parameter in self._parameters:
                parameter.grad = None

    def _current(self) -> list[Any]:
        return list(map(dict.get, self._owners, self._keys))

    def _check_optimizer(self) -> None:
        own = {id(parameter) for parameter in self._parameters}
        foreign = [
            Issue(f"no parameter of the model has shape {tuple(each.shape)} and is this tensor", where=f"group {index}")
            for index, group in enumerate(self.optimizer.param_groups)
            for each in group["params"]
            if id(each) not in own
        ]
        if foreign:
            raise BindError(
                "the optimizer has parameters that are not the model's",
                issues=tuple(foreign),
                hint="make it over compiled.parameters(), after the load, update_weights and .to()",
            )


def _loss_of(result: Any) -> Any:
    if isinstance(result, Mapping):
        return result.get("loss")
    if isinstance(result, tuple | list):
        return result[0] if result else None
    return result if isinstance(result, Tensor) else getattr(result, "loss", None)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad:
        return
    if not isinstance(loss, Tensor):
        found = "the result of the model has no loss" if loss is None else f"the loss is of {type(loss).__name__}"
    elif loss.dim():
        found = f"the loss has shape {tuple(loss.shape)}, and has to have one value without axes"
    else:
        found = "the loss depends on no parameter that requires a gradient"
    raise BindError(found, hint="TrainingStep(…, loss=lambda result: …) says how to get it from the model's result")
