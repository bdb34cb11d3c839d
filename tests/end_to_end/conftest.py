"""Loads of compiled models, from start to end."""

from __future__ import annotations

from typing import Any

import pytest

from aotc.runtime.load import bind_artifact


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The files of the libraries that were opened."""
    opened: list[Any] = []
    real = bind_artifact.__globals__["open_library"]

    def open_library(files: Any, *rest: Any) -> Any:
        opened.append(files)
        return real(files, *rest)

    monkeypatch.setitem(bind_artifact.__globals__, "open_library", open_library)
    return opened
