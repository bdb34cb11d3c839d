"""The ways to serve a model that are compared. Nothing here imports torch before a contender is attached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aotc.tools.bench.peers import onnxruntime_session, openvino_session, peer


class Attachment(msgspec.Struct, frozen=True):
    """What a contender may start from.

    ref, target: the artifact. checkpoint: a safetensors file with the weights, "" for frozen ones. mega: the file of
    the mega-cache. dynamic: torch.compile's argument. on_miss: aotc.load's. threads: how many will call at a time.
    onnx: for each set of sizes, a file of the model and the shapes of its inputs.
    """

    ref: str
    target: str
    device: str
    checkpoint: str
    mega: str
    dynamic: bool | None = False
    on_miss: str = "error"
    threads: int = 1
    onnx: tuple[tuple[str, str], ...] = ()


Attach = Callable[[Any, Attachment], Callable[..., Any]]
"""From the module (None where the contender takes none) to what answers calls."""

Prepare = Callable[[Attachment], Callable[[], Callable[..., Any]]]
"""What is done before a fork; what it returns gives the child what answers calls."""


@dataclass(frozen=True)
class Contender:
    """One way to serve a model.

    imports: what it imports beside torch, as a service does at its top.
    after: the contender that leaves the caches (`keeps_caches`) from which this one starts, or the file of the
    mega-cache (`starts_from_mega`).
    slow: it compiles at its start, so it is started once. steady: its calls are timed; those of the others run the same
    code as a steady one's. prepare: its start is a forked child's, whose parent has done this; `attach` is not used.
    peer: another runtime, which reads an ONNX file, on a CPU; its service imports no torch.
    """

    name: str
    label: str
    attach: Attach | None
    imports: tuple[str, ...] = ()
    needs_module: bool = True
    after: str = ""
    keeps_caches: bool = False
    starts_from_mega: bool = False
    slow: bool = False
    steady: bool = False
    prepare: Prepare | None = None
    peer: bool = False


_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
_AOTC = ("aotc.runtime.load",)


def _compiled(mode: str) -> Attach:
    def attach(module: Any, attachment: Attachment) -> Any:
        import torch
        import torch._dynamo

        if attachment.dynamic is False:  # past its limit of 8 it runs further buckets in eager, and says so in a log
            torch._dynamo.config.recompile_limit = 256
        return torch.compile(module, mode=mode, dynamic=attachment.dynamic)

    return attach


def _mega(mode: str) -> Attach:
    def attach(module: Any, attachment: Attachment) -> Any:
        import torch

        torch.compiler.load_cache_artifacts(Path(attachment.mega).read_bytes())
        return _compiled(mode)(module, attachment)

    return attach


def _aotc(module: Any, attachment: Attachment) -> Any:
    import aotc

    concurrency = attachment.threads if attachment.device == "cpu" else 1
    on_miss: Any = attachment.on_miss
    return aotc.load(attachment.ref, module, target=attachment.target, concurrency=concurrency, on_miss=on_miss)


def _aotc_file(module: Any, attachment: Attachment) -> Any:
    import aotc

    return aotc.load(
        attachment.ref,
        weights=attachment.checkpoint or None,
        device=attachment.device,
        target=attachment.target,
    )


def _prepare_aotc(attachment: Attachment) -> Callable[[], Any]:
    import aotc

    return aotc.prepare(
        attachment.ref,
        weights=attachment.checkpoint or None,
        device=attachment.device,
        target=attachment.target,
    ).load


def _of_mode(mode: str) -> tuple[Contender, ...]:
    label = f"torch.compile {mode}"
    return (
        Contender(mode, f"{label}, cold", _compiled(mode), _COMPILER, keeps_caches=True, slow=True, steady=True),
        Contender(f"{mode}-warm", f"{label}, warm caches", _compiled(mode), _COMPILER, after=mode, slow=True),
        Contender(
            f"{mode}-mega",
            f"{label}, mega-cache",
            _mega(mode),
            _COMPILER,
            after=mode,
            starts_from_mega=True,
            slow=True,
        ),
    )


def _peer(name: str, label: str, make: Callable[[str, int], Any]) -> Contender:
    return Contender(name, label, peer(make), (name,), needs_module=False, steady=True, peer=True)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("eager", "eager", lambda module, attachment: module, steady=True),
        *_of_mode("default"),
        *_of_mode("max-autotune"),
        Contender("aotc", "aotc", _aotc, _AOTC, steady=True),
        Contender("aotc-file", "aotc, no module", _aotc_file, _AOTC, needs_module=False),
        Contender("aotc-forked", "aotc, forked", None, _AOTC, needs_module=False, prepare=_prepare_aotc),
        _peer("onnxruntime", "ONNX Runtime", onnxruntime_session),
        _peer("openvino", "OpenVINO", openvino_session),
    )
}
PEERS = tuple(name for name, contender in CONTENDERS.items() if contender.peer)
CHECKPOINT = tuple(name for name, each in CONTENDERS.items() if not each.needs_module and not each.peer)
"""Those that take weights from a file."""
OWN = tuple(name for name in CONTENDERS if name not in PEERS)
"""What is measured where nothing is named: peers need packages of their own."""


def with_sources(names: tuple[str, ...]) -> tuple[str, ...]:
    """These contenders in the table's order, with those whose caches they start from. Raises KeyError."""
    wanted = {*names, *(CONTENDERS[name].after for name in names)}
    return tuple(name for name in CONTENDERS if name in wanted)
