"""Decide whether a matrix product is padded."""

from __future__ import annotations

from typing import Any

from aotc.compiler.autotune.picker import Hook, Picker, with_time
from aotc.compiler.patches.shared.inductor import inductor
from aotc.picks import Candidate, Pick

PADDED, UNPADDED = "padded", "as it is"


def padding_hooks(picker: Picker) -> list[Hook]:
    """Hooks for the padding of a matrix product to better aligned sizes."""
    pad_mm = inductor("fx_passes.pad_mm")
    cached, compare, timer = pad_mm.get_cached_should_pad, pad_mm.is_padded_faster, pad_mm.get_do_bench

    def question(key: str) -> Pick:
        return Pick(kind="padding", subject="matrix product", candidates=(), inputs=(str(key),))

    def known(key: str) -> Any:
        if pin := picker.pin_for(question(key)):
            picker.take(pin)
            return pin.winner.name == PADDED
        if shared := picker.find_shared(question(key).identity):
            picker.take_shared(shared)
            return shared.winner.name == PADDED
        known_to_torch = cached(key)
        if known_to_torch is None and picker.must_not_measure(question(key)):
            return False  # before the operands are made, perhaps for a GPU that is absent
        return known_to_torch

    def compared(key: str, ori_time: float, pad_time: float) -> bool:
        padded = bool(compare(key, ori_time, pad_time))
        timed = with_time(Candidate(PADDED), pad_time), with_time(Candidate(UNPADDED), ori_time)
        picker.keep(question(key), timed, timed[0] if padded else timed[1], question(key).identity)
        return padded

    def counting() -> Any:
        bench = timer()

        def timed(function: Any) -> Any:
            picker.measurements += 1
            return bench(function)

        return timed

    return [
        (pad_mm, "get_cached_should_pad", known),
        (pad_mm, "is_padded_faster", compared),
        (pad_mm, "get_do_bench", counting),
    ]
