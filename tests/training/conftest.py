"""The store of the models that are trained, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT

HERE = ROOT / "tests" / "training"


@pytest.fixture(scope="session")
def stepped_store(shared_folder: Path, built: Callable[..., Path]) -> Path:
    """The same store with the models whose steps are tested with every torch; others may be in it."""
    return built(shared_folder, "training-store", HERE / "training.yaml", ("mixed", "stack"))


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module trained_models.py; the cache folder is this test's own."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    import trained_models

    return trained_models
