"""Uses of trained models that nobody has listed: what eager gives in float64, or an error of aotc that says what to do.

    python tests/fuzzing/uses.py --count 2000 --seed 1              # builds the models first; --store keeps them
    python tests/fuzzing/uses.py --count 1 --seed 1 --first 217 --store S --no-build   # one case, with its traceback

A case is a model of `tests/training` or `uses.yaml`, a step that is trained (`STEPS`), and up to two things that are
done around it (`SETUPS`), drawn from the seed and the number of the case. It runs in a forked child, first with the
module in eager in float64, then with compiled code, and both note what a user can see: results, gradients, None in the
place of one, parameters and buffers after it. Outcomes:

    equal      what was noted is the same, but for rounding
    refused    an AotcError with a hint, or, of a write to what is saved for the backward, torch's own error
    as eager   both raise; or eager refuses a write that ours does not see, and the gradients are those without it
    WRONG      anything else: another value, an error without a type or a hint, a dead child, one that does not end
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MANIFESTS = (HERE.with_name("training") / "training.yaml", HERE / "uses.yaml")
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import aotc  # noqa: E402
from aotc.manifest import ModelSpec, read_manifest  # noqa: E402
from aotc.manifest.inputs import TensorInput, parse_inputs  # noqa: E402
from aotc.models.calls import fill  # noqa: E402
from aotc.models.example_inputs import example_leaves  # noqa: E402
from aotc.models.factory import build_module  # noqa: E402
from aotc.records import SizeRange  # noqa: E402

HANGS = 200.0
"""Seconds after which a child counts as one that does not end; a case takes less than one."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 6e-2}
"""Of the largest element of a tensor, by the dtype in which compiled code computes; a twentieth of it, of the largest
of all that a case notes."""


class Model(NamedTuple):
    spec: ModelSpec
    folder: Path
    sizes: tuple[dict[str, int], ...]
    """Sizes that its buckets take."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.spec.autocast else getattr(torch, self.spec.dtype or "float32")

    @property
    def is_exact(self) -> bool:
        """Whether its reference is of its own dtype: what is random, or rounded by autocast, is another value in
        float64."""
        return bool(self.spec.autocast) or "random" in self.spec.name


def models_of(manifests: Sequence[Path] = MANIFESTS) -> dict[str, Model]:
    found = {}
    for path in manifests:
        for spec in read_manifest(path).models.values():
            if spec.name != "random":  # its numbers are not eager's
                sizes = tuple(each for bucket in spec.buckets for each in _sizes(bucket))
                found[spec.name] = Model(spec, path.parent, sizes)
    return found


def _sizes(bucket: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Of a range: both ends, and one between."""
    for place in (0.0, 0.5, 1.0):
        yield {
            dim: size.min + int((size.max - size.min) * place) // size.multiple_of * size.multiple_of
            if isinstance(size, SizeRange)
            else size
            for dim, size in bucket.items()
        }


# -- one side of a case -----------------------------------------------------------------------------------------------


class Run:
    """The module that is trained, in eager or compiled, and what is noted of it.

    `random` draws the same for both sides. `around` wraps each call, `later` runs once after the load, and `between`
    after each step of an optimizer. Without `writes`, a step writes to nothing that the backward may need.
    """

    def __init__(self, model: Model, case: str, *, wide: bool, writes: bool = True) -> None:
        self.model, self.wide, self.writes = model, wide and not model.is_exact, writes
        self.random = Random(case)
        self.seed = self.random.randrange(1 << 20)
        torch.manual_seed(self.seed)
        self.module = build_module(model.spec, model.folder).train()
        if self.wide:
            self.module.double()
        self.call: Any = self.module
        self.around: list[Callable[[Any], Any]] = []
        self.later: list[Callable[[], None]] = []
        self.between: list[Callable[[], None]] = []
        self.notes: list[tuple[str, Any]] = []
        self.inputs: list[Tensor] = []
        self.compiled = False

    def load(self, store: Path) -> None:
        self.call, self.compiled = aotc.load(f"{store}#{self.model.spec.name}", self.module, on_miss="error"), True

    def note(self, name: str, value: Any) -> None:
        """Tensors as they are now."""
        leaves = pytree.tree_map(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, value)
        self.notes.append((name, leaves))

    # -- arguments and results ----------------------------------------------------------------------------------------

    def batch(self, *, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Arguments by name; those with gradients are leaves, which are noted in the end."""
        spec = self.model.spec
        sizes = sizes or self.random.choice(self.model.sizes)
        trees, inputs = parse_inputs(spec.inputs)
        leaves = example_leaves(spec, sizes, "cpu", self.random.randrange(1 << 10), folder=self.model.folder)
        for index, (leaf, given) in enumerate(zip(leaves, inputs, strict=True)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[index] = leaf = leaf.double() if self.wide else leaf
                if isinstance(given, TensorInput) and given.requires_grad:
                    self.inputs.append(leaf.requires_grad_())
        return {name: fill(tree, leaves) for name, tree in trees.items()}

    def forward(self, batch: Mapping[str, Any] | None = None) -> list[Tensor]:
        """The results that have a gradient. The others are noted."""
        call = self.call
        for wrap in self.around:
            call = wrap(call)
        with self.autocast():
            result = call(**(self.batch() if batch is None else batch))
        leaves = pytree.tree_leaves(result)
        self.note("results", leaves)
        return [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.model.spec.autocast else nullcontext()

    def some(self, values: Sequence[Any]) -> list[Any]:
        """A subset that is not empty, in its order."""
        chosen = {self.random.randrange(len(values)) for _ in range(self.random.randint(1, len(values)))}
        return [each for place, each in enumerate(values) if place in chosen]

    def drawn(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 20))
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)

    def loss(self, results: Sequence[Tensor]) -> Tensor:
        """Of some of the results, each weighted."""
        with warnings.catch_warnings():
            chosen = self.some(results)
            weighted = [(each * self.drawn(each.shape, each.dtype)).sum().double() for each in chosen]
        return torch.stack(weighted).sum()

    def parameters(self) -> list[nn.Parameter]:
        return [each for each in self.module.parameters() if each.requires_grad]

    def close(self) -> None:
        self.note("gradients", {name: each.grad for name, each in self.module.named_parameters()})
        self.note("gradients of inputs", [each.grad for each in self.inputs])
        self.note("state", {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())})


# -- steps ------------------------------------------------------------------------------------------------------------


def subset_of_results(run: Run) -> None:
    run.loss(run.forward()).backward()


def _expanded(run: Run, of: Tensor) -> Tensor:
    return run.drawn((), of.dtype).expand(of.shape)


def _transposed(run: Run, of: Tensor) -> Tensor:
    return run.drawn(of.shape[::-1], of.dtype).permute(*range(of.dim() - 1, -1, -1))


def _strided(run: Run, of: Tensor) -> Tensor:
    return run.drawn((*of.shape, 3), of.dtype)[..., 1]


def _zeros(run: Run, of: Tensor) -> Tensor:
    zeros: Tensor = torch._efficientzerotensor(of.shape, dtype=of.dtype)
    return zeros


def _negative(run: Run, of: Tensor) -> Tensor:
    """A view with the bit that negates it."""
    if of.dtype not in (torch.float32, torch.float64):
        return run.drawn(of.shape, of.dtype)
    parts = torch.complex(run.drawn(of.shape, of.dtype), run.drawn(of.shape, of.dtype))
    return parts.conj().imag


def _dense(run: Run, of: Tensor) -> Tensor:
    return run.drawn(of.shape, of.dtype)


def _attached(run: Run, of: Tensor) -> Tensor:
    return run.drawn(of.shape, of.dtype).requires_grad_()


COTANGENTS = (_expanded, _transposed, _strided, _zeros, _negative, _dense, _attached)


def cotangents(run: Run) -> None:
    results = run.some(run.forward())
    torch.autograd.backward(results, [run.random.choice(COTANGENTS)(run, each) for each in results])


def retain_grad(run: Run) -> None:
    results = run.forward()
    for each in results:
        each.retain_grad()
    run.loss(results).backward()
    run.note("gradients of results", [each.grad for each in results])


def gradient_of_a_result(run: Run) -> None:
    results = run.forward()
    of = run.some(results)
    run.note("gradients of results", torch.autograd.grad(run.loss(results), of, allow_unused=True))


def autograd_grad(run: Run) -> None:
    results = run.forward()
    of = run.some([*run.parameters(), *run.inputs])
    run.note("gradients", torch.autograd.grad(run.loss(results), of, allow_unused=True))


def create_graph(run: Run) -> None:
    """A penalty on gradients, by a step whose first gradients may or may not be needed as well."""
    loss = run.loss(run.forward())
    of = run.some([*run.parameters(), *run.inputs])
    found = torch.autograd.grad(loss, of, create_graph=True, allow_unused=True)
    run.note("first gradients", found)
    penalty = sum((each.square().sum() for each in found if each is not None), torch.zeros(()))
    if run.random.random() < 0.7:
        total = loss + penalty
        if total.requires_grad:
            total.backward()


def second_backward(run: Run) -> None:
    loss = run.loss(run.forward())
    loss.backward()
    loss.backward()


def retain_graph(run: Run) -> None:
    results = run.forward()
    first, second = run.loss(results), run.loss(results)
    first.backward(retain_graph=True)
    if run.random.random() < 0.5:
        run.module.zero_grad(set_to_none=run.random.random() < 0.5)
    second.backward()


def calls_in_any_order(run: Run) -> None:
    losses = [run.loss(run.forward()) for _ in range(3)]
    run.random.shuffle(losses)
    for loss in losses[: run.random.randint(1, 3)]:
        (loss * 0.5).backward()


def backward_in_a_thread(run: Run) -> None:
    loss, raised = run.loss(run.forward()), []

    def work() -> None:
        try:
            loss.backward()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for error in raised:
        raise error


OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.5, "nesterov": True}),
    ("AdamW", {"eps": 1e-2, "weight_decay": 0.3}),
)


def _optimizer(run: Run, *, own: bool | None = None) -> torch.optim.Optimizer:
    name, options = run.random.choice(OPTIMIZERS)
    own = run.random.random() < 0.5 if own is None else own
    made: torch.optim.Optimizer = getattr(aotc.optim if own else torch.optim, name)(
        run.module.parameters(), lr=0.01, **options
    )
    return made


def optimizer_steps(run: Run) -> None:
    """Each step with a loss of its own: a head may be unused in some of them."""
    optimizer, none = _optimizer(run), run.random.random() < 0.5
    for _ in range(3):
        optimizer.zero_grad(set_to_none=none)
        run.loss(run.forward()).backward()
        optimizer.step()
        for act in run.between:
            act()
    run.note("optimizer", [*optimizer.state_dict()["state"].items()])


def grad_scaler(run: Run) -> None:
    """One of the steps overflows, and is skipped."""
    optimizer, scaler = _optimizer(run), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    overflows = run.random.randrange(4)
    for step in range(3):
        optimizer.zero_grad()
        loss = run.loss(run.forward())
        scaler.scale(loss * torch.inf if step == overflows else loss).backward()
        if run.random.random() < 0.5:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    run.note("scale", scaler.get_scale())
    run.note("optimizer", [*optimizer.state_dict()["state"].items()])


def training_step(run: Run) -> None:
    """TrainingStep, and the loop that it stands for."""
    optimizer = _optimizer(run, own=True)
    weights = run.random.randrange(1 << 20)

    def loss(result: Any) -> Tensor:
        leaves = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]
        chosen = Random(weights)
        with torch.autocast("cpu", enabled=False):
            return sum(((each.double().square() * chosen.random()).sum() for each in leaves), torch.zeros(()))

    if run.compiled:
        step = aotc.TrainingStep(run.call, optimizer, loss=loss)
    for _ in range(3):
        batch = pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, run.batch())
        with run.autocast():
            if run.compiled:
                run.note("loss", step(**batch))
            else:
                value = loss(run.call(**batch))
                run.note("loss", value)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
        for act in run.between:
            act()


def write_before_backward(run: Run) -> None:
    """To a parameter, an input, a buffer or a result."""
    batch = run.batch()
    results = run.forward(batch)
    loss = run.loss(results)
    inputs = [each for each in pytree.tree_leaves(batch) if isinstance(each, Tensor) and each.is_floating_point()]
    chosen = run.random.choice(
        [*run.parameters(), *inputs, *run.module.buffers(), *(each.detach() for each in results)]
    )
    if run.writes and chosen.is_floating_point():
        with torch.no_grad():
            chosen.mul_(1.5)
    loss.backward()


def write_to_a_result(run: Run) -> None:
    """By an operator that autograd follows."""
    results = run.forward()
    place = run.random.randrange(len(results))
    if not run.writes:
        results[place] = results[place].clone()
    if (chosen := results[place]).dim() and run.random.random() < 0.5:
        chosen[0] = 0
    else:
        chosen.mul_(2)
    run.loss(results).backward()


def functional_derivatives(run: Run) -> None:
    """`torch.autograd.functional` of one result by one input."""
    batch = run.batch()
    if not run.inputs:
        return subset_of_results(run)
    (x, *_), which = run.inputs, run.random.random()

    def of(value: Tensor) -> Tensor:
        leaves = run.forward(pytree.tree_map(lambda each: value if each is x else each, batch))
        return leaves[-1]

    start = x.detach().clone()
    kind = run.random.randrange(5)
    if kind == 0:
        run.note("jacobian", functional.jacobian(of, start))
    elif kind == 1:
        run.note("jacobian", functional.jacobian(of, start, vectorize=True))
    elif kind == 2:
        run.note("vjp", functional.vjp(lambda value: of(value).sum(), start))
    elif kind == 3:
        run.note("jvp", functional.jvp(of, start, torch.ones_like(start)))
    else:
        run.note("hessian", functional.hessian(lambda value: of(value).sum(), start, vectorize=which < 0.5))
    return None


def torch_func(run: Run) -> None:
    """`torch.func` over `functional_call`."""
    batch = {
        name: pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, value)
        for name, value in run.batch().items()
    }
    state = {name: each.detach().clone() for name, each in run.module.named_parameters()}
    frozen = {name for name, each in run.module.named_parameters() if not each.requires_grad}

    def loss(trained: Mapping[str, Tensor]) -> Tensor:
        result = torch.func.functional_call(run.call, {**state, **trained}, (), batch)
        leaves = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and each.is_floating_point()]
        return sum((each.square().sum() for each in leaves), torch.zeros(()))

    trained = {name: each for name, each in state.items() if name not in frozen}
    kind = run.random.randrange(4)
    with run.autocast():
        if kind == 0:
            leaves = {name: each.requires_grad_() for name, each in trained.items()}
            run.note("gradients", torch.autograd.grad(loss(leaves), [*leaves.values()], allow_unused=True))
        elif kind == 1:
            run.note("gradients", torch.func.grad(loss)(trained))
        elif kind == 2:
            value, back = torch.func.vjp(loss, trained)
            run.note("vjp", (value, back(torch.ones_like(value))))
        else:
            many = {name: torch.stack([each, each * 2]) for name, each in trained.items()}
            run.note("mapped", torch.func.vmap(loss, randomness="different")(many))


def batched_gradients(run: Run) -> None:
    results = run.some(run.forward())
    of = run.some([*run.parameters(), *run.inputs])
    given = [run.drawn((3, *each.shape), each.dtype) for each in results]
    run.note("gradients", torch.autograd.grad(results, of, given, is_grads_batched=True, allow_unused=True))


def no_grad_island(run: Run) -> None:
    """Calls under `no_grad` and inference mode beside one that is trained."""
    batch = run.batch()
    with torch.no_grad():
        run.note("without a gradient", [each.requires_grad for each in run.forward(batch)])
        with torch.enable_grad():
            loss = run.loss(run.forward(batch))
    if run.random.random() < 0.5:
        detached = pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, batch)
        with torch.inference_mode():
            run.forward(detached)
    with torch.set_grad_enabled(run.random.random() < 0.5):
        loss.backward()


def data_parallel(run: Run) -> None:
    """DistributedDataParallel, with gloo, on one or two processes; rank 1 notes what it has, too."""
    world = run.random.choice((1, 2))
    finds, view = run.random.random() < 0.7, run.random.random() < 0.5
    with tempfile.TemporaryDirectory() as folder, _other_rank(run, world, Path(folder)) as rank:
        init_process_group("gloo", init_method=f"file://{folder}/{run.compiled}", rank=rank, world_size=world)
        try:
            run.random.seed(f"{run.seed} {rank}")
            run.call = DistributedDataParallel(
                run.call, find_unused_parameters=finds, gradient_as_bucket_view=view, broadcast_buffers=False
            )
            for _ in range(2):
                run.loss(run.forward(run.batch(sizes=run.model.sizes[0]))).backward()
            run.close()
        finally:
            destroy_process_group()


@contextmanager
def _other_rank(run: Run, world: int, folder: Path) -> Iterator[int]:
    """Rank 0 in this process, and 1 in a child, whose notes and error are taken over in the end."""
    if world == 1:
        yield 0
        return
    said = folder / "rank1"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            yield 1
            said.write_bytes(pickle.dumps(run.notes))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        yield 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.waitpid(child, 0)
    if not said.exists():
        raise RuntimeError("rank 1 failed, and rank 0 did not")
    run.notes += [(f"rank 1: {name}", value) for name, value in pickle.loads(said.read_bytes())]


STEPS: tuple[Callable[[Run], None], ...] = (
    *(subset_of_results, cotangents, retain_grad, gradient_of_a_result, autograd_grad, create_graph, second_backward),
    *(retain_graph, calls_in_any_order, backward_in_a_thread, optimizer_steps, grad_scaler, training_step),
    *(write_before_backward, write_to_a_result, functional_derivatives, torch_func, batched_gradients),
    *(no_grad_island, data_parallel),
)


# -- what is done around a step ---------------------------------------------------------------------------------------


def checkpointing(run: Run) -> None:
    # torch's own recursion does not end where forward returns a parameter, as `same` does.
    reentrant = run.random.random() < 0.2 and run.model.spec.name != "same"

    def wrap(call: Any) -> Any:
        def checkpointed(**batch: Any) -> Any:
            leaves, tree = pytree.tree_flatten(batch)
            return checkpoint(
                lambda *given: call(**pytree.tree_unflatten(given, tree)), *leaves, use_reentrant=reentrant
            )

        return checkpointed

    run.around.append(wrap)


def _other_strides(tensor: Tensor) -> Tensor:
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copied.copy_(tensor)


def _transposed_copy(tensor: Tensor) -> Tensor:
    return (
        tensor.detach().permute(*range(tensor.dim() - 1, -1, -1)).contiguous().permute(*range(tensor.dim() - 1, -1, -1))
    )


PACKINGS: tuple[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]], ...] = (
    (lambda tensor: tensor, lambda packed: packed),
    (lambda tensor: tensor.detach().clone(), lambda packed: packed),
    (lambda tensor: tensor.detach().numpy(force=True).copy(), torch.from_numpy),
    (_other_strides, lambda packed: packed),
    (_transposed_copy, lambda packed: packed),
    (lambda tensor: tensor.detach().to(torch.float64), lambda packed: packed),
)


def saved_tensor_hooks(run: Run) -> None:
    kind = run.random.randrange(len(PACKINGS) + 2)

    def wrap(call: Any) -> Any:
        def hooked(**batch: Any) -> Any:
            graph = torch.autograd.graph
            if kind < len(PACKINGS):
                hooks: Any = graph.saved_tensors_hooks(*PACKINGS[kind])
            else:
                hooks = graph.save_on_cpu() if kind == len(PACKINGS) else graph.disable_saved_tensors_hooks("disabled")
            with hooks:
                return call(**batch)

        return hooked

    run.around.append(wrap)


def hooks_on_inputs(run: Run) -> None:
    """Inputs that are results of other operators, whose gradient is changed by hooks."""

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        value = value * 1.0
        value.register_hook(lambda gradient: gradient * 0.5)
        return value

    run.around.append(lambda call: lambda **batch: call(**pytree.tree_map(changed, batch)))


def hooks_on_results(run: Run) -> None:
    def seen(gradient: Tensor) -> None:
        if not torch._C._functorch.is_legacy_batchedtensor(gradient):
            run.note("gradient of a result", gradient)

    def hooked(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: gradient * 2)
            value.register_hook(seen)
        return value

    run.around.append(lambda call: lambda **batch: pytree.tree_map(hooked, call(**batch)))


def hooks_on_parameters(run: Run) -> None:
    def halved(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def register() -> None:
        for each in run.some(run.parameters()):
            if run.random.random() < 0.5:
                each.register_hook(lambda gradient: gradient * 3)
            else:
                each.register_post_accumulate_grad_hook(halved)

    if run.random.random() < 0.5:
        run.later.append(register)
    else:
        register()


def _doubled(value: Any) -> Any:
    return pytree.tree_map(
        lambda each: each * 2 if isinstance(each, Tensor) and each.is_floating_point() else each, value
    )


MODULE_HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_hook": lambda module, args, result: _doubled(result),
    "register_forward_pre_hook": lambda module, args: None,
    "register_full_backward_hook": lambda module, inputs, results: _doubled(inputs),
    "register_full_backward_pre_hook": lambda module, results: _doubled(results),
}


def hooks_on_modules(run: Run) -> None:
    """On what is called, or on a part of the module."""
    name, of_part = run.random.choice([*MODULE_HOOKS]), run.random.random() < 0.5
    part = run.random.choice([name for name, _ in run.module.named_modules() if name] or [""])
    run.later.append(lambda: getattr(run.module.get_submodule(part) if of_part else run.call, name)(MODULE_HOOKS[name]))


def freezing(run: Run) -> None:
    """Parameters that are frozen before the load, after it or later, and may be thawed."""

    def freeze() -> None:
        for each in run.some(run.parameters()):
            each.requires_grad_(False)
            if run.random.random() < 0.5:
                run.between.append(partial(each.requires_grad_, True))

    run.random.choice((run.later.append, run.between.append, lambda act: act()))(freeze)


def earlier_gradients(run: Run) -> None:
    """Gradients to which those of the step are added: zeros of zero_grad(set_to_none=False), or of another step."""

    def begin() -> None:
        run.loss(run.forward()).backward()
        if run.random.random() < 0.5:
            run.module.zero_grad(set_to_none=run.random.random() < 0.3)

    run.later.append(begin)


def tied_weights(run: Run) -> None:
    """Two weights of the module become one."""
    places = [
        (module, name, each)
        for module in run.module.modules()
        for name, each in module.named_parameters(recurse=False)
        if each.dim()
    ]
    pairs = [
        (one, other)
        for place, one in enumerate(places)
        for other in places[place + 1 :]
        if one[2].shape == other[2].shape and one[2].requires_grad == other[2].requires_grad
    ]
    if pairs:
        one, other = run.random.choice(pairs)
        setattr(other[0], other[1], one[2])


def anomaly_mode(run: Run) -> None:
    run.later.append(lambda: torch.autograd.set_detect_anomaly(True))


def call_under_no_grad(run: Run) -> None:
    def look() -> None:
        with torch.no_grad():
            run.forward()

    run.later.append(look)


def other_autocast(run: Run) -> None:
    """The call within an autocast that the build did not have."""

    def wrap(call: Any) -> Any:
        def cast(**batch: Any) -> Any:
            with torch.autocast("cpu", torch.float16):
                return call(**batch)

        return cast

    if not run.wide:  # eager in float64 casts nothing: only a refusal is right, and what eager gives is not looked at
        run.around.append(wrap)


SETUPS: tuple[Callable[[Run], None], ...] = (
    *(checkpointing, saved_tensor_hooks, hooks_on_inputs, hooks_on_results, hooks_on_parameters, hooks_on_modules),
    *(freezing, earlier_gradients, tied_weights, anomaly_mode, call_under_no_grad, other_autocast),
)


# -- a case -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A model, a step and its setups; `name` is what everything else is drawn from."""

    name: str
    model: str
    step: Callable[[Run], None]
    setups: tuple[Callable[[Run], None], ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(each.__name__.strip("_") for each in (self.step, *self.setups))


class Outcome(NamedTuple):
    said: str
    detail: str = ""


def case_of(seed: int, number: int, models: Collection[str]) -> Case:
    """Each step in turn, so that a small number of cases has all of them."""
    random = Random(f"{seed} {number}")
    model = random.choice(sorted(models))
    setups = random.sample(SETUPS, random.choice((0, 1, 1, 2)))
    return Case(f"{seed} {number}", model, STEPS[number % len(STEPS)], tuple(setups))


def carry_out(case: Case, model: Model, store: Path | None, *, writes: bool = True) -> tuple[Run, Exception | None]:
    """In eager, or with the code in `store`."""
    run = Run(model, case.name, wide=store is None, writes=writes)
    try:
        for setup in case.setups:
            setup(run)
        if store is not None:
            run.load(store)
        for act in run.later:
            act()
        case.step(run)
        run.close()
    except Exception as error:
        return run, error
    finally:
        torch.autograd.set_detect_anomaly(False)
    return run, None


_WRITTEN = "modified by an inplace operation"


def try_case(case: Case, model: Model, store: Path) -> Outcome:
    """Both sides, in this process."""
    eager, eagers = carry_out(case, model, None)
    ours, error = carry_out(case, model, store)
    if eagers is not None and error is not None:
        return Outcome("as eager", f"{type(eagers).__name__}: {eagers}")
    if isinstance(error, aotc.AotcError):
        return Outcome("refused") if "hint: " in str(error) else Outcome("WRONG", f"no hint: {error}")
    if error is not None:
        if _WRITTEN in str(error) and case.step in (write_before_backward, write_to_a_result):
            return Outcome("refused")
        return Outcome("WRONG", f"{type(error).__name__}: {error}")
    if eagers is not None:
        eager, again = carry_out(case, model, None, writes=False)
        if again is not None:
            return Outcome("WRONG", f"eager refuses it ({type(eagers).__name__}: {eagers}), and ours does not")
        flaw = difference(eager.notes, ours.notes, model.dtype)
        return Outcome("as eager") if not flaw else Outcome("WRONG", f"where eager refuses the write: {flaw}")
    flaw = difference(eager.notes, ours.notes, model.dtype)
    return Outcome("WRONG", flaw) if flaw else Outcome("equal")


def difference(eager: Sequence[tuple[str, Any]], ours: Sequence[tuple[str, Any]], dtype: torch.dtype) -> str:
    """The first thing that was noted otherwise; "" where there is none."""
    if (names := [name for name, _ in eager]) != (own := [name for name, _ in ours]):
        return f"eager notes {names}, compiled code {own}"
    sizes = [_largest(leaf) for _, value in eager for leaf in pytree.tree_leaves(value)]
    least = max((1.0, *sizes)) * TOLERANCE[dtype] / 20
    for (name, one), (_, other) in zip(eager, ours, strict=True):
        (left, tree), (right, own_tree) = pytree.tree_flatten_with_path(one), pytree.tree_flatten_with_path(other)
        if tree != own_tree:
            return f"{name}: another structure"
        for (path, mine), (_, theirs) in zip(left, right, strict=True):
            if flaw := _differs(mine, theirs, TOLERANCE[dtype], least):
                return f"{name}{pytree.keystr(path)}: {flaw}"
    return ""


def _differs(eager: Any, ours: Any, relative: float, least: float) -> str:
    if not isinstance(eager, Tensor) or not isinstance(ours, Tensor):
        if type(eager) is type(ours) is float:
            return "" if eager == ours or abs(eager - ours) <= relative * abs(eager) else f"eager {eager}, ours {ours}"
        if isinstance(eager, Tensor) or isinstance(ours, Tensor):
            return f"eager {_shown(eager)}, ours {_shown(ours)}"
        return "" if eager == ours else f"eager {eager!r}, ours {ours!r}"
    if (eager.shape, eager.layout) != (ours.shape, ours.layout):
        return f"eager {_shown(eager)}, ours {_shown(ours)}"
    if eager.is_floating_point() != ours.is_floating_point():
        return f"eager is of {eager.dtype}, ours of {ours.dtype}"
    if not eager.numel():
        return ""
    one, other = (
        each.to_dense().to(torch.complex128 if each.is_complex() else torch.float64) for each in (eager, ours)
    )
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return "eager is finite where ours is not, or the reverse"
    error = (one - other)[finite].abs()
    allowed = relative * _largest(eager) + least if eager.is_floating_point() else 0.0
    if error.numel() and float(error.max()) > allowed:
        return f"they differ by {float(error.max()):.3g} of {_largest(eager):.3g}"
    return ""


def _largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    dense = value.to_dense()
    return float(torch.where(dense.isfinite(), dense.abs(), 0).max())


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    zeros = " of zeros" if value.is_floating_point() and not value.to_dense().any() else ""
    return f"a {str(value.layout).removeprefix('torch.')} tensor {list(value.shape)}{zeros}"


# -- children ---------------------------------------------------------------------------------------------------------


def try_all(
    cases: Sequence[Case], models: Mapping[str, Model], store: Path, jobs: int
) -> Iterator[tuple[Case, Outcome]]:
    """Each case in a forked child, `jobs` at a time."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    waiting, running = collections.deque(cases), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.popleft()
                said = Path(folder) / case.name.replace(" ", "-")
                running[_start(case, models[case.model], store, said)] = case, said, time.monotonic()
            done, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
            if done in running:
                case, said, _ = running.pop(done)
                yield case, _outcome(said, status)
                continue
            time.sleep(0.005)
            for child, (_, said, began) in running.items():
                if time.monotonic() - began > HANGS and not said.exists():
                    said.write_text(json.dumps(Outcome("WRONG", "does not end")))
                    os.killpg(child, signal.SIGKILL)


def _start(case: Case, model: Model, store: Path, said: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        quiet = os.open(f"{said}.log", os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(quiet, stream)
        warnings.simplefilter("ignore")
        said.write_text(json.dumps(try_case(case, model, store)))
    except BaseException as error:
        said.write_text(json.dumps(Outcome("WRONG", f"the case itself: {type(error).__name__}: {error}")))
    finally:
        os._exit(0)


def _outcome(said: Path, status: int) -> Outcome:
    if said.exists():
        return Outcome(*json.loads(said.read_text()))
    return Outcome("WRONG", f"the process died: {os.waitstatus_to_exitcode(status)}")


# -- the table --------------------------------------------------------------------------------------------------------


def build(store: Path) -> dict[str, str]:
    """Builds the manifests. Returns why each model that was not built was refused."""
    refused = {}
    for manifest in MANIFESTS:
        command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", str(store), "--json"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for unit in json.loads(ran.stdout)["units"]:
            if unit["status"] == "failed":
                refused[unit["model"]] = unit["error"]
    return refused


def shown_table(tried: Sequence[tuple[Case, Outcome]]) -> str:
    columns = ("equal", "refused", "as eager", "WRONG")
    counts: dict[str, collections.Counter[str]] = {each.__name__: collections.Counter() for each in (*STEPS, *SETUPS)}
    for case, outcome in tried:
        for kind in case.kinds:
            counts[kind][outcome.said] += 1
    counts["all cases"] = collections.Counter(outcome.said for _, outcome in tried)
    lines = [f"| use | tried | {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) + 1)}"]
    for kind, said in counts.items():
        numbers = " | ".join(str(said[column]) for column in columns)
        lines.append(f"| {kind.replace('_', ' ')} | {said.total()} | {numbers} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path, help="where the models are built, or were")
    parser.add_argument("--models", default=",".join(models_of()), help="of which cases are drawn")
    parser.add_argument("--only", default="", help="of these cases, those of some kinds of use or models")
    parser.add_argument("--verbose", action="store_true", help="also what eager refuses")
    parser.add_argument("--no-build", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = (asked.store or Path(folder) / "store").absolute()
        os.environ["AOTC_CACHE_DIR"] = str(Path(folder) / "cache")
        refused = {} if asked.no_build else build(store)
        models, built = models_of(), (store / "index.json").read_text()
        for name, why in refused.items():
            print(f"{name}: not built: {why}")
        cases = [case_of(asked.seed, asked.first + number, asked.models.split(",")) for number in range(asked.count)]
        if asked.only:
            wanted = set(asked.only.split(","))
            cases = [case for case in cases if wanted & {case.model, *case.kinds}]
        cases = [case for case in cases if f'"{case.model}:latest"' in built]
        if asked.count == 1:
            (case,) = cases
            print(case.model, *case.kinds)
            for side in (None, store):
                run, error = carry_out(case, models[case.model], side)
                print("eager" if side is None else "ours", *(name for name, _ in run.notes))
                if error is not None:
                    traceback.print_exception(error)
        tried = []
        for case, outcome in try_all(cases, models, store, asked.jobs):
            tried.append((case, outcome))
            if outcome.said == "WRONG" or (asked.verbose and outcome.detail):
                print(f"{case.name}: {case.model}: {', '.join(case.kinds)}: {outcome.detail[:400]}", flush=True)
    print(shown_table(tried))
    return int(any(outcome.said == "WRONG" for _, outcome in tried))


if __name__ == "__main__":
    sys.exit(main())
