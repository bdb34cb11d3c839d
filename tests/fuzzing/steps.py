"""Steps of `uses.py`: each trains in a way of its own, and notes what a user can see of it."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzzing.used import Run
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import aotc


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


def backward_of_some(run: Run) -> None:
    """Gradients of some leaves alone are added."""
    results = run.forward()
    of = [each for each in run.some([*run.parameters(), *run.inputs]) if each.is_leaf and each.requires_grad]
    run.loss(results).backward(inputs=of or None)


def hook_on_many(run: Run) -> None:
    """One hook on several parameters, that has all their gradients or the first."""
    of = [each for each in run.parameters() if each.requires_grad]
    first = run.random.random() < 0.3

    def seen(found: Any) -> None:
        run.note("gradients of parameters", "one" if first else [*found])

    results = run.forward()
    if of:
        torch.autograd.graph.register_multi_grad_hook(of, seen, mode="any" if first else "all")
    run.loss(results).backward()


def optimizer_in_backward(run: Run) -> None:
    """Each parameter has an optimizer of its own, whose step is a hook after its gradient is there."""
    for each in run.parameters():
        if each.requires_grad:
            optimizer = torch.optim.SGD([each], lr=0.01, momentum=0.9)

            def step(parameter: Tensor, own: torch.optim.Optimizer = optimizer) -> None:
                own.step()
                own.zero_grad()

            each.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        run.loss(run.forward()).backward()


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
    *(backward_of_some, hook_on_many, optimizer_in_backward),
    *(retain_graph, calls_in_any_order, backward_in_a_thread, optimizer_steps, grad_scaler, training_step),
    *(write_before_backward, write_to_a_result, functional_derivatives, torch_func, batched_gradients),
    *(no_grad_island, data_parallel),
)
