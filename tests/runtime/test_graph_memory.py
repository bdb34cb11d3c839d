"""What the CUDA graphs of a callable write to, as far as it can be seen without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hand_built import CPU, make_artifact, tensor

from aotc.runtime.graphs import GraphMemory


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_calls_in_any_mode_write_to_static_leaves_that_were_made_in_inference_mode(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    monkeypatch.setattr("aotc.runtime.graphs.make_stream", lambda owner, device: None)
    signature = make_artifact([tensor("x", 1, 2, 2, 2, layout=layout)]).signature
    with torch.inference_mode():
        (leaf,) = GraphMemory(signature, [8], CPU).static_leaves([(1, 2, 2, 2)], [None])
        leaf.copy_(torch.ones(1, 2, 2, 2))
    with torch.no_grad():
        leaf.copy_(torch.ones(1, 2, 2, 2))
    assert leaf.unique().tolist() == [1]
