"""A WSGI application for gunicorn, which imports this module once, before it forks its workers (`gunicorn.conf.py`).

gunicorn app:app
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

from prepared import MODELS, answer

import aotc

draining = mmap.mmap(-1, 1)
"""Shared with the workers: `gunicorn.conf.py` sets it when gunicorn is to end."""


@functools.cache
def compiled() -> aotc.Compiled:
    """In a worker: `gunicorn.conf.py` calls it before the first request."""
    return MODELS[os.environ.get("WARM_MODEL", "first")].load()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/readyz":
        start_response("503 Service Unavailable" if draining[0] else "200 OK", [])
        return []
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    status, content = answer(compiled(), body or b"{}")
    start_response("200 OK" if status == 200 else "422 Unprocessable Content", [("Content-Type", "application/json")])
    return [json.dumps(content).encode()]
