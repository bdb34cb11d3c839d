"""AdamW's step alone: torch's fused operator, its foreach implementation, and Inductor's code. A script, not a test.

    python tests/benchmarks/optimizers.py                  # a GPT of 6 layers, width 384: 11 million parameters
    python tests/benchmarks/optimizers.py --device cuda    # of 12 layers, width 768: 110 million

`inductor` is `torch.compile` of the foreach step; `inductor, flat` of AdamW over one tensor of all parameters, which is
the best that a compiler could do. Steps of all contenders take turns, each with tensors of its own: milliseconds, the
least and the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]  # `cuda.py` is not torch's
sys.path[:0] = [str(HERE.parents[1])]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import aotc  # noqa: E402
from tests.benchmarks.training_models import gpt  # noqa: E402

SIZES = {
    "cpu": {"layers": 6, "width": 384, "heads": 4, "vocabulary": 1000, "length": 64},
    "cuda": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32000, "length": 512},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    device = torch.device(options.device)

    def parameters() -> list[Tensor]:
        found = [*gpt(**SIZES[options.device]).to(device).parameters()]
        for each in found:
            each.grad = torch.randn_like(each)
        return found

    count = sum(each.numel() for each in parameters())
    print(f"{count / 1e6:.1f} million parameters, torch {torch.__version__}, {options.device}", flush=True)
    lr = torch.tensor(3e-4, device=device)
    compiled: dict[str, Callable[[], object]] = {
        "inductor": torch.compile(
            torch.optim.AdamW(parameters(), lr=lr, capturable=True, foreach=True).step
            if device.type == "cuda"
            else torch.optim.AdamW(parameters(), lr=3e-4, foreach=True).step
        ),
        "inductor, flat": flat_step(count, lr, device),
    }
    steps = {
        "fused (aotc.optim)": aotc.optim.AdamW(parameters(), lr=3e-4).step,
        "foreach (torch.optim)": torch.optim.AdamW(parameters(), lr=3e-4, foreach=True).step,
        **compiled,
    }
    times: dict[str, list[float]] = {}
    for name, step in steps.items():
        began = time.perf_counter()
        step()
        print(f"{name}: first step {time.perf_counter() - began:.2f} s", flush=True)
    for _ in range(options.steps):
        for name, step in steps.items():
            times.setdefault(name, []).append(timed(step, device))
    for name, taken in times.items():
        print(f"{name}: least {min(taken):.2f} ms, median {statistics.median(taken):.2f} ms", flush=True)


def flat_step(count: int, lr: Tensor, device: torch.device) -> Callable[[], object]:
    def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor) -> None:
        step.add_(1)
        p.mul_(1 - lr * 0.01)
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.sub_(lr / (1 - 0.9**step) * m / (v.sqrt() / (1 - 0.999**step).sqrt() + 1e-8))

    p, g = torch.randn(count, device=device), torch.randn(count, device=device)
    m, v, step = torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), device=device)
    compiled = torch.compile(adamw)
    return lambda: compiled(p, g, m, v, step, lr)


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
