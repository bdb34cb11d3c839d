"""What forward does in its trace alone is told: printing, drawing from generators that compiled code does not have."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

from aotc.compiler.capture.facts.build_only import build_only_effects
from aotc.compiler.capture.facts.outside_reads import outside_reads


def forward(x: torch.Tensor) -> torch.Tensor:
    print("seen", x.shape)
    return x + 1 if random.random() < 2 else x


def test_a_print_and_a_random_branch_are_told_once() -> None:
    with build_only_effects() as effects:
        torch.export.export(Forward(), (torch.ones(2),))
        forward(torch.ones(2))
    printed, drawn = effects
    line = forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} " in printed and "Python's `random`" in drawn


def test_a_model_that_does_neither_is_told_nothing() -> None:
    with build_only_effects() as effects:
        torch.export.export(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()), (torch.ones(2, 2),))
    assert effects == []


class Forward(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return forward(x)


SETTINGS = """
LAYERS = []
KNOWN = {"a": 1}
MADE = [n for n in range(3)]
MADE.append(9)
LIMIT = 4

def register(name):
    NAMES_OF[name] = 1
    LAYERS.append(name)

def set_limit(value):
    global LIMIT
    LIMIT = value

def unrelated(KNOWN):
    KNOWN.update(b=2)

NAMES_OF = {}
"""
MODEL = """
import datetime
import time
from time import perf_counter

import torch
import {name}_settings as settings
from {name}_settings import KNOWN, NAMES_OF

EPSILON = 1e-5
DEPTH = [1, 2]


def forward(x):
    x = x * len(settings.LAYERS) + settings.LIMIT
    x = x + len(NAMES_OF) + KNOWN["a"] + len(settings.MADE) + EPSILON
    x = x + len(DEPTH)
    return x + time.time() + perf_counter() + datetime.datetime.now().year
"""


def test_clocks_and_global_variables_that_may_change_are_told_and_constants_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"outside_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}_settings.py").write_text(SETTINGS)
    (tmp_path / f"{name}.py").write_text(MODEL.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module(name)

    def told() -> dict[str, str]:
        with outside_reads() as notes:
            model.forward(torch.ones(2))
        return {note.split("`")[1]: note for note in notes}

    found = told()
    clocks = {"time.time", "time.perf_counter", "datetime.now"}
    assert found.keys() == {"LAYERS", "LIMIT", "NAMES_OF"} | clocks
    assert f"`LAYERS` of {name}_settings.py at {name}.py:15, which other code may change" in found["LAYERS"]
    assert all(f"at {name}.py:18: the time of the build is compiled in" in found[clock] for clock in clocks)
    model.DEPTH.append(3)  # by other code: the source has another value
    assert told().keys() - found.keys() == {"DEPTH"}
    assert sys.getprofile() is None


def test_a_plain_model_reads_nothing_outside() -> None:
    with outside_reads() as notes:
        torch.nn.TransformerEncoderLayer(8, 2).eval()(torch.ones(1, 2, 8))
    assert notes == []
