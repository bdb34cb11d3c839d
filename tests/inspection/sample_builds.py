"""Artifacts with kernels and picks as a GPU build gives them, made by hand: nothing is compiled."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from small_artifact import small_artifact

from aotc.digest import canonical_json, sha256_bytes
from aotc.picks import PICKS_SCHEMA_VERSION, Candidate, Pick, PickFile, UnitPicks
from aotc.provenance import BuiltArtifact, BuiltVariant, CallTimes, Kernel, Report, Spread
from aotc.records import (
    Ambient,
    Argument,
    Bucket,
    ConstantLeaf,
    Environment,
    File,
    LaunchPick,
    ModuleGuard,
    Output,
    PadRule,
    Parameter,
    Signature,
    StateSpec,
    TensorLeaf,
    bucket_name,
)
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import StageCost, UnitRecord, put_unit

CREATED = "2026-01-02T03:04:05Z"
DEVICE = "NVIDIA H200"
TARGET = "cuda:sm_90"

TRITON = """\
async_compile.triton('{name}', '''
# AOT ID: ['0_inference']
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics

@triton_heuristics.pointwise(
    size_hints={{'x': {elements}}},
    filename=__file__,
    triton_meta={{'signature': {{'in_out_ptr0': '*bf16', 'in_ptr0': '*bf16', 'xnumel': 'i32'}}}},
    inductor_meta={{'kernel_name': '{name}', 'mutated_arg_names': ['in_out_ptr0'], 'num_load': 2}},
)
@triton.jit
def {name}(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = {elements}
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = tl.full([XBLOCK], True, tl.int1)
    x2 = xindex
    x0 = (xindex % 4096)
    tmp0 = tl.load(in_out_ptr0 + (x2), None).to(tl.float32)
    tmp1 = tl.load(in_ptr0 + (x0), None, eviction_policy='evict_last').to(tl.float32)
    tmp2 = tmp0 + tmp1
    tmp3 = 0.5  # gelu, exact
    tmp4 = tmp2 * tmp3
    tmp5 = 0.7071067811865476
    tmp6 = tmp2 * tmp5
    tmp7 = tl.extra.cuda.libdevice.erf(tmp6)
    tmp8 = tmp7 + 1.0
    tmp9 = tmp4 * tmp8
    tl.store(in_out_ptr0 + (x2), tmp9, None)
''', device_str='cuda')
"""


def triton_source(name: str, elements: int) -> str:
    return TRITON.format(name=name, elements=elements)


def kernels(tokens: int) -> tuple[Kernel, ...]:
    """What a transformer block gives: two fused kernels, a norm, and library calls."""
    gelu = "triton_poi_fused_addmm_gelu_view_2"
    norm = "triton_per_fused_add_native_layer_norm_view_1"
    return (
        Kernel(norm, "triton", 2, ("view", "add", "native_layer_norm"), triton_source(norm, tokens * 1024)),
        Kernel(gelu, "triton", 1, ("addmm", "view", "gelu"), triton_source(gelu, tokens * 4096)),
        Kernel("_scaled_dot_product_flash_attention", "extern", 1, ("scaled_dot_product_flash_attention",)),
        Kernel("addmm_out", "extern", 4, ("addmm",)),
    )


BLOCKS = (
    (64, 64, 32, 3, 4),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 3, 4),
    (128, 128, 64, 3, 4),
    (128, 128, 32, 4, 8),
    (64, 64, 64, 3, 8),
    (32, 64, 128, 5, 4),
    (64, 32, 128, 4, 8),
    (32, 32, 128, 2, 4),
    (128, 64, 128, 4, 4),
    (64, 128, 128, 4, 4),
    (256, 64, 64, 3, 8),
    (64, 256, 64, 3, 8),
    (16, 128, 64, 5, 4),
    (128, 16, 64, 5, 4),
    (16, 64, 64, 3, 2),
)


def operator_pick(tokens: int, fastest: int = 3) -> Pick:
    """A matrix product: cuBLAS against 16 configurations of Triton's template, `fastest` of which wins."""
    templates = [
        Candidate(
            "triton_mm",
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_stages": stages, "num_warps": warps},
            round(0.0211 * (1 + 0.09 * abs(index - fastest) ** 1.6), 5) if index != 8 else None,
        )
        for index, (m, n, k, stages, warps) in enumerate(BLOCKS)
    ]
    timed = sorted([*templates, Candidate("extern_addmm", {}, 0.0224)], key=lambda c: c.ms or float("inf"))
    return Pick(
        kind="operator",
        subject="addmm",
        candidates=tuple(timed),
        inputs=(
            "bfloat16[4096] stride [1] cuda",
            f"bfloat16[{tokens}, 1024] stride [1024, 1] cuda",
            "bfloat16[1024, 4096] stride [1, 1024] cuda",
        ),
        output=f"bfloat16[{tokens}, 4096] stride [4096, 1] cuda",
        uses=12,
    )


def picks(tokens: int, fastest: int = 3) -> tuple[Pick, ...]:
    pointwise = [
        Candidate("config", {"XBLOCK": block, "num_warps": warps}, ms)
        for block, warps, ms in ((1024, 4, 0.00512), (512, 4, 0.00518), (512, 8, 0.00561), (128, 2, 0.0093))
    ]
    return (
        operator_pick(tokens, fastest),
        Pick(
            "fusion",
            "addmm + gelu",
            (Candidate("fused", {}, 0.0264, 0.034, 40), Candidate("separate", {}, 0.0291, 0.03, 40)),
            output=f"bfloat16[{tokens}, 4096]",
        ),
        Pick("kernel", "triton_poi_fused_addmm_gelu_view_2", tuple(pointwise)),
    )


def put(store: Store, name: str, data: bytes) -> File:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        return store.blobs.put_file_zstd(path, name=name)


def put_report(store: Store, parts: tuple[Kernel, ...], operators: int = 18) -> File:
    return put(store, "report.json", canonical_json(Report(parts, operators)))


def put_picks(store: Store, bucket: Bucket, chosen: tuple[Pick, ...], schema: int = PICKS_SCHEMA_VERSION) -> File:
    unit = UnitPicks("gpt", bucket, TARGET, "2.13.0", DEVICE, chosen, triton="3.4.0")
    return put(store, "picks.json", canonical_json(PickFile(schema, (unit,))))


def make_variant(store: Store, bucket: Bucket, tokens: int, library: bytes = b"", **fields: Any) -> BuiltVariant:
    whole: dict[str, Any] = {
        "bucket": bucket,
        "key": sha256_bytes(b"key of " + bucket_name(bucket).encode()),
        "library": "model.so",
        "files": (put(store, "model.so", library or f"library for {tokens} tokens\n".encode() * tokens),),
        "arguments": (Argument(state="weight"), Argument(leaf=0)),
        "outputs": (Output(index=0, dims=("batch", "seq", "")),),
        "output_tree": 0,
        "launch": LaunchPick(True, direct_ms=0.66, graph_ms=0.605, reason="measured"),
        "report": put_report(store, kernels(tokens)),
        "picks": put_picks(store, bucket, picks(tokens)),
    }
    return BuiltVariant(**{**whole, **fields})


def make_artifact(variants: tuple[BuiltVariant, ...], **fields: Any) -> BuiltArtifact:
    whole: dict[str, Any] = {
        "model": "gpt",
        "target": TARGET,
        "environment": Environment(
            os="linux", machine="x86_64", torch="2.13.0", libc="2.34", cuda_capability="9.0", cuda="12.8", gpu=DEVICE
        ),
        "signature": Signature(
            parameters=(Parameter("ids", 0), Parameter("mask", 1), Parameter("causal", 2, default=True)),
            leaves=(
                TensorLeaf("ids", "int64", ("batch", "seq"), pad={"seq": PadRule(0)}),
                TensorLeaf("mask", "bool", ("batch", "seq")),
                ConstantLeaf("causal", True),
            ),
        ),
        "state": (StateSpec("weight", "bfloat16", (1024, 4096), (4096, 1)),),
        "module": ModuleGuard("GPT", False, {"GPT": sha256_bytes(b"class GPT")}, sha256_bytes(b"{}")),
        "ambient": Ambient(
            autocast=None, default_dtype="float32", float32_matmul_precision="high", deterministic=False
        ),
        "variants": variants,
        "options": {"max_autotune": True},
        "manifest": {"name": "gpt", "factory": "models:gpt"},
    }
    return small_artifact(**{**whole, **fields})


def sample_store(folder: Path, buckets: int = 2, **fields: Any) -> Store:
    """A store with the model `gpt` in so many buckets, and the units of its build."""
    store = Store.create(folder)
    variants = tuple(make_variant(store, {"batch": n, "seq": 128}, 128 * n) for n in range(1, buckets + 1))
    artifact = make_artifact(variants, **fields)
    put_units(store, artifact)
    publish(store, "gpt", "latest", [artifact], created=CREATED)
    return store


def put_units(store: Store, artifact: BuiltArtifact) -> None:
    """One after the other, each of them 20 seconds and a bit."""
    for index, variant in enumerate(artifact.variants):
        ended = 30 * (index + 1)
        created = f"2026-01-02T03:{ended // 60:02}:{ended % 60:02}Z"
        one = msgspec.structs.replace(artifact, variants=(variant,))
        factors = {"bucket": msgspec.to_builtins(variant.bucket), "compiler": "12.2.0"}
        stages = {
            "model": StageCost(3.0, 1.0),
            "export": StageCost(4.0, 2.5),
            "import": StageCost(0.5, 2.5),
            "compile": StageCost(6.5, 11.5, 900 << 20, {"autotuning": 4.0}),
            "smoke run": StageCost(18.0, 1.5),
            "store": StageCost(19.5, 1.5 + index % 5 - 1),
        }
        times = CallTimes(Spread(0.6, 0.63, 100), Spread(1.2, 1.25, 50))
        put_unit(store, UnitRecord(variant.key, factors, one, 20.0 + index % 5, created, stages=stages, times=times))
