"""A WSGI application for gunicorn, which imports this module once, before it forks its workers (`gunicorn.conf.py`).

gunicorn app:app
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from prepared import MODELS, answer

import aotc


@functools.cache
def compiled() -> aotc.Compiled:
    """In a worker: `gunicorn.conf.py` calls it before the first request."""
    return MODELS[os.environ.get("WARM_MODEL", "first")].load()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    status, content = answer(compiled(), body or b"{}")
    start_response("200 OK" if status == 200 else "422 Unprocessable Content", [("Content-Type", "application/json")])
    return [json.dumps(content).encode()]
