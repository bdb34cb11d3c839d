"""What forward reads outside its module: which names, and what they are in a process. Nothing is compiled."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sympy
import torch
from torch import nn

from aotc.compiler.capture.analysis.outside_reads import OutsideReads, _is_of_model, outside_reads
from aotc.errors import BuildError
from aotc.reads.outside import ABSENT, Outside, changed_names

SETTINGS = """
LAYERS = []
KNOWN = {"a": 1}
LIMIT = 4
SEEN = {}


class Switch:
    on, unread = True, 0


SWITCH = Switch()


def scaled(x, by=1.25):
    return x * by


def closed(gain):
    return lambda x: x * gain


doubled = closed(2.0)
"""
MODEL = """
import datetime
import os
import time
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F
import {settings} as settings
from {settings} import KNOWN, SEEN, SWITCH, doubled, scaled

EPSILON = 1e-5
UNREAD = 7


class Block(nn.Module):
    kind = "plain"

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)

    @classmethod
    def width(cls):
        return 2

    def _mix(self, x):
        return x + EPSILON

    def forward(self, x):
        SEEN["last"] = 1
        x = F.relu(self._mix(self.a(x))) * len(settings.LAYERS) + settings.LIMIT + KNOWN["a"] + SWITCH.on
        x = doubled(scaled(x)) * self.width()
        if os.environ.get("BLOCK_MODE", "") == "x" or "BLOCK_OTHER" in os.environ:
            x = x - 1
        return x


class Timed(Block):
    def forward(self, x):
        return x + time.time() + perf_counter() + datetime.datetime.now().year
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = f"outside_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}_settings.py").write_text(SETTINGS)
    (tmp_path / f"{name}.py").write_text(MODEL.format(settings=f"{name}_settings"))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


def reads_of(module: nn.Module, *inputs: Any) -> OutsideReads:
    with torch.no_grad(), outside_reads(module) as reads:
        module(*inputs)
    assert sys.getprofile() is None
    return reads


def test_the_names_are_those_that_the_functions_which_ran_read(model: ModuleType) -> None:
    reads = reads_of(model.Block(), torch.ones(1, 2))
    own, settings = model.__name__, f"{model.__name__}_settings"
    names = {name.partition(":")[2] for name in reads.names if name.startswith(f"{own}:")}
    assert names >= {"EPSILON", "KNOWN", "SWITCH", "SWITCH.on", "scaled", "doubled", "settings", "Block._mix", "F"}
    assert not names & {"UNREAD", "SWITCH.unread", "Timed"}
    assert {f"{settings}:LAYERS", f"{settings}:LIMIT", "torch.nn.functional:relu"} <= reads.names
    assert {"$BLOCK_MODE", "$BLOCK_OTHER"} <= reads.names
    assert {"torch.nn.modules.linear:Linear.forward", "torch.nn.functional:linear"} <= reads.names
    assert "Block._mix" in reads.attributes and "Block.width" in reads.attributes


def test_what_forward_itself_changes_is_told_and_not_compared(model: ModuleType) -> None:
    reads = reads_of(model.Block(), torch.ones(1, 2))
    assert f"{model.__name__}:SEEN" not in reads.names
    (note,) = reads.notes
    assert f"the global variable `SEEN` at {model.__name__}.py:" in note and "which it also changes" in note


def test_clocks_are_told(model: ModuleType) -> None:
    notes = reads_of(model.Timed(), torch.ones(1, 2)).notes
    assert [note.split("`")[1] for note in notes] == ["time.time", "time.perf_counter", "datetime.now"]
    assert all("the time of the build is compiled in" in note for note in notes)


def set_default(function: Any) -> None:
    function.__defaults__ = (9.0,)


CHANGES: dict[str, tuple[str, Callable[[ModuleType, ModuleType], object]]] = {
    "a number": ("{model}:EPSILON", lambda model, settings: setattr(model, "EPSILON", 1)),
    "True for 1": ("{settings}:KNOWN", lambda model, settings: settings.KNOWN.update(a=True)),
    "an entry": ("{model}:KNOWN", lambda model, settings: settings.KNOWN.update(b=2)),
    "an attribute of an object": ("{model}:SWITCH.on", lambda model, settings: setattr(settings.SWITCH, "on", False)),
    "a class attribute": ("{model}:Block.kind", lambda model, settings: setattr(model.Block, "kind", "other")),
    "a default": ("{model}:scaled", lambda model, settings: set_default(settings.scaled)),
    "a closure": ("{model}:doubled", lambda model, settings: setattr(model, "doubled", settings.closed(3.0))),
    "a function of torch": ("torch.nn.functional:relu", lambda model, settings: None),
    "a variable": ("$BLOCK_MODE", lambda model, settings: os.environ.update(BLOCK_MODE="y")),
    "a name that is gone": ("{model}:EPSILON", lambda model, settings: delattr(model, "EPSILON")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_that_changes_differs(model: ModuleType, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    settings = sys.modules[f"{model.__name__}_settings"]
    monkeypatch.setenv("BLOCK_MODE", "x")
    text, make = CHANGES[change]
    name = text.format(model=model.__name__, settings=settings.__name__)
    module = model.Block()
    before = Outside(module).values([name, f"{settings.__name__}:LAYERS"])
    if name == "torch.nn.functional:relu":
        monkeypatch.setattr(torch.nn.functional, "relu", functools.partial(torch.clamp, min=0))
    make(model, settings)
    after = Outside(module).values(before)
    aliases = {name, *([f"{model.__name__}:KNOWN"] if "KNOWN" in name else [])}
    assert {each for each, *_ in changed_names(before, after)} <= aliases
    assert name in {each for each, *_ in changed_names(before, after)}
    assert (after[name] == ABSENT) is (change == "a name that is gone")


def test_a_secret_is_in_no_record(model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCK_MODE", "hunter2")
    assert "hunter2" not in str(Outside(model.Block()).values(["$BLOCK_MODE"]))
    monkeypatch.delenv("BLOCK_MODE")
    assert Outside(model.Block()).values(["$BLOCK_MODE"]) == {"$BLOCK_MODE": None}


def test_a_module_that_is_not_imported_is_not_compared(model: ModuleType) -> None:
    assert Outside(model.Block()).values(["never.imported:X"]) == {}


def test_what_a_lazy_module_has_not_imported_is_not_compared(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `transformers.StaticCache` in a process that has not asked for it: the build's forward did."""

    class Lazy(ModuleType):
        def __dir__(self) -> list[str]:
            return ["offered", *super().__dir__()]

    monkeypatch.setitem(sys.modules, "lazy_package", lazy := Lazy("lazy_package"))
    names = ["lazy_package:offered", "lazy_package:gone"]
    assert Outside(model.Block()).values(names) == {names[1]: ABSENT}
    vars(lazy)["offered"] = 3
    assert Outside(model.Block()).values(names) == {names[0]: 3, names[1]: ABSENT}


def test_a_name_that_another_version_of_torch_had_is_none_of_this_one(model: Any) -> None:
    """Code of torch reads it, which is not the model's. Of the model's own, it is gone."""
    names = ["torch._C._nn:upsample_of_another_version", f"{model.__name__}:GONE"]
    assert Outside(model.Block()).values(names) == {names[1]: ABSENT}


def test_a_package_whose_name_begins_like_a_compilers_is_the_models() -> None:
    folder = Path(sympy.__file__).parent
    assert not _is_of_model(str(folder / "core" / "add.py"))
    assert _is_of_model(f"{folder}_kernels/model.py")


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            x = x + 1
        if self.w.requires_grad and not x.requires_grad:
            x = x * 2
        return x + torch.zeros(2) + torch.zeros(2, device=x.device)


def test_modes_that_forward_asks_for_are_noted_and_no_others() -> None:
    assert reads_of(Asking(), torch.ones(2)).asked == {
        "grad": False,
        "inference": False,
        "device": "cpu",
        "requires_grad of w": True,
        "requires_grad": False,
    }
    assert reads_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.ones(1, 2)).asked == {}


class Seeding(nn.Module):
    def __init__(self, seed: Callable[[], object]) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seed()
        return x + torch.rand(2)


@pytest.mark.parametrize("seed", [lambda: torch.manual_seed(0), lambda: torch.Generator().manual_seed(0)])
def test_a_forward_that_seeds_a_generator_is_refused_with_its_line(seed: Callable[[], object]) -> None:
    with pytest.raises(BuildError, match="forward seeds a generator") as raised, outside_reads(Seeding(seed)):
        Seeding(seed)(torch.ones(2))
    assert Path(__file__).name in raised.value.source


def test_a_plain_model_reads_nothing_that_could_change_but_torch() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2).eval()
    reads = reads_of(encoder, torch.ones(1, 2, 8))
    assert reads.notes == []
    values = {str(value) for value in Outside(encoder).values(reads.names).values()}
    rest = {value for value in values if not any(name in value for name in ("builtins.", "torch", "warnings"))}
    assert rest <= {"math.sqrt"}


def test_what_watches_the_garbage_collector_is_not_the_model() -> None:
    class Collecting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gc.collect(0)
            return x

    def watch(phase: str, info: dict[str, int]) -> None:
        time.time()

    gc.callbacks.append(watch)
    try:
        assert reads_of(Collecting(), torch.ones(2)).notes == []
        assert watch in gc.callbacks
    finally:
        gc.callbacks.remove(watch)


COMPILER = """
import os, time

def compile_kernel():
    return LEVEL + time.time() + len(os.environ.get("COMPILER_LEVEL", ""))
"""


class Launching(nn.Module):
    def __init__(self, launch: Callable[[], float]) -> None:
        super().__init__()
        self.launch = launch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.launch()
        return x + 1


@pytest.mark.parametrize("file, is_told", [(Path(sympy.__file__).parent / "launch.py", False), ("launch.py", True)])
def test_what_a_compiler_reads_while_a_kernel_is_launched_is_not_the_model_s(file: Path | str, is_told: bool) -> None:
    variables: dict[str, Any] = {"__name__": "launch", "LEVEL": 3}
    exec(compile(COMPILER, str(file), "exec"), variables)
    reads = reads_of(Launching(variables["compile_kernel"]), torch.ones(1))
    assert ({"launch:LEVEL", "$COMPILER_LEVEL"} <= reads.names) is is_told
    assert ("$COMPILER_LEVEL" in reads.names) is ("launch:LEVEL" in reads.names) is bool(reads.notes) is is_told
