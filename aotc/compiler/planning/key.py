"""The key of a unit: the digest of its named factors, which are all inputs that the compiled code depends on.

Left out, and why (each has a test): absolute paths, HOME, cache folders, the user and the time, since the compiled code
does not depend on them; the path of the C++ compiler, since its version line is a factor; comments and the order of
keys in the manifest, since equal manifests read equal; comments, layout and docstrings in the model's code; weight
values, since live weights are arguments. Frozen weights are in the code, and buffers that no checkpoint holds are kept
with the variant: the digests of both are factors.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import nn

from aotc.compiler.messages import Factors, Pins
from aotc.compiler.patches.machinery.patch import chosen
from aotc.compiler.patches.machinery.registry import PATCHES
from aotc.digest import sha256_file, sha256_json
from aotc.errors import Issue
from aotc.machine.cpp_compiler import compiler_version
from aotc.machine.gpus import Gpu
from aotc.machine.targets import Target
from aotc.machine.this_host import glibc_version
from aotc.manifest import ModelSpec
from aotc.reads.module_identity import NOWHERE, ModuleIdentity, value_differences
from aotc.reads.sources import file_of
from aotc.reads.state_specs import named_constants
from aotc.reads.tensors import named_state, tensor_digests
from aotc.records import SCHEMA_VERSION, Bucket, Dims, Region, Variant

NOT_A_REGION: Mapping[str, Any] = MappingProxyType({})

OTHER_UNITS = ("buckets", "targets")
"""The fields of a model in the manifest that decide which units exist, and change none of them."""

_VARIABLES = re.compile(
    r"(TORCHINDUCTOR|AOT_INDUCTOR|AOTINDUCTOR|TRITON)_|TORCH_COMPILE"
    r"|(CPATH|CPLUS_INCLUDE_PATH|CFLAGS|CXXFLAGS|PTXAS_OPTIONS|DISABLE_PTXAS_OPT|CUTLASS_EPILOGUE_FUSION)$"
    r"|ENABLE_(\w+_)?(TMA|AUTOWS)(_\w+)?$"
    r"|TORCHDYNAMO_(AUTO_FUNCTIONALIZED_V2|PREPARE_FREEZING)$|TORCH_DYNAMO_DO_NOT_EMIT_RUNTIME_ASSERTS$"
)
_NOT_CODE = re.compile(
    r"_(CACHE(?!_BLOCKING)|COMPILE_THREADS|DUMP|LOG|LOGGING|LOGPATH|PROGRESS|WORKER)(_|$)"
    r"|_DIR$|^TRITON_(HOME|LIBCUDA_PATH)$"
)


def model_factors(spec: ModelSpec, module: nn.Module, sources: Mapping[str, str]) -> Factors:
    """The named factors that all units of a model have in common."""
    # Field by field: the spec's own JSON leaves out defaults, which may differ in another aotc. Through JSON, which has
    # no tuples, so that these factors equal those read back from a store.
    fields = (name for name in spec.__struct_fields__ if name not in OTHER_UNITS)
    manifest = {name: msgspec.json.decode(msgspec.json.encode(getattr(spec, name))) for name in fields}
    manifest["recorded"] = sha256_json(spec.recorded) if spec.recorded else ""
    identity = ModuleIdentity(module)
    return {
        "manifest": manifest,
        "sources": dict(sources),
        "attributes": identity.attributes_digest,
        "weights": sha256_json(tensor_digests(named_state(module))) if spec.weights == "frozen" else "live",
        "state": identity.tensors,  # of live ones, too: a factory may read sizes from a file
        "constants": tensor_digests(named_constants(module)),
        "threads": torch.get_num_threads() if spec.options.get("cpp.dynamic_threads") is False else "any",
        **machine_factors(),
    }


def further_ranks(factors: Factors, ranks: Mapping[int, Factors]) -> Factors:
    """Further factors of a parallel model: where those of another rank's part differ from the first one's."""
    own = {
        str(rank): {name: value for name, value in others.items() if value != factors[name]}
        for rank, others in ranks.items()
    }
    return {"ranks": {rank: different for rank, different in own.items() if different}}


def unit_factors(
    common: Factors, bucket: Bucket, target: Target, pins: Pins, region: Mapping[str, Any] = NOT_A_REGION
) -> Factors:
    """The named factors of a unit's key, the most specific ones first; `common` are the factors of its model."""
    manifest = common["manifest"]
    off = [name for name, on in manifest["patches"].items() if not on]
    patches = chosen(PATCHES, target.device, manifest["options"], off)
    return {
        "bucket": msgspec.to_builtins(bucket),
        "target": target.name,
        **common,
        **region,
        "picks": pins.digest(),
        "patches": {patch.name: "applied" for patch in patches},
    }


def region_factors(name: str, regions: Sequence[Region], calls: Sequence[Variant], sizes: Dims) -> Factors:
    """Further factors of a region's unit: its name, the records of all regions and of padded calls, and the sizes of
    the example run."""
    padded = {"calls": sha256_json(calls)} if calls else {}
    return {"region": name, "regions": {other.name: sha256_json(other) for other in regions}, "sizes": sizes, **padded}


def absence_factors(gpu: Gpu | None, absent: Sequence[str], untuned: bool) -> Factors:
    """Further factors of a unit for a GPU, or for features of a CPU, that the building machine lacks. Its code has not
    run, so a machine that has them builds its own."""
    if absent:
        return {"cpu": f"not here: {' '.join(absent)}"}
    return {} if gpu is None else {"gpu": f"not here: {gpu.name}", "untuned": untuned}


def machine_factors() -> Factors:
    """The factors that depend on the machine and its software, not on the model."""
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "triton": triton_version(),
        "compiler": compiler_version(),
        "machine": f"{sys.platform} {platform.machine()} glibc {glibc_version()}",
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.match(name) and not _NOT_CODE.search(name)
        },
        "aotc": f"record schema {SCHEMA_VERSION}, build {build_version()}",
    }


def unit_key(factors: Factors) -> str:
    return sha256_json(factors)


def code_key(factors: Factors) -> str:
    """The digest of what a unit's code depends on besides its graph: all factors except those that determine only the
    graph."""
    manifest = {name: value for name, value in factors.get("manifest", {}).items() if name not in ("factory", "kwargs")}
    others = {name: value for name, value in factors.items() if name not in ("sources", "attributes")}
    return sha256_json({**others, "manifest": manifest, "aotc": code_version()})


_ROOMS = ("compiler", "machine", "manifest", "models", "reads", "tensors")
"""What captures and generates, whole, with the modules beside them. A digest of too much costs a build after an update
of aotc; one of too little gives old code for new."""

_OF_THE_GRAPH = (
    *(f"compiler/capture/{room}" for room in ("analysis", "checks", "lifting", "ranges", "regions")),
    "models",
    "reads",
)
"""Of these, what the graph and the record are made by: no code is generated by them."""

_AOTC = Path(__file__).parents[2]


@functools.cache
def build_version() -> str:
    """A digest of the code that turns a unit into a variant: another capture gives other files."""
    return _digest_of(builders())


@functools.cache
def code_version() -> str:
    """As `build_version`, of the code that turns a graph into a library."""
    return _digest_of(
        path for path in builders() if not any(path.is_relative_to(_AOTC / room) for room in _OF_THE_GRAPH)
    )


def builders() -> list[Path]:
    """The files that `build_version` digests."""
    files = [*_AOTC.glob("*.py"), *(path for room in _ROOMS for path in (_AOTC / room).rglob("*"))]
    return sorted(path for path in files if path.suffix in (".py", ".jinja", ".cpp"))


def _digest_of(files: Iterable[Path]) -> str:
    return sha256_json([sha256_file(path) for path in files])[7:19]


def triton_version() -> str:
    """The version of Triton, "" where it is not installed: torch's CPU builds come without it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- explaining -------------------------------------------------------------------------------------------------------


def explain(old: Factors, new: Factors, line_of: Callable[..., str] = lambda *keys: "") -> list[Issue]:
    """Why two keys differ: each factor that changed, with both values.

    `line_of` gives the manifest's line for keys of the model. A changed source is named by its file: what it was before
    is not kept.
    """
    issues: list[Issue] = []
    for name in dict.fromkeys([*new, *old]):
        if old.get(name) != new.get(name):
            issues += _explain_factor(name, old.get(name), new.get(name), line_of)
    return issues


def _explain_factor(name: str, old: Any, new: Any, line_of: Callable[..., str]) -> Iterator[Issue]:
    if name == "manifest":
        for keys, before, after in value_differences(old, new):
            written = ("outputs", "crop", *keys[1:]) if keys[0] == "crop" else keys
            yield _change(f"manifest {'.'.join(map(str, keys))}", before, after, line_of(*written))
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                what, where = (f"source of {key}", _file(key)) if name == "sources" else (f"{name} {key}", "")
                yield _change(what, old.get(key), new.get(key), where)
    else:
        yield _change(name, old, new)


def _file(module_name: str) -> str:
    file = file_of(module_name)
    if file is None:
        return ""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else file.name


def _change(what: str, old: Any, new: Any, where: str = "") -> Issue:
    shown = [str(value) if value not in (None, NOWHERE) else "absent" for value in (old, new)]
    digests = all(value.startswith("sha256:") for value in shown)
    message = f"{what} changed" if digests else f"{what} {shown[0]} → {shown[1]}"
    return Issue(message, where=where, expected=shown[0], actual=shown[1])
