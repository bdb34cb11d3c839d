"""The inverse of a spectrogram, with a `length` that is a size of a range.

`torch.istft` needs its `length` as a number, so torch.export specialises the range to one length. Here the signal is
computed in full, then cropped or padded, as `torch.istft` does; by indices, since the size decides which of the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def inverse_of_a_range(
    spectrum: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> Tensor:
    options: Any = {"normalized": normalized, "onesided": onesided, "return_complex": return_complex}
    if length is None or isinstance(length, int):
        return torch.istft(spectrum, n_fft, hop_length, win_length, window, center=center, length=length, **options)
    signal = torch.istft(spectrum, n_fft, hop_length, win_length, window, center=False, **options)
    samples = torch.arange(length, device=signal.device) + (n_fft // 2 if center else 0)
    last = signal.shape[-1] - 1
    return torch.where(samples <= last, signal[..., samples.clamp(max=last)], 0)
