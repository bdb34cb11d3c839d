"""Another Python that has aotc, by the command that starts it: one for another machine, in an emulator of that."""

from __future__ import annotations

import shlex
import subprocess

import msgspec

from aotc.errors import VerifyError
from aotc.records import Environment

_ENVIRONMENT = """
import msgspec
from aotc.standalone.cpu_environment import cpu_environment
print(msgspec.json.encode(cpu_environment()).decode())
"""


def other_python(command: str, *arguments: str) -> list[str]:
    """Its command line. Without `-P` it would import what lies in the working folder."""
    return [*shlex.split(command), "-P", *arguments]


def environment_of(command: str) -> Environment:
    """The machine that it runs on, as `aotc.standalone.load` sees it there. Raises VerifyError."""
    said = ""
    try:
        shown = subprocess.run(other_python(command, "-c", _ENVIRONMENT), capture_output=True, text=True, check=False)
        lines = [line for line in shown.stderr.splitlines() if line and line[0] != " "]  # without hints
        said = [f"it ended with {shown.returncode}", *lines][-1]
        return msgspec.json.decode(shown.stdout, type=Environment)
    except (OSError, ValueError) as error:
        raise VerifyError(
            f"`{command}` starts no Python that has aotc: {said or error}",
            hint="install aotc's wheel for its machine there, or name its folder: env PYTHONPATH=FOLDER COMMAND",
        ) from error
