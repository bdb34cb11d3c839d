"""gunicorn reads this file in its working folder."""

from typing import Any

preload_app = True  # app.py, and so prepared.py, is imported by the process that forks
workers = 2


def post_worker_init(worker: Any) -> None:
    """In each worker, before its first request."""
    import app

    worker.log.info("worker %d loaded %s", worker.pid, app.compiled().forward.loaded)
