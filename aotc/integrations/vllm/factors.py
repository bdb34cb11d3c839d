"""What vLLM's key of compiled functions was made of, kept beside them: of a key, only digests are left.

A start with another key finds nothing, whatever was restored. It says which factor differs, with both values.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from aotc.digest import sha256_json
from aotc.store.files.writing import temporary_name

FOLDER = "torch_compile_cache/aotc_factors"
"""Within vLLM's folder, so that it is saved and restored with the functions."""
MISSING = "not a factor"
_DIGEST = "all of "
CacheFactors = dict[str, str]


class Config(NamedTuple):
    """A part of vLLM's configuration. `factors` are those of its digest, if vLLM lists them by name; else all of its
    fields, of which some are in the digest."""

    kind: str
    factors: Mapping[str, Any]
    digest: str = ""


def key_factors(whole: Sequence[Any], configs: Sequence[Config], environment: Mapping[str, Any]) -> CacheFactors:
    """By name: `ModelConfig.dtype`, `$VLLM_USE_V1`, `inductor 2.cpp.simdlen`.

    Args:
        whole: what vLLM hashes: two digests, of the environment and of its configuration, then of the compiler.
        configs: the parts of its configuration.
        environment: the factors of the environment's digest.
    """
    named: dict[str, Any] = {f"${name}": value for name, value in environment.items()}
    for config in configs:
        named |= _flat(config.kind, config.factors)
        if config.digest:
            named[f"{_DIGEST}{config.kind}"] = config.digest
    for number, value in enumerate(whole[2:], 2):
        named |= _flat(f"inductor {number}", value)
    named[f"{_DIGEST}vLLM's configuration"] = whole[1] if len(whole) > 1 else ""
    return {name: _text(value) for name, value in named.items()}


def _flat(name: str, value: Any) -> dict[str, Any]:
    """A mapping by its items, also one that is written as JSON."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        return {name: value}
    return {path: each for key, inner in value.items() for path, each in _flat(f"{name}.{key}", inner).items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)


@contextlib.contextmanager
def watched_configs(vllm_config: Any) -> Iterator[list[Config]]:
    """Meanwhile, each part of the configuration that vLLM hashes by name is put in the list; in the end, the others."""
    from vllm.config import utils

    found: list[Config] = []
    get: Callable[..., dict[str, Any]] = utils.get_hash_factors

    def get_hash_factors(config: Any, ignored_factors: set[str]) -> dict[str, Any]:
        factors = get(config, ignored_factors)
        found.append(Config(type(config).__name__, dict(factors)))
        return factors

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.") and getattr(module, "__dict__", {}).get("get_hash_factors") is get:
                stack.enter_context(mock.patch.object(module, "get_hash_factors", get_hash_factors))
        yield found
    named = {config.kind for config in found}
    for part in vars(vllm_config).values():
        if hasattr(part, "compute_hash") and type(part).__name__ not in named:
            fields = {name: value for name, value in vars(part).items() if isinstance(value, str | int | float | None)}
            found.append(Config(type(part).__name__, fields, part.compute_hash()))


def keep(root: Path, whole: Sequence[Any], factors: CacheFactors) -> list[str]:
    """Keep the factors of a key in vLLM's folder. Returns what differs from the nearest of those that are kept, a text
    for each factor; nothing where the key is there, or none is."""
    folder = root / FOLDER
    path = folder / f"{sha256_json([_text(each) for each in whole])[7:23]}.json"
    if _read(path) is not None:  # and so it is among what the start used
        return []
    others = [found for other in sorted(folder.glob("*.json")) if (found := _read(other)) is not None]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / temporary_name()
        temporary.write_bytes(msgspec.json.encode(factors, order="sorted"))
        temporary.replace(path)
    return min((differences(other, factors) for other in others), key=len, default=[])


def differences(kept: CacheFactors, here: CacheFactors) -> list[str]:
    """Each factor that differs, with both values. Digests of several factors are told only where nothing else is."""
    names = [name for name in sorted(kept.keys() | here.keys()) if kept.get(name) != here.get(name)]
    equal = tuple(f"{name.removeprefix(_DIGEST)}." for name in kept if name.startswith(_DIGEST) and name not in names)
    names = [name for name in names if not name.startswith(equal)]
    telling = [name for name in names if not name.startswith(_DIGEST)]
    return [
        f"{name}: the cache is of {_short(kept.get(name, MISSING))}, here is {_short(here.get(name, MISSING))}"
        for name in telling or names
    ]


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _read(path: Path) -> CacheFactors | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=CacheFactors)
    return None
