"""`register`, which vLLM calls in each process, and what happens before and after the start of an engine.

AOTC_VLLM           restore: from a store before the engine starts; save: to it once it has started; both: restore,
                    and save where the start compiled. Unset: nothing at all is done
AOTC_VLLM_CACHE     the cache, as `aotc cache` names it (`vllm`, in $AOTC_STORE, by default)
AOTC_RECEIPT        the folder of the receipt; else a temporary one
AOTC_NO_COMPILER    1: what is missing is an error, and never compiled
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aotc.errors import AotcError, StoreError

if TYPE_CHECKING:
    from aotc.tools.caches.origin import Origin
    from aotc.tools.caches.receipt import Receipt

MODES = ("restore", "save", "both")
_RESTORED = "AOTC_VLLM_RESTORED"
"""Set by the first process for those that it starts: the files are there, and the receipt is begun. As JSON the
variables that compilers and vLLM read, as the user has set them: vLLM sets more of them on its way."""
_HELPERS = ("vllm.model_executor.models.registry", "torch._inductor.compile_worker")
"""Processes that vLLM starts to look at a model's class, and torch to compile: they hold no engine."""

_log = logging.getLogger("vllm.aotc")  # as vLLM's own lines, with its handlers
_registered: list[int] = []


class PluginSettings(NamedTuple):
    mode: str
    cache: str
    refuses: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> PluginSettings | None:
        """None where nothing is asked for. Raises StoreError."""
        mode = environment.get("AOTC_VLLM", "")
        if mode and mode not in MODES:
            raise StoreError(f"AOTC_VLLM is {mode!r}", hint=f"set it to {', '.join(MODES)}, or unset it")
        named = environment.get("AOTC_VLLM_CACHE") or "vllm"
        return cls(mode, named, environment.get("AOTC_NO_COMPILER") == "1") if mode else None


def register() -> None:
    """The entry point of the group `vllm.general_plugins`. Called several times in a process, it acts once.

    Where nothing can be restored, the engine starts all the same and compiles, after a warning; with AOTC_NO_COMPILER
    the error is raised, and vLLM does not start.
    """
    settings = PluginSettings.of(os.environ)
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if settings is None or _registered or (main is not None and main.name in _HELPERS):
        return
    _registered.append(os.getpid())
    import vllm

    from aotc.integrations.vllm.replacements import apply_all
    from aotc.tools.caches.receipt import watch_this_process

    watched = "AOTC_RECEIPT" in os.environ and "aotc_watching" in sys.modules  # by `aotc cache run`
    if settings.refuses:  # else vLLM traces the model again, to no end
        os.environ.setdefault("VLLM_FORCE_AOT_LOAD", "1")
    if _RESTORED not in os.environ and not watched:
        os.environ.update(_restore(settings))
    watch_this_process()
    root = _folders()["vllm"]
    apply_all(root, vllm.__version__, lambda: _started(settings))


def _folders() -> dict[str, Path]:
    """Where this process has its caches. vLLM puts Inductor's into its own, by a variable which it sets itself."""
    from aotc.tools.caches.folders import cache_folders

    return cache_folders(("vllm", "triton"))


def _origin() -> Origin:
    """As `this_origin`, without a context on a GPU in a process that has none: vLLM could not fork any more."""
    import torch

    from aotc.tools.caches.origin import this_origin

    if torch.version.cuda is None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return this_origin()
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(this_origin).result()


def _restore(settings: PluginSettings) -> dict[str, str]:
    """Restore, and begin the receipt. Returns the variables for this process and those that it starts."""
    from aotc.store.reference import store_of
    from aotc.tools.caches.origin import compiler_variables, variable_rules
    from aotc.tools.caches.receipt import begin
    from aotc.tools.caches.restore import cache_of, restore
    from aotc.tools.caches.stores import opened, reference_of

    folders, cache = _folders(), None
    if settings.mode != "save":
        try:
            here = _origin()
            reference = reference_of(settings.cache, here)
            store, bundle = opened(reference, store_of(reference.store))
            done = restore(store, bundle, folders, here)
            cache = cache_of(store, bundle)
            counts = ", ".join(f"{kind} {sum(one)} files" for kind, one in done.items() if any(one))
            _log.info("aotc: restored %s@%s: %s", bundle.model, bundle.digest[:19], counts)
            for rule in variable_rules(cache, here):
                if rule.issue is not None:
                    _log.warning("aotc: %s", rule.issue.message)
        except AotcError as error:
            if settings.refuses:
                raise
            _log.warning("aotc: nothing is restored, so the engine compiles: %s", error)
    receipt = Path(os.environ.get("AOTC_RECEIPT") or tempfile.mkdtemp(prefix="aotc-receipt-"))
    read = compiler_variables(os.environ) | {name: os.environ[name] for name in os.environ if name.startswith("VLLM_")}
    return {**begin(receipt, cache, folders), _RESTORED: json.dumps(read)}


def _started(settings: PluginSettings) -> None:
    """After the start of an engine: its receipt, in one line, and the save. Nothing here ends the engine."""
    from aotc.tools.caches.receipt import REQUIREMENTS, read

    try:
        found = read(Path(os.environ["AOTC_RECEIPT"]))
        _log.info("aotc: %s", receipt_line(found))
        if settings.mode == "save" or (settings.mode == "both" and found.flaws(REQUIREMENTS)):
            _save(settings)
    except AotcError as error:
        _log.warning("aotc: %s", error)


def receipt_line(found: Receipt) -> str:
    """What became of the restored files, and the last sources that were compiled: torch tries its compiler before."""
    sources = [Path(source).name for each in found.compilers for source in each.sources]
    named = f" ({'…, ' if len(sources) > 3 else ''}{', '.join(sources[-3:])})" if sources else ""
    used = f"{len(found.used)} of {found.restored} restored files used" if found.restored else "nothing was restored"
    return (
        f"receipt: {used}, {len(found.written)} written anew, "
        f"{len(found.replaced)} replaced, {len(found.compilers)} compiles{named}; {os.environ.get('AOTC_RECEIPT', '')}"
    )


def _save(settings: PluginSettings) -> None:
    import vllm.envs

    from aotc.store.reference import store_of
    from aotc.tools.caches.receipt import unwatched
    from aotc.tools.caches.stores import reference_of, save_as

    read: dict[str, str] = json.loads(os.environ.get(_RESTORED, "{}"))
    factors = vllm.envs.compile_factors()
    kept = {name: value for name, value in read.items() if not name.startswith("VLLM_") or name in factors}
    origin = _origin()._replace(variables=kept)
    reference = reference_of(settings.cache, origin)
    with unwatched():
        saved = save_as(reference, store_of(reference.store), _folders(), origin)
    _log.info("aotc: saved %s  %s, %d files", saved.reference, saved.digest[:19], sum(saved.files.values()))
