"""Numbers, memory and old values that a compiler gets wrong easily are eager's."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import Gpu

pytestmark = pytest.mark.cuda


def test_each_is_eagers_in_every_call(gpu: Gpu) -> None:
    compiled, module = gpu.loaded("particular")
    tokens = torch.tensor([0, 5, 3, 2, 1, 4], device="cuda")
    with torch.no_grad():
        for call in range(3):
            generator = torch.Generator("cuda").manual_seed(call)
            hidden, experts = torch.randn(2, 6, 8, device="cuda", generator=generator).bfloat16()
            z = torch.randn(4, 3, dtype=torch.complex64, device="cuda", generator=generator)
            z[1, 1] = 0
            changed, expected = hidden.clone(), hidden.clone()
            torch.testing.assert_close(compiled(changed, experts, tokens, z), module(expected, experts, tokens, z))
            torch.testing.assert_close(changed, expected)


def test_experts_are_given_their_own_tokens(gpu: Gpu) -> None:
    compiled, module = gpu.loaded("experts")
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(40, 64, device="cuda", generator=generator).bfloat16()
        chosen = torch.randint(0, 4, (40,), device="cuda", generator=generator)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, chosen), module(x, chosen))
