"""A small decode step whose kernels are compiled when it runs: by torch.compile, by Triton, by the driver from PTX."""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 numbers) {
  .reg .b64 %rd<4>;
  .reg .b32 %r<2>;
  .reg .f32 %f<3>;
  ld.param.u64 %rd1, [numbers];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd2, %rd2, %rd3;
  ld.global.f32 %f1, [%rd2];
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd2], %f2;
  ret;
}
\0"""


@triton.jit
def doubled(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * 2)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.transpose(1, 2) / 8, -1) @ value


def double_in_place(numbers: Tensor) -> None:
    """By a kernel that the driver compiles."""
    cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuModuleLoadData(ctypes.byref(module), PTX) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"twice") == 0
    address = ctypes.c_void_p(numbers.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(address), ctypes.c_void_p))
    torch.cuda.synchronize()
    assert cuda.cuLaunchKernel(function, 1, 1, 1, len(numbers), 1, 1, 0, None, arguments, None) == 0
    torch.cuda.synchronize()


if __name__ == "__main__":
    query, key, value = (torch.randn(4, tokens, 64, device="cuda") for tokens in (1, 128, 128))
    compiled = torch.compile(attended)(query, key, value)
    torch.testing.assert_close(compiled, attended(query, key, value), rtol=1e-3, atol=1e-3)
    numbers = torch.arange(64.0, device="cuda")
    result = torch.empty_like(numbers)
    doubled[(1,)](numbers, result, BLOCK=64)
    double_in_place(result)
    assert torch.equal(result, numbers * 4)
