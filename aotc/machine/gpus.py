"""The properties of GPUs that code for them depends on: for a build on a machine that has another one, or none.

What a compute capability fixes is from NVIDIA's CUDA C++ Programming Guide (13.0), section "Compute Capabilities",
table "Technical Specifications per Compute Capability". What a product adds (multiprocessors, memory, second-level
cache, bus, clocks) is from the data sheet or white paper that `source` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aotc.records import Record

if TYPE_CHECKING:
    from aotc.machine.targets import Target

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Gpu(Record, frozen=True):
    """A GPU as code for it sees it: bytes of memory and of second-level cache, width of the memory bus in bits, clocks
    in kHz (the boost clock, and that of the memory)."""

    name: str
    target: str
    multiprocessors: int
    memory: int
    l2_cache: int
    bus_width: int = 0
    clock: int = 0
    memory_clock: int = 0
    source: str = ""


class _Capability(NamedTuple):
    """Limits of a multiprocessor; shared memory in bytes, of all blocks and of one."""

    threads: int
    blocks: int
    shared: int
    shared_of_block: int


_CAPABILITIES = {
    "8.0": _Capability(2048, 32, 164 * KIB, 163 * KIB),
    "8.6": _Capability(1536, 16, 100 * KIB, 99 * KIB),
    "8.9": _Capability(1536, 24, 100 * KIB, 99 * KIB),
    "9.0": _Capability(2048, 32, 228 * KIB, 227 * KIB),
    "10.0": _Capability(2048, 32, 228 * KIB, 227 * KIB),
    "12.0": _Capability(1536, 24, 100 * KIB, 99 * KIB),
}

_A100 = "NVIDIA A100 Tensor Core GPU Architecture, white paper; A100 80GB data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, white paper; A10 and A40 data sheets"
_ADA = "NVIDIA Ada GPU Architecture, white paper; L4 and L40S data sheets"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture, white paper; H200 data sheet"
_B200 = "NVIDIA Blackwell Architecture Technical Brief; HGX B200 data sheet"
_GB202 = "NVIDIA RTX Blackwell GPU Architecture, white paper; RTX PRO 6000 Blackwell data sheet"

GPUS = (
    Gpu("NVIDIA A100-SXM4-80GB", "cuda:sm_80", 108, 80 * GIB, 40 * MIB, 5120, 1_410_000, 1_593_000, _A100),
    Gpu("NVIDIA A100-SXM4-40GB", "cuda:sm_80", 108, 40 * GIB, 40 * MIB, 5120, 1_410_000, 1_215_000, _A100),
    Gpu("NVIDIA A100 80GB PCIe", "cuda:sm_80", 108, 80 * GIB, 40 * MIB, 5120, 1_410_000, 1_512_000, _A100),
    Gpu("NVIDIA A10", "cuda:sm_86", 72, 24 * GIB, 6 * MIB, 384, 1_695_000, 6_251_000, _GA102),
    Gpu("NVIDIA A40", "cuda:sm_86", 84, 48 * GIB, 6 * MIB, 384, 1_740_000, 7_251_000, _GA102),
    Gpu("NVIDIA L40S", "cuda:sm_89", 142, 48 * GIB, 96 * MIB, 384, 2_520_000, 9_001_000, _ADA),
    Gpu("NVIDIA L4", "cuda:sm_89", 58, 24 * GIB, 48 * MIB, 192, 2_040_000, 6_251_000, _ADA),
    Gpu("NVIDIA H100 80GB HBM3", "cuda:sm_90", 132, 80 * GIB, 50 * MIB, 5120, 1_980_000, 2_619_000, _H100),
    Gpu("NVIDIA H100 PCIe", "cuda:sm_90", 114, 80 * GIB, 50 * MIB, 5120, 1_755_000, 1_593_000, _H100),
    Gpu("NVIDIA H200", "cuda:sm_90", 132, 141 * GIB, 60 * MIB, 6144, 1_980_000, 3_201_000, _H100),
    Gpu("NVIDIA B200", "cuda:sm_100", 148, 180 * GIB, 126 * MIB, 8192, 1_965_000, 3_996_000, _B200),
    Gpu("NVIDIA GeForce RTX 5090", "cuda:sm_120", 170, 32 * GIB, 96 * MIB, 512, 2_407_000, 14_001_000, _GB202),
    Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "cuda:sm_120",
        188,
        96 * GIB,
        128 * MIB,
        512,
        2_430_000,
        14_001_000,
        _GB202,
    ),
)
"""The first of a target stands for it where nothing says which GPU its code is tuned for."""


def known_targets() -> tuple[str, ...]:
    """The targets of the table, in its order."""
    return tuple(dict.fromkeys(gpu.target for gpu in GPUS))


def gpu_for(target: str, name: str = "") -> Gpu | None:
    """The GPU of that name, else the target's representative; None for a target that is not in the table."""
    of_target = [gpu for gpu in GPUS if gpu.target == target.partition("@")[0]]
    return next((gpu for gpu in of_target if gpu.name == name), of_target[0] if of_target else None)


def attributes(gpu: Gpu, target: Target) -> dict[int, int]:
    """The GPU's CUDA attributes, by the numbers of `CUdevice_attribute`, which are those of `cudaDeviceAttr`."""
    limits = _CAPABILITIES[target.capability]
    major, minor = map(int, target.capability.split("."))
    return {
        1: 1024,  # threads of a block
        2: 1024,  # … and along each axis
        3: 1024,
        4: 64,
        5: 2**31 - 1,  # blocks of a grid along each axis
        6: 65535,
        7: 65535,
        8: 48 * KIB,  # shared memory of a block, unless it asks for more
        9: 64 * KIB,  # constant memory
        10: 32,  # threads of a warp
        11: 2**31 - 1,  # pitch
        12: 64 * KIB,  # registers of a block
        13: gpu.clock,
        14: 512,  # alignment of textures
        15: 1,  # copies beside kernels
        16: gpu.multiprocessors,
        19: 1,  # host memory can be mapped
        31: 1,  # kernels run side by side
        36: gpu.memory_clock,
        37: gpu.bus_width,
        38: gpu.l2_cache,
        39: limits.threads,
        40: 3,  # copy engines
        41: 1,  # one address space
        75: major,
        76: minor,
        78: 1,  # streams have priorities
        79: 1,  # global and local memory are cached
        80: 1,
        81: limits.shared,
        82: 64 * KIB,  # registers of a multiprocessor
        83: 1,  # managed memory
        95: 1,  # cooperative launches
        97: limits.shared_of_block,
        106: limits.blocks,
        111: KIB,  # shared memory that the driver takes of each block
    }
