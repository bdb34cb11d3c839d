"""Compiled code of no store: the last stages of a load, with files from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aotc.records import Artifact, File, Variant
from aotc.runtime.call import CompiledCall
from aotc.runtime.load import bind_artifact
from aotc.runtime.options import LoadOptions
from aotc.runtime.select import Chosen


def bind_files(
    artifact: Artifact,
    files_of: Callable[[Variant], Any],
    module: nn.Module | None,
    device: torch.device,
    read_file: Callable[[File], bytes],
    **options: Any,
) -> CompiledCall:
    """The callable over an artifact; `options` are those of `aotc.load`."""
    chosen = Chosen(artifact, device, files_of, read_file, options.get("graphs"))
    return bind_artifact(chosen, module, LoadOptions(**options))
