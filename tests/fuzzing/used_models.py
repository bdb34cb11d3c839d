"""Models of uses.yaml: each small, with one habit that decides what its backward has to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Mlp(nn.Module):
    """A loss that depends on another result, and a parameter without axes."""

    def __init__(self, width: int = 8, depth: int = 1) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 4)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.enter(x))
        for layer in self.middle:
            hidden = hidden + torch.sin(layer(hidden))
        out = self.leave(hidden) * self.scale
        return {"hidden": hidden, "out": out, "loss": F.mse_loss(out, y)}


class Heads(nn.Module):
    """Two heads, of which a step may use one, a parameter that nothing uses, and a frozen layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8).requires_grad_(False)
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.trunk(x))
        return self.left(hidden).square().mean(), self.right(hidden).exp().sum(-1)


class Images(nn.Module):
    """Convolutions and batch norm; the result is a view in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.first(x)))
        return self.second(F.avg_pool2d(hidden, 2)).permute(0, 2, 3, 1)


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Language(nn.Module):
    """Tied embeddings, of which one row has no gradient, and labels that are left out."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8, padding_idx=0, sparse=sparse)
        self.head = nn.Linear(8, 12, bias=False)
        if not sparse:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.tokens(ids)))
        labels = ids[:, 1:].masked_fill(ids[:, 1:] == 3, -100)
        return {"logits": logits, "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())}


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer: nn.RNNBase = getattr(nn, kind)(8, 6, batch_first=True, bidirectional=kind == "GRU")

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class _Clipped(torch.autograd.Function):
    """The sign, whose gradient is that of a clamp: a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(_Clipped.apply(self.enter(x) * 2))


class Hooked(nn.Module):
    """forward registers a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return self.leave(hidden)


class Normed(nn.Module):
    """A parametrized weight, and a norm of gradient without bound at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layer(x), dim=-1)


class Views(nn.Module):
    """Results that are views of one another, and of memory that they share with a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.layer(x))
        return hidden, hidden.t(), hidden[:, 2:5]


class Same(nn.Module):
    """Results that are the input, a parameter, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.sigmoid(self.layer(x))
        return x, y, y, self.layer.weight


class Saturated(nn.Module):
    """Functions that are flat in places: their gradient depends on a comparison that is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = (self.layer(x) * 4).chunk(4, -1)
        return F.hardtanh(a) + F.relu6(b * 3) + c.clamp(-0.5, 1.5) + torch.where(d > 0, d, d.exp())


class Spectral(nn.Module):
    """Complex numbers between."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.rand(5, 2))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.layer(x)) * torch.view_as_complex(self.filter), n=8)


class Scattered(nn.Module):
    """Reads and writes at indices, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.rand(6, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        summed = torch.zeros_like(self.table).index_add(0, at, self.layer(x)) + self.table
        return summed[at] * x + summed.gather(0, at[:, None].expand(-1, 8))


class Ordered(nn.Module):
    """Orders, largest values and running sums; one result is of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        best, place = hidden.topk(3, -1)
        return {"best": best, "place": place, "sums": hidden.sort(-1).values.cumsum(-1), "most": hidden.amax(0)}


class InPlace(nn.Module):
    """Writes to intermediate values, also to a part of one and before another use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        powers = hidden.exp()
        hidden.mul_(0.5).add_(x)
        hidden[:, :3] = torch.tanh(powers[:, :3])
        return F.relu(hidden, inplace=True) + powers


class Stopped(nn.Module):
    """Gradients that are stopped, and a straight-through estimator of `detach`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.judge = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        with torch.no_grad():
            target = self.judge(hidden).softmax(-1)
        rounded = hidden + (hidden.round() - hidden).detach()
        return rounded * target, F.mse_loss(hidden, target)


class Nested(nn.Module):
    """Arguments and results within others; results that are not tensors, or have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: dict[str, Tensor], scale: float = 2.0) -> dict[str, Any]:
        out = self.layer(batch["x"]) * scale
        return {"all": [out, (out.exp(), None)], "count": 3, "mask": out > 0, "constant": torch.ones(2)}


class Average(nn.Module):
    """A buffer that forward writes to, and that the result depends on as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.full((8,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        centred = (hidden - self.mean) * self.mean.exp()
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return centred * hidden


class Solved(nn.Module):
    """Linear algebra."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.eye(4) + 0.1 * torch.rand(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positive = self.factor @ self.factor.t() + torch.eye(4)
        return torch.linalg.solve(positive, x), torch.linalg.cholesky(positive).logdet()


def mlp() -> nn.Module:
    return Mlp()


def deep() -> nn.Module:
    return Mlp(width=12, depth=5)


def heads() -> nn.Module:
    return Heads()


def images() -> nn.Module:
    return Images()


def attention() -> nn.Module:
    return Attention()


def language() -> nn.Module:
    return Language()


def sparse() -> nn.Module:
    return Language(sparse=True)


def gru() -> nn.Module:
    return Recurrent("GRU")


def lstm() -> nn.Module:
    return Recurrent("LSTM")


def clipped() -> nn.Module:
    return Clipped()


def hooked() -> nn.Module:
    return Hooked()


def normed() -> nn.Module:
    return Normed()


def views() -> nn.Module:
    return Views()


def same() -> nn.Module:
    return Same()


def saturated() -> nn.Module:
    return Saturated()


def spectral() -> nn.Module:
    return Spectral()


def scattered() -> nn.Module:
    return Scattered()


def ordered() -> nn.Module:
    return Ordered()


def in_place() -> nn.Module:
    return InPlace()


def stopped() -> nn.Module:
    return Stopped()


def nested() -> nn.Module:
    return Nested()


def average() -> nn.Module:
    return Average()


def solved() -> nn.Module:
    return Solved()
