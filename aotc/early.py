"""Work that a start can do while `import torch` runs, in a thread. Standard library only.

    import aotc.early  # the first line of a service
    aotc.early.start("aotc-store#quickstart", weights="model.safetensors", cuda=True)
    import torch, aotc

Nothing happens without `start`, and a load needs none of it. Failures, as without a GPU, are only recorded in
`report()`; `aotc.load` repeats the work, with checks. The thread holds Python's lock for moments only.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_REF_NAME = "org.opencontainers.image.ref.name"
_INDEX = ".safetensors.index.json"
_LIMIT = 64 << 20
"""Bytes of a document that is looked into."""


class _State:
    """What was started in this process."""

    thread: threading.Thread | None = None
    ms: dict[str, float]
    failed: dict[str, str]
    context_of = 0
    """The process that has a context."""


_state = _State()


def start(
    ref: str | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    store: str | os.PathLike[str] | None = None,
    cuda: bool | int = False,
) -> None:
    """Begin, and return at once.

    Args:
        ref, store: as for `aotc.load`, of a local store: the bundle's files are read into the page cache.
        weights: a safetensors file, a shard index or a folder: likewise.
        cuda: create the context of this GPU; True is the first one. Not before a fork: a context is of no use in a
            child, and keeps it from having its own.
    """
    if _state.thread is not None and _state.thread.is_alive():
        return
    parts: dict[str, Callable[[], None]] = {}
    if cuda is not False:
        parts["context"] = lambda: _retain_context(int(cuda) if cuda is not True else 0)
    if ref is not None:
        parts["store"] = lambda: read_ahead(_files_of_bundle(ref, store))
    if weights is not None:
        parts["weights"] = lambda: read_ahead(_files_of_weights(Path(weights)))
    _state.ms, _state.failed = {}, {}
    _state.thread = threading.Thread(target=_run, args=(parts,), name="aotc.early", daemon=True)
    _state.thread.start()


def wait() -> None:
    """Return when the work is done. Before a fork, there must be no thread: `aotc.prepare` waits by itself."""
    if _state.thread is not None:
        _state.thread.join()


def report() -> dict[str, Any] | None:
    """Milliseconds by part, and why parts `failed`; None where nothing was started."""
    if _state.thread is None:
        return None
    return {"ms": dict(_state.ms), "failed": dict(_state.failed)}


def has_context() -> bool:
    """Whether this process has a context that was made here."""
    return _state.context_of == os.getpid()


def _run(parts: dict[str, Callable[[], None]]) -> None:
    for part, work in parts.items():
        began = time.perf_counter()
        try:
            work()
        except Exception as error:  # `aotc.load` repeats the work, with checks
            _state.failed[part] = f"{type(error).__name__}: {error}"
        _state.ms[part] = round(1000 * (time.perf_counter() - began), 1)


def _retain_context(ordinal: int) -> None:
    """The primary context, which torch's runtime finds and uses. ctypes holds no lock of Python's in these calls.

    Kernels are to be loaded when they are first launched: the driver reads that setting in `cuInit`, which torch makes
    before its own. Source: CUDA Driver API, "Primary Context Management".
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), ordinal)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    ):
        _state.context_of = os.getpid()  # also what has only begun keeps a child from its own
        if result := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUresult {result}")


def read_ahead(files: Iterable[Path]) -> None:
    """Ask the kernel for files, and go on."""
    for file in files:
        with suppress(FileNotFoundError), file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _files_of_bundle(ref: str, store: str | os.PathLike[str] | None) -> Iterator[Path]:
    """All blobs of a bundle, by the documents of an OCI layout, which are not checked here."""
    named, _, name = ref.rpartition("#")
    folder = Path(named or store or os.environ.get("AOTC_STORE") or "aotc-store")
    model, _, digest = name.partition("@")
    tag = model if ":" in model else f"{model}:latest"
    pending = [digest] if digest else _tagged(_document(folder / "index.json"), tag)
    seen: set[str] = set()
    while pending:
        if (digest := pending.pop()) in seen:
            continue
        seen.add(digest)
        yield (blob := _blob(folder, digest))
        document = _document(blob)
        pending += [entry["digest"] for entry in document.get("manifests", ())]
        for entry in (*document.get("layers", ()), *filter(None, [document.get("config")])):
            yield _blob(folder, entry["digest"])


def _tagged(index: dict[str, Any], tag: str) -> list[str]:
    return [one["digest"] for one in index["manifests"] if one.get("annotations", {}).get(_REF_NAME) == tag]


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:").replace("/", "")


def _document(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        found: dict[str, Any] = json.loads(stream.read(_LIMIT))
    return found


def _files_of_weights(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(path.glob("*.safetensors"))
    elif path.name.endswith(_INDEX):
        yield from (path.parent / Path(name).name for name in sorted(set(_document(path)["weight_map"].values())))
    else:
        yield path
