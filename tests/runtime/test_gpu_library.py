"""How a library for GPUs is opened, as far as it can be seen without one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aotc.runtime.libraries.folder import FilesInFolder
from aotc.runtime.libraries.library import open_library


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_gpu_s_library_has_one_model_whatever_the_concurrency(
    concurrency: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several, torch asks for one that is done by an event, which a capture makes invalid."""
    opened: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(AOTIModelContainerRunnerCuda=lambda *given: opened.append(given))
    monkeypatch.setattr("aotc.runtime.libraries.runner._aoti", fake)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    open_library(FilesInFolder(tmp_path, "model.so"), torch.device("cuda", 1), concurrency)
    assert opened == [(f"{tmp_path}/model.so", 1, "cuda:1", str(tmp_path), True)]
