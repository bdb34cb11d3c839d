"""How a library for GPUs is opened, as far as it can be seen without one."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aotc.runtime.libraries.cuda_library import CudaCLibrary
from aotc.runtime.libraries.library import open_library
from aotc.runtime.libraries.library_folder import FilesInFolder
from aotc.runtime.training.training_library import open_backward


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


def test_the_backward_of_a_training_step_keeps_the_gil_and_runs_on_the_current_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one model, that no two threads may run, and no events, which a capture makes invalid."""
    called: dict[str, tuple[Any, ...]] = {}

    class Fake:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("omp_"):
                raise AttributeError(name)
            return lambda *given: called.update({name: given}) or 0

    assert CudaCLibrary._open is ctypes.PyDLL
    monkeypatch.setattr(CudaCLibrary, "_open", staticmethod(lambda path: Fake()))
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    library = open_backward(FilesInFolder(tmp_path, "backward.so"), torch.device("cuda", 1), 4)
    _, models, device, kernels = called["AOTInductorModelContainerCreateWithDevice"]
    assert (models.value, device, kernels) == (1, b"cuda:1", str(tmp_path).encode())
    assert library.run([]) == []
    assert called["AOTInductorModelContainerRunSingleThreaded"][-2].value == 71
