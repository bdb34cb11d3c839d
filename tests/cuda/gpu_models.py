"""Tiny models for the tests on a GPU, each with one habit that CUDA graphs or GPUs make interesting."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention


class Mlp(nn.Module):
    """A feed-forward block; each row by itself, so rows that were padded in change nothing."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stateful(nn.Module):
    """Writes to its buffers, a counter of calls and a cache of keys, and to its input `total`."""

    def __init__(self, length: int = 16, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, position: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(0, position.reshape(1), self.project(x))
        self.steps.add_(1)
        total.add_(x)
        seen = torch.arange(self.keys.shape[0], device=x.device) <= position
        return (self.keys * seen[:, None]).sum(0), self.steps * 10


class Linear(nn.Module):
    """One linear layer."""

    def __init__(self, width: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class RoundTrip(nn.Module):
    """An operator on the CPU in the middle: a host synchronisation, which no CUDA graph can hold."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + y.cpu().sin().to(y.device)


class Last(nn.Module):
    """A row of each sequence, by its position, as of a prompt's last token: `[batch, seq, 64]` and `[batch]`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return self.linear(x[torch.arange(x.shape[0], device=x.device), position])


class Windowed(nn.Module):
    """A window that torch makes anew in each call, on the input's device."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.hann_window(x.shape[-1], device=x.device) * self.gain


class LargeInside(nn.Module):
    """Small inputs and outputs, and scores of rows × rows between them."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.T).softmax(-1) @ x


def expanded(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """An example input of any size that takes no memory on the CPU."""
    return torch.zeros((), dtype=dtype).expand(shape)


class Attention(nn.Module):
    """Causal attention of heads of 64, `[batch, seq, 3 * width]` to `[batch, seq, width]`, and nothing else."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, qkv: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in qkv.chunk(3, -1))
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2) * self.scale


class Airy(nn.Module):
    """An operator that torch has NVRTC compile when it is called first, and Inductor leaves to it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.airy_ai(x) * self.scale


class Quotients(nn.Module):
    """Rounded quotients and remainders, where a GPU's quotients are approximate."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        position = torch.arange(2049, device=x.device).half()  # as DETR's; all that float16 holds exactly
        return x // y, torch.div(x, y, rounding_mode="trunc"), x % y, x // 0.1, position // 2


class FewRows(nn.Module):
    """FlexAttention of a query that is computed from a transposed tensor, as by rotary embeddings."""

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        query = x.unflatten(-1, (8, 64)).transpose(1, 2) * 1.5
        result: Tensor = flex_attention(query, key, key + 1, enable_gqa=True)
        return result


class ExtremeValues(nn.Module):
    """What torch's compiler was wrong for: NaN and infinity times 0, near quotients,
    integer quotients by a plain attribute, which stays on the CPU, and minima of int8."""

    def __init__(self) -> None:
        super().__init__()
        self.three = torch.tensor(3)

    def forward(self, y: Tensor, x: Tensor, by: Tensor, whole: Tensor, short: Tensor) -> tuple[Tensor, ...]:
        return (
            *(y * 0, y * 0.0 + 1, 0 / y, y**-0.5, y.acosh(), y.asinh()),
            *(y.sinc(), *y.frexp(), y.masked_fill(y < 0, -torch.inf).softmax(-1)),
            *(torch.div(x, by, rounding_mode=mode) for mode in ("trunc", "floor")),
            *(torch.floor_divide(whole, self.three), whole // self.three, whole % self.three),
            *(torch.div(whole, self.three, rounding_mode="trunc"), -whole, whole * whole),
            *(short.amin(), short.amax(), short.argmin(), short.argmax(), short.sum(dtype=torch.int8)),
        )


class ColumnSums(nn.Module):
    """Rows' maxima and columns' sums of what is not 0 where `x` is: of one pass over `x`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + 0.25
        return y.max(dim=-1).values, y.float().sum(dim=0)


class Experts(nn.Module):
    """Each token by the expert that is `chosen` for it, in one grouped product, as transformers computes on Hopper."""

    def __init__(self, count: int = 4, width: int = 64) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(count, width, 2 * width) * width**-0.5)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        chosen, order = chosen.sort(stable=True)
        ends = (chosen[None] <= torch.arange(len(self.weights), device=x.device)[:, None]).sum(1, dtype=torch.int32)
        return torch._grouped_mm(x[order], self.weights, offs=ends)[order.argsort()]


class Particular(nn.Module):
    """Operators whose numbers, memory and old values a compiler gets wrong easily; see each one's test on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6, 8))
        self.register_buffer("rows", torch.arange(48.0).view(6, 8))

    def forward(self, hidden: Tensor, experts: Tensor, tokens: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        late = experts[experts.shape[0] // 2 :]
        before = self.seen.slice_scatter(self.seen.narrow(1, 0, 1) * 2, 1, 0, 1)
        self.seen.copy_(experts)
        self.rows.diagonal().fill_(3)
        self.rows[1:] = self.rows[:-1].clone()
        self.rows[0] = hidden[0]
        doubled = hidden.index_add(0, tokens, experts, alpha=2)
        hidden.index_add_(0, tokens, experts)
        return (
            doubled,
            late.as_strided((3, 2), (8, 1)),
            before,
            self.rows * 2,
            z - z.flip(0),
            1j - z,
            z / 2j,
            z.masked_fill(z == 0, 1j),
        )


class Depthwise(nn.Module):
    """Depthwise convolutions of images, `[batch, 3, height, width]` to `[batch, channels]`, between ordinary ones."""

    def __init__(self, channels: int = 96) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.wide = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.strided = nn.Conv2d(channels, channels, 5, stride=2, padding=2, groups=channels, bias=False)
        self.narrow = nn.Conv2d(channels, channels, (3, 1), padding=(0, 1), groups=channels)
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.mix(F.gelu(self.wide(x)))
        return self.narrow(F.gelu(self.strided(x))).mean((2, 3))


class StreamBlock(nn.Module):
    """A double-stream block as Flux has it, text and image in one attention with rotary positions, both modulated:
    `[1, image, width]`, `[1, text, width]`, `[1, width]` and angles `[image + text, width / heads / 2]` to the first
    two's shapes."""

    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.query_norm = nn.RMSNorm(width // heads)
        self.key_norm = nn.RMSNorm(width // heads)
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
            for _ in range(2)
        )

    def forward(self, image: Tensor, text: Tensor, vector: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        streams = [image, text]
        mods = [layer(F.silu(vector)).unsqueeze(1).chunk(6, dim=-1) for layer in self.modulation]
        width = image.shape[-1]
        projected = []
        for stream, mod, layer in zip(streams, mods, self.qkv, strict=True):
            normed = F.layer_norm(stream, [width]) * (1 + mod[1]) + mod[0]
            projected.append(layer(normed).unflatten(-1, (3, self.heads, width // self.heads)))
        query, key, value = torch.cat(projected, dim=1).permute(2, 0, 3, 1, 4).unbind(0)
        query, key = (self.rotated(norm(x), angles) for norm, x in ((self.query_norm, query), (self.key_norm, key)))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        results = []
        for stream, mod, out, mlp, part in zip(
            streams, mods, self.out, self.mlp, mixed.split([image.shape[1], text.shape[1]], dim=1), strict=True
        ):
            stream = stream + mod[2] * out(part)
            results.append(stream + mod[5] * mlp(F.layer_norm(stream, [width]) * (1 + mod[4]) + mod[3]))
        return results[0], results[1]

    @staticmethod
    def rotated(x: Tensor, angles: Tensor) -> Tensor:
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
