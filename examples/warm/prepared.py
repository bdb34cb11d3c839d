"""The models of `models.json`, prepared when this module is imported: once, by a process that forks afterwards.

A child finds `MODELS` in its memory. `$WARM_MODELS` names another file.
"""

from __future__ import annotations

import gc
import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import aotc

SEQ, WIDTH = 128, 256

torch.set_num_threads(1)  # of each worker

MODELS = {
    name: aotc.prepare(model["ref"], weights=model["weights"])
    for name, model in json.loads(Path(os.environ.get("WARM_MODELS", "models.json")).read_text()).items()
}
gc.freeze()  # so that a child's garbage collector leaves the pages of the parent's objects alone


def predict(compiled: aotc.Compiled, request: dict[str, Any]) -> dict[str, Any]:
    """The beginning of the model's output for random numbers of a seed, and the process that computed it."""
    numbers = torch.Generator().manual_seed(int(request.get("seed", 0)))
    x = torch.randn(int(request.get("batch", 1)), SEQ, WIDTH, generator=numbers)
    return {"y": compiled(x)[0, 0, :4].tolist(), "process": os.getpid()}


def answer(compiled: aotc.Compiled, body: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the answer to a request's JSON."""
    try:
        return 200, predict(compiled, json.loads(body))
    except (aotc.MissError, ValueError, TypeError, AttributeError) as error:
        return 422, {"error": str(error)}


def serve(connection: Connection, name: str, asked: float) -> None:
    """A worker of `host.py`: load, report the seconds of the start by part, then answer until the host hangs up.

    `asked` is the host's `time.monotonic()` when it asked for the worker.
    """
    forked = time.monotonic()
    compiled = MODELS[name].load()
    loaded = time.monotonic()
    predict(compiled, {})
    seconds = {"process": forked - asked, "load": loaded - forked, "first call": time.monotonic() - loaded}
    connection.send(seconds)
    while True:
        try:
            body = connection.recv_bytes()
        except EOFError:
            return
        connection.send(answer(compiled, body))
