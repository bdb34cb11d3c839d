"""What a unit's processes say to the build, whole and cut off."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from aotc.compiler.messages import Autotuned, Doing, Message, Span, UnitCompiled, UnitFailed, UnitRan
from aotc.compiler.workers.unit_process import _follow
from aotc.errors import Issue
from aotc.provenance import Smoked

DOING, SPAN = Doing("compile", "lowering"), Span("lowering", "lowering", 1.0, 2.0, memory=3)
REPLIES = [
    UnitCompiled(Autotuned(pinned=2)),
    UnitRan(Smoked()),
    UnitFailed("no", "try", "export", "m.py:1", (Issue("x"),)),
]


class Process:
    def __init__(self, text: str, status: int = 0) -> None:
        self.stdout, self.status = io.StringIO(text), status

    def wait(self) -> int:
        return self.status


def line(said: Any) -> str:
    return msgspec.json.encode(Message(said)).decode() + "\n"


@pytest.mark.parametrize("reply", REPLIES)
def test_what_is_said_arrives_as_it_was(reply: Any) -> None:
    told: list[Any] = []
    process: Any = Process(line(DOING) + line(SPAN) + line(reply))
    assert _follow(process, told.append) == (0, reply)
    assert told == [DOING, SPAN]


@pytest.mark.parametrize("reply", REPLIES)
def test_of_a_process_that_died_while_it_spoke_the_half_line_is_no_reply(reply: Any) -> None:
    told: list[Any] = []
    process: Any = Process(line(DOING) + line(reply)[:-3], -9)
    assert _follow(process, told.append) == (-9, None)
    assert told == [DOING]
