"""The GPU's code in a compiled library."""

from __future__ import annotations

EM_CUDA = 190


def cubins_of(library: bytes) -> list[bytes]:
    """Each ELF file for a GPU in a library's bytes, from its beginning to the library's end."""
    found, at = [], library.find(b"\x7fELF")
    while at >= 0:
        if int.from_bytes(library[at + 18 : at + 20], "little") == EM_CUDA:
            found.append(library[at:])
        at = library.find(b"\x7fELF", at + 1)
    return found


def is_for(cubin: bytes, architecture: int) -> bool:
    """Whether code is for `sm_90`, given as 90. Which byte of the flags says so depends on the ABI's version."""
    flags = int.from_bytes(cubin[48:52], "little")
    return architecture in (flags & 0xFF, flags >> 8 & 0xFF)
