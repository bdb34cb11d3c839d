"""What a call spends on noticing changes of its module: python tests/benchmarks/noticed.py [BLOCKS]…

Of modules of that many blocks, each a linear layer, a norm and a dropout, with attributes as an adapter's layer has.
Microseconds a call, the best of many.
"""

from __future__ import annotations

import argparse
import timeit

import torch
from torch import nn

from aotc.reads.state_specs import state_specs
from aotc.reads.tensors import named_state
from aotc.reads.watch import ModuleWatch
from aotc.runtime.state.weights import ModuleState


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale, self._active, self.scaling = 4, 1.0, ["a"], {"a": 1.0}
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1)


READS = (
    *(f"Block.{name}" for name in ("heads", "scale", "_active", "scaling")),
    *("Dropout.p", "Dropout.inplace", "LayerNorm.eps", "LayerNorm.normalized_shape"),
)


def main(counts: list[int]) -> None:
    for count in counts:
        module = nn.Sequential(*(Block() for _ in range(count))).eval()
        state = named_state(module)
        taken = ModuleState(module, state_specs(state, state, digests=False), torch.device("cpu"))
        watch = ModuleWatch(module, READS, (), "model")
        with torch.no_grad():
            times = [min(timeit.repeat(look, number=100, repeat=100)) / 100 * 1e6 for look in (taken.take, watch.check)]
        print(
            f"{len(list(module.modules()))} modules, {len(state)} tensors: submodules and tensors {times[0]:.1f} µs; "
            f"attributes, forwards and hooks {times[1]:.1f} µs"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", type=int, nargs="*", default=[1, 37])
    main(parser.parse_args().blocks)
