"""What is done around the life of a Python process: imports without garbage collection, and an end without it."""

from __future__ import annotations

import gc

import pytest
from processes import run_python

from aotc.processes import importing


def test_while_modules_are_imported_no_garbage_is_looked_for() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_module_that_cannot_be_imported_leaves_it_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        __import__("no_such_module")
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_ends_without_looking_for_garbage() -> None:
    """With torch imported, the search at a process's end takes half a second."""
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))  # what was registered first, runs last
from aotc.cli import main
main(["ls", "--help"], standalone_mode=False)
print(gc.get_freeze_count())
"""
    *_, before, after = run_python(code).splitlines()
    assert (before, after) == ("0", "True")
