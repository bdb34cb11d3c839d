"""Forks Python processes for `forked_python.py`: answers a line of JSON with the status of the child that ran it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType


def serve() -> None:
    import torch  # noqa: F401

    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for line in sys.stdin:
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            become(asked, inherited)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(asked: dict[str, object], inherited: list[str]) -> None:
    """Run the code here, in a module `__main__` of its own; Python's own end follows."""
    code, arguments, variables = asked["code"], asked["arguments"], asked["environment"]
    assert isinstance(code, str) and isinstance(arguments, list) and isinstance(variables, dict)
    signal.alarm(int(str(asked["seconds"])))  # ends it where it hangs
    for number, path in enumerate((os.devnull, *asked["streams"])):  # type: ignore[misc]
        opened = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(variables)
    name = arguments[0]
    first = "" if name == "-c" else str(Path(name).parent)
    given = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *given, *(path for path in sys.path[1:] if path not in inherited)]
    sys.argv[:] = arguments
    main = sys.modules["__main__"] = ModuleType("__main__")
    if name != "-c":
        main.__file__ = name
    exec(compile(code, "<string>" if name == "-c" else name, "exec"), main.__dict__)


if __name__ == "__main__":
    serve()
