"""gunicorn reads this file in its working folder.

On SIGTERM `GET /readyz` fails first. gunicorn is told $WARM_DRAIN seconds later (default: 5).
"""

import os
import signal
from typing import Any

preload_app = True  # app.py, and so prepared.py, is imported by the process that forks
workers = 2
graceful_timeout = 20  # seconds for the requests that are being answered


def when_ready(server: Any) -> None:
    """In the process that forks."""
    stop = signal.getsignal(signal.SIGTERM)

    def drain(*_: object) -> None:
        import app

        app.draining[0] = 1
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, float(os.environ.get("WARM_DRAIN", "5")) or 0.001)

    signal.signal(signal.SIGTERM, drain)


def post_worker_init(worker: Any) -> None:
    """In each worker, before its first request."""
    import app

    worker.log.info("worker %d loaded %s", worker.pid, app.compiled().forward.loaded)
