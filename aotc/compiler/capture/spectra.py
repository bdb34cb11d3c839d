"""The inverse of a spectrogram, with as many samples as an input has, over a range of them.

`torch.istft` takes its `length` for a number, so torch.export makes one length of a range. Here the signal is computed
in full, and cut, or padded, as `torch.istft` does: by indices, since which of the two depends on the size.
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
    options = {"normalized": normalized, "onesided": onesided, "return_complex": return_complex}
    if not isinstance(length, torch.SymInt):
        return torch.istft(spectrum, n_fft, hop_length, win_length, window, center=center, length=length, **options)
    signal = torch.istft(spectrum, n_fft, hop_length, win_length, window, center=False, **options)
    samples = torch.arange(length, device=signal.device) + (n_fft // 2 if center else 0)
    last = signal.shape[-1] - 1
    return torch.where(samples <= last, signal[..., samples.clamp(max=last)], 0)
