"""What of vLLM and torch the plug-in replaces, since neither has a hook there: all of it, as data.

The docstring of a replacement is the text of an issue upstream: what is expected, what is seen. One whose targets are
missing, or take other arguments, is left out with a warning, and so are all with a version of vLLM out of bounds.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aotc.advisories import within
from aotc.compiler.patches.machinery.patch import flaw_of
from aotc.integrations.vllm.factors import keep, key_factors, watched_configs
from aotc.integrations.vllm.vllm_libraries import find_libraries, lacking, source_digest, write_note

VERSIONS = ">=0.32,<0.33"
"""The versions of vLLM that the replacements were run with."""

_log = logging.getLogger("vllm.aotc")


class Replacement(NamedTuple):
    """`targets` are in the notation of `aotc.compiler.patches.machinery.patch.flaw_of`."""

    apply: Callable[[Path, Callable[[], None]], None]
    targets: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.apply.__name__

    @property
    def text(self) -> str:
        return inspect.getdoc(self.apply) or ""

    def flaws(self) -> Iterator[str]:
        return filter(None, map(flaw_of, self.targets))


def loaded_functions(root: Path, started: Callable[[], None]) -> None:
    """[compile] On the CPU no AOT artifact can be loaded: it has no `finalize_loading`.

    Expected: a second start with the same cache loads the artifact that the first has saved.
    Seen: "Compiling model again due to a load failure … object has no attribute 'finalize_loading'", and the model is
    traced again. `_try_load_aot_compiled_fn` calls a method of `VllmSerializableFunction`; where CompilationMode is not
    VLLM_COMPILE, as on the CPU, the artifact holds the function of another backend. There is nothing to finalize in it.
    """
    import torch

    load: Callable[..., Any] = torch.compiler.load_compiled_function

    @functools.wraps(load)
    def load_compiled_function(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        function = loaded._artifacts.compiled_fn
        if not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda vllm_config: None
        return loaded

    torch.compiler.load_compiled_function = load_compiled_function


def libraries_by_source(root: Path, started: Callable[[], None]) -> None:
    """[inductor] A compiled C++ library that is there needs a compiler, and torch at the path where it was compiled.

    Expected: a process that finds all of its libraries in the cache folder starts no compiler, and needs none.
    Seen: `CppCodeCache.load_async` has the whole command line in its key: the absolute paths of torch's and Python's
    headers, so with torch elsewhere each library is compiled anew, without a word in the log. To write that command it
    looks for a compiler and the CPU's instructions, by `g++ --version` and test programs; and it precompiles a header
    (`cpp_cache_precompile_headers`), outside of the cache folder, before it looks whether the library is there.
    """
    import torch._inductor.codecache as codecache
    from torch._inductor import config

    cache = codecache.CppPythonBindingsCodeCache
    compiled: Callable[..., Callable[[], Any]] = cache.load_async.__func__  # type: ignore[attr-defined]
    parameters = inspect.signature(compiled)
    libraries = functools.cache(lambda: find_libraries(root))  # not in a process that loads none

    def load_async(cls: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        if cls is not cache:  # a subclass, of code with another entry
            return compiled(cls, *args, **kwargs)
        call = parameters.bind(cls, *args, **kwargs)
        call.apply_defaults()
        asked = {name: value for name, value in call.arguments.items() if name not in ("cls", "submit_fn")}
        digest = source_digest(asked, config.save_config_portable())
        if digest in libraries():
            return _loaded(cls, libraries()[digest])
        try:
            made = compiled(cls, *args, **kwargs)
        except RuntimeError as error:  # of the header, by AOTC_NO_COMPILER
            raise RuntimeError(f"{lacking(root, digest)} is missing: {error}") from error

        def load() -> Any:
            library = made()
            write_note(Path(library.__file__), digest)
            return library

        return load

    cache.load_async = classmethod(functools.wraps(compiled)(load_async))  # type: ignore[assignment]


def _loaded(cls: Any, path: Path) -> Callable[[], Any]:
    key = path.name.partition(".")[0]
    if key not in cls.cache:
        cls.cache[key] = functools.cache(functools.partial(cls._load_library, str(path), key))
    found: Callable[[], Any] = cls.cache[key]
    return found


def named_factors(root: Path, started: Callable[[], None]) -> None:
    """[compile] A start that does not find its AOT artifact does not say which factor of the key differs.

    Expected: "no artifact: max_num_seqs is 8 here, and was 16 where the artifact was saved".
    Seen: nothing; the model is compiled. `aot_compile_hash_factors` returns digests, and the factors are kept nowhere,
    where the path without AOT writes `cache_key_factors.json`.
    """
    import vllm.envs
    from vllm.compilation import caching

    hashed = caching.aot_compile_hash_factors

    @functools.wraps(hashed)
    def aot_compile_hash_factors(vllm_config: Any) -> list[str]:
        with watched_configs(vllm_config) as configs:
            whole: list[str] = hashed(vllm_config)
        env: Mapping[str, Any] = vllm.envs.compile_factors()
        differing = keep(root, whole, key_factors(whole, configs, env))
        if differing and vllm_config.parallel_config.rank == 0:
            _log.warning(
                "aotc: vLLM's key is not that of the cache, so nothing is found:\n  %s", "\n  ".join(differing)
            )
        return whole

    caching.aot_compile_hash_factors = aot_compile_hash_factors


def started_engine(root: Path, started: Callable[[], None]) -> None:
    """[plugins] A general plug-in is not told when the engine has compiled and warmed up.

    Expected: a hook after the start, for whoever saves caches or reports what the start compiled.
    Seen: `vllm.general_plugins` are called before the configuration is made; `log_engine_initialized` of a stat logger
    is called with the asynchronous engine only. The log says "Directly load AOT compilation" where kernels are compiled
    behind it, which only a look at the cache after the start shows.
    """
    from vllm.v1.engine.core import EngineCore

    initialize = EngineCore._initialize_kv_caches  # the last that compiles; `__init__` runs when it calls plug-ins

    @functools.wraps(initialize)
    def _initialize_kv_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = initialize(self, *args, **kwargs)
        started()
        return made

    EngineCore._initialize_kv_caches = _initialize_kv_caches


REPLACEMENTS = (
    Replacement(loaded_functions, ("torch.compiler:load_compiled_function(file,...)",)),
    Replacement(
        libraries_by_source,
        (
            "torch._inductor.codecache:CppPythonBindingsCodeCache.load_async(main_code,device_type,submit_fn,extra_flags,"
            "optimized_code,needs_vec_isa,kernel_needs_vec_isa)",
            "torch._inductor.codecache:CppPythonBindingsCodeCache._load_library(path,key)",
        ),
    ),
    Replacement(
        named_factors,
        (
            "vllm.compilation.caching:aot_compile_hash_factors(vllm_config)",
            "vllm.config.utils:get_hash_factors(config,ignored_factors)",
            "vllm.envs:compile_factors()",
        ),
    ),
    Replacement(started_engine, ("vllm.v1.engine.core:EngineCore._initialize_kv_caches(vllm_config)",)),
)


def apply_all(root: Path, version: str, started: Callable[[], None]) -> None:
    """Once in a process. `root` is vLLM's cache folder; `started` is called where an engine has started."""
    if not within(VERSIONS, version):
        _log.warning("aotc: vLLM %s is not one of %s: its files are restored, and no more", version, VERSIONS)
        return
    for each in REPLACEMENTS:
        if flaws := list(each.flaws()):
            _log.warning("aotc: %s is left out: %s", each.name, "; ".join(flaws))
        else:
            each.apply(root, started)
