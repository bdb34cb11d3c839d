from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aotc.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def failing_os(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let a function of `os` fail with an errno: root passes every permission check, so the tests cannot use those."""
    import os

    def fail(function: str, number: int) -> None:
        def failing(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, function, failing)

    return fail
