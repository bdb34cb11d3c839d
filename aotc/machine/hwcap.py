"""The features of an aarch64 CPU, as Linux tells them to each process."""

from __future__ import annotations

import ctypes

_HWCAP = (
    *("fp", "asimd", "evtstrm", "aes", "pmull", "sha1", "sha2", "crc32", "atomics", "fphp", "asimdhp", "cpuid"),
    *("asimdrdm", "jscvt", "fcma", "lrcpc", "dcpop", "sha3", "sm3", "sm4", "asimddp", "sha512", "sve", "asimdfhm"),
    *("dit", "uscat", "ilrcpc", "flagm", "ssbs", "sb", "paca", "pacg"),
)
_HWCAP2 = (
    *("dcpodp", "sve2", "sveaes", "svepmull", "svebitperm", "svesha3", "svesm4", "flagm2", "frint", "svei8mm"),
    *("svef32mm", "svef64mm", "svebf16", "i8mm", "bf16", "dgh", "rng", "bti"),
)
"""The features of aarch64 in the order of their bits (`asm/hwcap.h` of Linux)."""


def aarch64_flags() -> frozenset[str]:
    """In Linux's names; with SVE, the length of its vectors in bits is added, as `sve256`."""
    told = [(_HWCAP, _auxiliary_value(16)), (_HWCAP2, _auxiliary_value(26))]  # AT_HWCAP, AT_HWCAP2
    flags = {name for names, bits in told for bit, name in enumerate(names) if bits >> bit & 1}
    return frozenset(flags | {f"sve{_sve_bits()}"} if "sve" in flags else flags)


def _auxiliary_value(kind: int) -> int:
    """What the kernel told this process at its start (man 3 getauxval)."""
    function = ctypes.CDLL(None).getauxval
    function.argtypes, function.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return int(function(kind))


def _sve_bits() -> int:
    """The length of this process's SVE vectors (`PR_SVE_GET_VL`, man 2 prctl); 0 without SVE."""
    length: int = ctypes.CDLL(None).prctl(51)
    return max(length, 0) % 0x10000 * 8
