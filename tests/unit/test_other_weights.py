"""Other weights to verify with: every one is another, and of the kind that it was."""

from __future__ import annotations

import copy

import torch
from torch import nn

from aotc.verify.other_weights import change_weights, copy_state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4, dtype=torch.bfloat16)
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
        self.ids = nn.Parameter(torch.arange(3), requires_grad=False)
        self.quantised = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
        nn.init.zeros_(self.head.bias)


def test_parameters_are_others_of_the_same_sign_and_size_and_all_else_stays() -> None:
    module = Model()
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    assert change_weights(module, seed=0) == 7
    after = module.state_dict()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed == {"embedding.weight", "head.weight", "head.bias", "norm.weight", "norm.bias", "norm.running_var"}
    assert after["norm.running_var"].min() >= 0.5 and after["norm.running_var"].max() <= 1
    for name in ("embedding.weight", "head.weight"):
        ratio = after[name] / before[name]
        assert 0.49 < ratio.min() < 0.9 and 1.1 < ratio.max() < 1.51
    assert after["head.bias"].min() > 0 and after["head.bias"].max() < 0.03
    assert module.head.weight is module.embedding.weight
    assert after["mask"].tolist() == [0.0, -torch.inf]


def test_another_seed_gives_others_and_the_same_seed_the_same() -> None:
    modules = [nn.Linear(4, 4) for _ in range(3)]
    first = copy.deepcopy(modules[0])
    for module, seed in zip(modules, (1, 1, 2), strict=True):
        module.load_state_dict(first.state_dict())
        change_weights(module, seed)
    assert torch.equal(modules[0].weight, modules[1].weight)
    assert not torch.equal(modules[0].weight, modules[2].weight)


def test_a_copy_in_float64_gets_the_same_values() -> None:
    module = Model()
    wide = copy.deepcopy(module).double()
    change_weights(module, seed=0)
    copy_state(module, wide)
    assert all(
        torch.equal(tensor.double(), wide.state_dict()[name].double()) for name, tensor in module.state_dict().items()
    )
