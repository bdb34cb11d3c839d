"""The same calls through the extension and through Python: python tests/fuzzing/native_calls.py STEPS [SEED]

Two callables of one artifact, one of which has the extension, get the same arguments, modes and changes of their
modules. Both must give the same results, or the same errors.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
from fuzzing import native_models
from fuzzing.native_models import Blocks, Called, CallingBack, Pair, Single, Structured, Writing, frozen_pair
from processes import ROOT
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import aotc
from aotc.runtime.stats import Stats

CLASSES: dict[str, Callable[[], nn.Module]] = {
    "called": Called,
    "pair": Pair,
    "blocks": Blocks,
    "frozen": frozen_pair,
    "padded": CallingBack,
    "writing": Writing,
    "trained": Pair,
    "structured": Structured,
    "single": Single,
}


class Other(Tensor):
    pass


class Both:
    """A module and its copy, and a callable of each."""

    def __init__(self, store: Path, name: str) -> None:
        torch.manual_seed(0)
        first = CLASSES[name]().train(name == "trained")
        second = CLASSES[name]().train(name == "trained")
        second.load_state_dict(first.state_dict())
        self.modules: list[Any] = [first, second]
        ref = f"{store}#{name}"
        with patch.dict(os.environ, {"AOTC_NATIVE_CALL": "1"}):
            self.calls = [aotc.load(ref, first)]
        with patch.dict(os.environ, {"AOTC_NATIVE_CALL": "0"}):
            self.calls.append(aotc.load(ref, second))
        assert None not in natives(self.calls[0])
        assert {*natives(self.calls[1])} == {None}
        self.undo: list[Callable[[], None]] = []
        self.left: list[Any] = []


def untimed(call: Any) -> Stats:
    """The counters, without how long calls took: each was timed."""
    stats: Stats = call.stats()
    for bucket in stats.buckets.values():
        assert sum(bucket.spans) == bucket.calls and (bucket.seconds > 0) == (bucket.calls > 0)
        bucket.seconds, bucket.spans = 0.0, ()
    return stats


def natives(call: Any) -> list[Any]:
    """The extension of a callable, or that of each region."""
    regions = getattr(call, "regions", {"": call.forward})
    return [each.native for each in regions.values()]


def ran(call: Any) -> int:
    """How many calls the extension has made."""
    return sum(row[0] for native in natives(call) for row in (native.counts() if native is not None else ()))


# -- arguments --------------------------------------------------------------------------------------------------------


def wrong(tensor: Tensor, draw: random.Random) -> Any:
    """The tensor in another form, or none."""
    return draw.choice(
        [
            lambda: tensor.double(),
            lambda: tensor.to(torch.int64),
            lambda: tensor.T.contiguous().T,
            lambda: torch.stack([tensor, tensor], -1)[..., 0],
            lambda: tensor[:, :1],
            lambda: tensor[None],
            lambda: tensor.sum(0),
            lambda: tensor[:0],
            lambda: tensor.to("meta"),
            lambda: tensor.as_subclass(Other),
            lambda: tensor.to_sparse(),
            lambda: nn.Parameter(tensor, requires_grad=draw.random() < 0.5),
            lambda: tensor.clone().requires_grad_(),
            lambda: tensor.to(torch.complex64),
            lambda: torch._neg_view(tensor),
            lambda: torch.complex(tensor, tensor).conj().imag,
            lambda: torch._efficientzerotensor(tensor.shape),
            lambda: torch.cat([tensor, tensor])[: len(tensor)],
            lambda: torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape),
            lambda: torch._lazy_clone(tensor),
            lambda: torch.empty(0),
            lambda: None,
            lambda: 3,
            lambda: [tensor],
            lambda: tensor.numpy(),
            lambda: tensor.to_mkldnn(),
            lambda: torch.nested.nested_tensor([tensor]),
            lambda: inference(tensor),
        ]
    )()


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def usual_arguments(name: str, batch: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of which nothing is unusual."""
    if name == "single":
        return [torch.rand(1, 4)], {}
    x, other = torch.rand(batch, 4), torch.rand(batch, 2)
    if name != "structured":
        return [x, other], {}
    table = {"scale": torch.rand(batch, 4), "shift": other}
    return [x, [x + 1, x + 2], table, (3, x)], {"positive": True, "output_attentions": None, "return_dict": None}


def in_any_order(table: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    return dict(draw.sample([*table.items()], len(table))) if draw.random() < 0.1 else table


class Table(dict[str, Any]):
    pass


def structured(batch: int, draw: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """A list, a table, several keyword arguments and a tensor that may be left out; some of them of another form."""

    def tensor(width: int) -> Any:
        made = torch.rand(batch, width)
        return wrong(made, draw) if draw.random() < 0.03 else made

    pair: Any = [tensor(4), tensor(4)]
    table: Any = in_any_order({"scale": tensor(4), "shift": tensor(2)}, draw)
    if draw.random() < 0.1:
        pair = draw.choice([tuple(pair), pair[:1], [*pair, pair[0]], torch.Size([2, 4]), None, {"0": pair[0]}])
    if draw.random() < 0.1:
        table = draw.choice([Table(table), {}, None, {**table, "more": 1}, {1: tensor(4), "shift": tensor(2)}, [table]])
    options = {"positive": True, "output_attentions": None, "return_dict": None}
    if draw.random() < 0.1:
        options[draw.choice([*options, "unknown"])] = draw.choice([True, False, None, 1, "x"])
    if draw.random() < 0.05:
        options.pop(draw.choice([*options]))
    at: Any = (3, tensor(4))
    if draw.random() < 0.1:
        at = draw.choice([[*at], at[:1], (3.0, at[1]), (4, at[1]), None, torch.Size([3, 4])])
    kwargs = {"table": table, "at": at, **in_any_order(options, draw)}
    if draw.random() < 0.5:
        kwargs["mask"] = draw.choice([None, tensor(4), tensor(4)])
    return [tensor(4), pair], in_any_order(kwargs, draw)


def arguments(name: str, draw: random.Random) -> tuple[list[Any], dict[str, Any]]:
    batch = draw.choice([2, 2, 2, 2, 4, 5, 5, 9, 9, 1, 10, 0])
    if name == "structured":
        return structured(batch, draw)
    if name == "single":
        given = draw.choice([torch.rand(1, 4), torch.rand(6, 4)[1:2], torch.rand(6, 4)[::6], torch.rand(4, 1).T])
        return [wrong(given, draw) if draw.random() < 0.3 else given], {}
    args: list[Any] = [torch.rand(batch, 4), torch.rand(batch, 2)]
    kwargs: dict[str, Any] = {}
    if draw.random() < 0.25:
        args[0] = wrong(args[0], draw) if draw.random() < 0.5 else args[0]
        args[1] = wrong(args[1], draw) if draw.random() < 0.5 else args[1]
    if draw.random() < 0.15:
        kwargs["other"] = args.pop()
    if draw.random() < 0.1:
        kwargs[draw.choice(["power", "flag", "x", "unknown"])] = draw.choice([2, 2.0, True, False, None, "2", 3])
    if draw.random() < 0.1 and len(args) == 2:
        args.append(draw.choice([2, 2.0, True, None, 3]))
    if draw.random() < 0.02:
        args.pop()
    return args, kwargs


def with_tangent(given: Any) -> Any:
    if type(given) is not Tensor or not given.is_floating_point() or not has_bytes(given):
        return given
    return forward_ad.make_dual(given, torch.ones_like(given))


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


MODES: list[Callable[[], Any]] = [
    torch.enable_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu"),
    lambda: torch.autocast("cpu", dtype=torch.float16),
    lambda: torch.autocast("cpu", enabled=False),
    lambda: torch.device("cpu"),
    lambda: torch.device("meta"),
    FunctionMode,
    torch.autograd.forward_ad.dual_level,
    lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, torch.get_num_threads() > 0
    ),
    torch.no_grad,
]


# -- changes ----------------------------------------------------------------------------------------------------------


def change(both: Both, draw: random.Random) -> None:
    """The same change of both modules; what undoes it is noted."""
    kind, number = draw.randrange(16), draw.random()
    key = draw.choice(list(both.modules[0].state_dict()))
    if kind == 14:
        native_models.FACTOR = draw.choice([2.0, 7.0])
        both.undo.append(lambda: setattr(native_models, "FACTOR", 2.0))
        return
    for module, call in zip(both.modules, both.calls, strict=True):
        owner = module.get_submodule(key.rpartition(".")[0])
        name = key.rpartition(".")[2]
        table = owner._parameters if name in owner._parameters else owner._buffers
        old = table[name]
        linear = next(part for part in module.modules() if isinstance(part, nn.Linear))
        if kind == 0:
            with torch.no_grad():
                old.mul_(1 + number)
        elif kind == 1:
            new = torch.full_like(old, number)
            setattr(owner, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
        elif kind == 2:
            both.undo.append(lambda old=old, data=old.data: setattr(old, "data", data))
            old.data = torch.full_like(old.data, number)
        elif kind == 3:
            setattr(owner, name, nn.Parameter(old.double()) if isinstance(old, nn.Parameter) else old.double())
            both.undo.append(lambda table=table, name=name, old=old: table.__setitem__(name, old))
        elif kind == 4:
            part = draw_part(module, number)
            part.training = not part.training
            both.undo.append(lambda part=part: setattr(part, "training", not part.training))
        elif kind == 5:
            handle = linear.register_forward_hook(lambda *_: None)
            both.undo.append(handle.remove)
        elif kind == 6 and hasattr(module, "scale"):
            module.scale = [3.0, 3, 4.0][int(number * 3)]
            both.undo.append(lambda module=module: setattr(module, "scale", 3.0))
        elif kind == 7 and hasattr(module, "part"):
            module.part.steps[0] += 1
            both.undo.append(lambda module=module: module.part.steps.__setitem__(0, module.part.steps[0] - 1))
        elif kind == 8 and hasattr(module, "table"):
            module.table["shift"] = [0.5, 1.5][int(number * 2)]
            both.undo.append(lambda module=module: module.table.__setitem__("shift", 0.5))
        elif kind == 9:
            module.extra = 3
            both.undo.append(lambda module=module: module.__dict__.pop("extra", None))
        elif kind == 10:
            with contextlib.suppress(aotc.AotcError):
                call.refresh()
        elif kind == 11:
            with contextlib.suppress(aotc.AotcError):
                call.update_weights({key: torch.full(old.shape, number)})
        elif kind == 12:
            linear.forward = other_forward
            both.undo.append(lambda linear=linear: linear.__dict__.pop("forward", None))
        elif kind == 13:
            old.requires_grad_(not old.requires_grad)
        elif kind == 15:
            linear.register_parameter("bias", linear.bias)


def other_forward(x: Tensor) -> Tensor:
    return x * 2


def draw_part(module: nn.Module, number: float) -> nn.Module:
    parts = list(module.modules())
    return parts[int(number * len(parts))]


# -- both ways --------------------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def outcomes(both: Both, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What each call gave, and what it left in its arguments; both begin with the same."""
    memory = [each.untyped_storage() for each in pytree.tree_leaves((args, kwargs)) if has_bytes(each)]
    before, found = [storage.clone() for storage in memory], []
    for call, module in zip(both.calls, both.modules, strict=True):
        for storage, data in zip(memory, before, strict=True):
            storage.copy_(data)
        found.append(outcome(call, module, args, kwargs))
        both.left.append([storage.tolist() for storage in memory])
    return found


def has_bytes(given: Any) -> bool:
    if not isinstance(given, Tensor) or given.is_nested or given.layout is not torch.strided:
        return False
    return given.device.type == "cpu" and not given._is_zerotensor()


def outcome(call: Any, module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The results, with the gradients of the module's parameters."""
    try:
        results = call.forward(*args, **kwargs)
        trained = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
        if not trained:
            return results
        gradients = torch.autograd.grad(
            sum(each.sum() for each in trained), [*module.parameters()], allow_unused=True, materialize_grads=True
        )
        return [*results, *gradients]
    except Exception as error:
        return type(error), _ADDRESS.sub("0x", str(error))


def same(one: Any, other: Any, given: list[Any]) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if any(one is each for each in given) or any(other is each for each in given):
            return one is other
        if any(each.is_nested or each.is_meta or each.layout is not torch.strided for each in (one, other)):
            return repr(one) == repr(other)
        forms = [(t.dtype, t.shape, t.stride(), t.requires_grad, t.is_inference(), t.device) for t in (one, other)]
        return forms[0] == forms[1] and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key], given) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b, given) for a, b in zip(one, other, strict=True))
    return repr(one) == repr(other)


def fuzz(store: Path, steps: int, seed: int = 0, only: str = "") -> Counter[str]:
    """Make so many calls both ways. Returns how many ran in the extension, ran in Python, and were refused.

    Raises AssertionError at the first that differs.
    """
    logging.getLogger("aotc").setLevel(logging.ERROR)
    draw, counted = random.Random(seed), Counter[str]()
    torch.manual_seed(seed)
    pairs = {name: Both(store, name) for name in CLASSES}
    name, make_mode = "called", torch.no_grad
    for step in range(steps):
        if step % 40 == 0:
            name = only or draw.choice([*CLASSES])
        both = pairs[name]
        if draw.random() < 0.05:
            change(both, draw)
        elif both.undo and draw.random() < 0.8:
            for undo in reversed(both.undo):
                undo()
            both.undo.clear()
        args, kwargs = arguments(name, draw)
        usual = torch.enable_grad if name == "trained" else torch.no_grad
        if draw.random() < 0.4:  # else as in the step before: the extension may be armed in any mode
            make_mode = draw.choice(MODES) if draw.random() < 0.3 else usual
        mode = make_mode()
        before = ran(both.calls[0])
        with torch.no_grad(), mode:
            if forward_ad._current_level >= 0 and draw.random() < 0.5:
                args = [with_tangent(each) for each in args]
            found = outcomes(both, args, kwargs)
        one, other = both.left
        both.left.clear()
        assert one == other, f"step {step} of {seed}, {name}: {args} {kwargs} {mode}: {one} was left, and {other}"
        assert same(*found, pytree.tree_leaves((args, kwargs))), (
            f"step {step} of {seed}, {name}: {args} {kwargs} {mode}: {found}"
        )
        by_native = ran(both.calls[0]) - before
        refused = isinstance(found[0], tuple) and isinstance(found[0][0], type)
        counted["extension" if by_native else "refused" if refused else "Python"] += 1
        assert untimed(both.calls[0]) == untimed(both.calls[1]), f"step {step} of {seed}: counters"
        if refused and draw.random() < 0.02:  # a module of which the change stays would be refused for ever
            native_models.FACTOR = 2.0
            pairs[name] = Both(store, name)
    return counted


def build(store: Path) -> None:
    """Raises CalledProcessError."""
    command = [sys.executable, "-m", "aotc", "build", str(ROOT / "tests" / "fuzzing" / "native.yaml"), "--store", store]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--store", type=Path, help="one that it has built before")
    parser.add_argument("--model", choices=CLASSES, default="", help="of this one alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.store is None:
            build(Path(folder))
        print(dict(fuzz(options.store or Path(folder), options.steps, options.seed, options.model)))
