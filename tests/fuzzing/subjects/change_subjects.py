"""Small modules of different kinds, each of which reads what a capture may bake in.

Each takes `x`, float32 [batch, 8].
"""

from __future__ import annotations

import enum
import logging
import math
import os
import threading
import weakref
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property, partial, singledispatch
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import change_helpers
import numpy as np
import torch
from change_helpers import ADD, LIMITS, SMOOTH, Tool, counted, curved, made, scaled, tripled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

RATE = 0.625
WHICH = "tanh"
FLAGS = [True, False]
TABLE = {"shift": 0.25, "nested": {"by": [2.0, 3.0]}}
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}
NOTHING = None
WEIGHTS = torch.linspace(0.5, 1.5, 8)
SHAPED = made(0.5, [0.25])


def halved(x: Tensor) -> Tensor:
    return x * 0.5


class Leaky(nn.Module):
    """A submodule without tensors."""

    slope = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class Slots(nn.Module):
    """Slots for tensors and modules that are None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.extra: nn.Module | None = None
        self.register_module("adapter", None)
        self.register_buffer("mask", None)
        self.register_parameter("gate", None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(self.first(x)))
        for factor in (self.mask, self.gate):
            if factor is not None:
                y = y * factor
        for part in (self.extra, self.adapter):
            if part is not None:
                y = part(y)
        return y


class Activations(nn.Module):
    """Modules without tensors: attributes, in containers, and one in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.last = Leaky(), nn.Hardtanh(-2.0, 2.0)
        self.unregistered = [nn.ELU()]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(x) + self.unregistered[0](x) - 0.1)


class Numbers(nn.Module):
    """Numbers, strings and flags as attributes."""

    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self._beta, self.count, self.on, self.none = 0.7, 1.3, 2, True, None
        self.mode, self._mode, self.far = "tanh", "plus", 3.5

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.alpha + self._beta
        for _ in range(self.count):
            y = y + 0.25
        if self.on:
            y = y * 2
        if self.none is not None:
            y = y * 0
        if self.kind == "other":
            y = y * 3
        y = torch.tanh(y) if self.mode == "tanh" else torch.relu(y)
        return y + 1 if self._mode == "plus" else y - 1


class Containers(nn.Module):
    """Containers as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.pair, self.weights = [0, 1, 2], (1.0, 2.0), {"a": 0.5, "b": {"c": [1.5, 2.5]}}
        self._private, self.ordered = {"k": 0.25}, OrderedDict(x=1.0, y=2.0)
        self.names, self.frozen, self.steps = {"tanh"}, frozenset({1, 2}), slice(0, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weights["a"] + self.weights["b"]["c"][0] + self._private["k"]
        for index in self.order:
            y = y + index * self.pair[index % 2]
        for name in self.ordered:
            y = y * self.ordered[name]
        if "tanh" in self.names:
            y = torch.tanh(y)
        return (y + len(self.frozen))[:, self.steps]


class Power:
    """An object of a class of one's own."""

    def __init__(self) -> None:
        self.power, self.deep, self._hidden = 2, {"k": [1.0, 2.0]}, 0.5

    @property
    def factor(self) -> float:
        return self._hidden * 2

    def apply(self, x: Tensor) -> Tensor:
        return x.abs() ** self.power * self.deep["k"][0] * self.factor


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("amount", "parts")

    def __init__(self) -> None:
        self.amount, self.parts = 0.5, [1.0]


class Objects(nn.Module):
    """Objects of classes of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.slotted, self.chain = Power(), Slotted(), [Power()]

    def forward(self, x: Tensor) -> Tensor:
        return self.power.apply(x) + self.slotted.amount * self.slotted.parts[0] + self.chain[0].power


@dataclass
class Config:
    width: int = 8
    rate: float = 0.5
    act: str = "tanh"
    limits: list[float] = field(default_factory=lambda: [-1.0, 1.0])


@dataclass(frozen=True)
class Fixed:
    gain: float = 1.5


class Shade(enum.Enum):
    LIGHT = 1
    DARK = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 4


Point = namedtuple("Point", "x y")


class Configured(nn.Module):
    """Dataclasses, enums, namespaces and named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.fixed, self.shade, self.level = Config(), Fixed(), Shade.LIGHT, Level.LOW
        self.space, self.point, self._config = SimpleNamespace(by=0.25, to=[1.0]), Point(1.0, 2.0), Config(rate=0.75)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.config.rate * self.fixed.gain + self._config.rate
        y = torch.tanh(y) if self.config.act == "tanh" else torch.relu(y)
        y = y.clamp(self.config.limits[0], self.config.limits[1]) * self.level
        if self.shade is Shade.DARK:
            y = -y
        return y + self.space.by * self.space.to[0] + self.point.x


class Globals(nn.Module):
    """Names of its own file."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * RATE + TABLE["shift"] + TABLE["nested"]["by"][0]
        y = ACTIVATIONS[WHICH](halved(y)) * WEIGHTS
        if FLAGS[0]:
            y = y + 1
        return y if NOTHING is None else y * NOTHING


class Imported(nn.Module):
    """Names of files that its own imports."""

    def forward(self, x: Tensor) -> Tensor:
        y = scaled(x) + change_helpers.OPTIONS["shift"] * change_helpers.OPTIONS["inner"]["power"]
        y = curved(y) * LIMITS[1] + change_helpers.OFFSET
        return SMOOTH(ADD(y)) * change_helpers.GAIN * change_helpers.SCALE + change_helpers.FROM_ENVIRONMENT


class FromFile(nn.Module):
    """Values that a file and the environment gave to the import."""

    def forward(self, x: Tensor) -> Tensor:
        return x * change_helpers.SCALE + change_helpers.FROM_ENVIRONMENT


class Defaults(nn.Module):
    """Default arguments of methods and functions, and a function's attribute."""

    def mixed(self, x: Tensor, by: float = 0.5, terms: tuple[float, ...] = (1.0, 2.0), *, plus: float = 0.25) -> Tensor:
        return x * by + terms[0] + plus

    def forward(self, x: Tensor, extra: float = 0.125) -> Tensor:
        return counted(scaled(self.mixed(x))) + extra


class Closures(nn.Module):
    """Closures: of functions in attributes, of globals, and of a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.made_list = made(2.0, [0.5]), [made(0.75, [0.0])]

    @tripled
    def through(self, x: Tensor) -> Tensor:
        return x + 0.5

    def forward(self, x: Tensor) -> Tensor:
        def within(y: Tensor) -> Tensor:
            return self.made_list[0](y) + RATE

        return within(self.made(self.through(SHAPED(x))))


class Shared:
    """A base class that is not a module."""

    ratio = 0.5
    settings = {"low": 0.25, "steps": [1.0]}

    @property
    def slack(self) -> float:
        return 0.375

    @staticmethod
    def raised(x: Tensor) -> Tensor:
        return x + 1.5

    @classmethod
    def spread(cls, x: Tensor) -> Tensor:
        return x * cls.ratio


class ClassAttributes(Shared, nn.Module):
    """Attributes, properties and methods of classes."""

    scale, kind = 1.75, "plain"

    def forward(self, x: Tensor) -> Tensor:
        y = self.raised(x) * self.scale + self.slack + self.settings["low"] * self.settings["steps"][0]
        return self.spread(y) if type(self).kind == "plain" else y * Tool.rate + Tool.rated(Tool.shifted(y))


class Doubling:
    """A descriptor."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, owner: Any, cls: type) -> float:
        return self.value * 2


class Descriptors(nn.Module):
    """A descriptor, and `__getattr__`."""

    doubled = Doubling(0.75)

    def __init__(self) -> None:
        super().__init__()
        self.fallback = {"hidden": 1.5}

    def __getattr__(self, name: str) -> Any:
        fallback = self.__dict__.get("fallback", {})
        return fallback[name] if name in fallback else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.doubled + self.hidden


class Callables(nn.Module):
    """Partial functions, lambdas, callable objects and functions as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.partly, self.lambda_, self.function = partial(scaled, by=2.0), lambda x: x + 0.25, torch.tanh
        self.adder, self.bound = change_helpers.Adder(0.75), Power().apply

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.lambda_(self.partly(x))) + self.adder(x) + self.bound(x)


class Numpy(nn.Module):
    """NumPy's scalars and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.whole, self.array = np.float32(0.75), np.int64(2), np.array([1.5, 2.5])
        self.inverse = 1 / math.sqrt(8)

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.single) + int(self.whole) + float(self.array[0]) * self.inverse


class PlainTensors(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    of_class = torch.full((8,), 0.25)

    def __init__(self) -> None:
        super().__init__()
        self.plain, self._plain = torch.full((8,), 0.5), torch.ones(8)
        self.listed, self.named = [torch.full((8,), 0.75)], {"a": torch.full((8,), 1.5)}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.plain + self._plain + self.listed[0] * self.named["a"] + self.of_class + WEIGHTS


class Buffers(nn.Module):
    """Buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.register_buffer("fixed", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("order", torch.arange(7, -1, -1))
        self.register_buffer("flag", torch.ones(8, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.flag, x[:, self.order] + self.shift, x) * self.fixed


class Tied(nn.Module):
    """Two layers with one weight, and a view of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class SharedModule(nn.Module):
    """One module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.act = self.again = Leaky()

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.act(self.first(x))))


class Lists(nn.Module):
    """Lists and dicts of modules, of which an attribute chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.acts = nn.ModuleDict({"tanh": nn.Tanh(), "relu": nn.ReLU()})
        self.scales = nn.ParameterList([torch.ones(8), torch.full((8,), 0.5)])
        self.depth, self.act = 2, "tanh"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = self.acts[self.act](layer(x))
        for scale in self.scales:
            x = x * scale
        return x


class Chain(nn.Module):
    """Sequential containers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Identity())
        self.tail = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), act=nn.SiLU(), drop=nn.Dropout(0.0)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.tail(self.body(x))


class Norms(nn.Module):
    """Norms, whose numbers are attributes of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batch, self.group = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8)
        self.batch.running_var.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self.batch(self.layer(x)))


class Convolution(nn.Module):
    """A convolution and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv1d(1, 2, 3, padding=1), nn.AvgPool1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x.unsqueeze(1))).flatten(1)


class Attention(nn.Module):
    """Attention with a number of heads and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale, self.causal = 2, 0.5, False
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(-1, self.heads, 8 // self.heads, 1) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.out(y.reshape(-1, 8))


class Embedded(nn.Module):
    """An embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, :2] > 0).long() + 1).sum(1) * x


class GradMode(nn.Module):
    """Asks whether gradients are enabled."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.is_grad_enabled() else x * 3


class InferenceMode(nn.Module):
    """Asks for inference mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.is_inference_mode_enabled() else x * 3


class RequiresGrad(nn.Module):
    """Asks which tensors require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y + 1 if self.weight.requires_grad else y - 1


class Environment(nn.Module):
    """Reads the environment."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * float(os.environ.get("SUBJECT_RATE", "0.5"))
        if "SUBJECT_FLAG" in os.environ:
            y = y + 1
        return torch.relu(y) if os.getenv("SUBJECT_MODE") == "x" else y


class ProcessModes(nn.Module):
    """Makes tensors of the default dtype, on the default device, and asks for modes."""

    def forward(self, x: Tensor) -> Any:
        y = x + torch.full((8,), 0.5) + torch.arange(8, dtype=torch.get_default_dtype()).to(x.dtype)
        if torch.are_deterministic_algorithms_enabled():
            y = y + 1
        return y, torch.ones(2) * 0.5


class Flags(nn.Module):
    """Reads training flags; dropout of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.inner = nn.Dropout(0.0), Leaky()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.inner(x))
        return y * 2 if self.training else y * 3 if self.inner.training else y


class Hooked(nn.Module):
    """Was built with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), Leaky()
        self.act.register_forward_hook(_doubled)
        self.linear.register_forward_pre_hook(_lowered)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


def _doubled(module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
    return result * 2


def _lowered(module: nn.Module, arguments: Any) -> Any:
    return (arguments[0] - 0.5,)


class Parametrized(nn.Module):
    """A weight that is computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Base(nn.Module):
    """A base class whose methods are called by the classes above it."""

    def mix(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 0.75 + y * 0.25

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, self.first(x))

    def first(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Methods(Base):
    """Methods by name, through `super()`, and of other objects."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Leaky()
        self.called = "second"

    def second(self, x: Tensor) -> Tensor:
        return x + 0.5

    def first(self, x: Tensor) -> Tensor:
        return self.act.forward(super().first(x))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.called)(super().forward(x))


class Asking(nn.Module):
    """Asks for classes, names and lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.parts, self.lone = nn.Tanh(), nn.ModuleList([nn.Identity(), nn.Identity()]), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1 if isinstance(self.act, nn.Tanh) else x - 1
        y = y * len(self.parts) + sum(1 for _ in self.children())
        if hasattr(self, "extra"):
            y = y * 3
        return y + 0.5 * len(list(self.parameters())) + (0 if self.lone.bias is None else 1)


class Results(nn.Module):
    """A result of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.names, self.full = nn.Linear(8, 8), ["first", "second"], True

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {self.names[0]: y, "pair": (y * 2, y.sum(-1)), **({self.names[1]: y + 1} if self.full else {})}


class Dtypes(nn.Module):
    """A dtype as an attribute, and a device."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype, self.device, self.linear = torch.float64, torch.device("cpu"), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).to(self.dtype) * torch.ones(8, dtype=self.dtype, device=self.device)


class Builtins(nn.Module):
    """Functions of Python's and of torch's, by several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.which = "relu"

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(F, self.which)(abs(x)) + torch.sigmoid(x).mul(2) + math.sqrt(4)
        return y * max(1.0, 0.5) + sum([0.25, 0.5])


class Nested(nn.Module):
    """Blocks within blocks, each with numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Methods(), Numbers(), Slots()])
        self.residual = 0.5

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x * self.residual + block(x)
        return x


class More(nn.Module):
    """Containers that are seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.counts, self.doubles = deque([1.0, 2.0]), Counter("aab"), array("d", [0.5, 1.5])
        self.chained, self.user = ChainMap({"a": 1.5}, {"b": 2.5}), UserDict(a=0.75)
        self.proxy, self.defaulted = MappingProxyType({"a": 0.25}), defaultdict(float, a=1.25, none=0.0)
        self.text, self.complex, self.fraction = bytearray(b"ab"), 1.5 + 2j, Fraction(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.queue[0] + self.counts["a"] * self.doubles[1] + self.chained["b"] * self.user["a"]
        y = y + self.proxy["a"] * self.defaulted["a"] + self.defaulted["none"]
        return y * self.text[0] + self.complex.imag + float(self.fraction)


class Gain:
    """An object with special methods."""

    def __init__(self) -> None:
        self.by, self.on = 1.5, True

    def __float__(self) -> float:
        return self.by

    def __bool__(self) -> bool:
        return self.on

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return self.by * index

    def __rmul__(self, other: Tensor) -> Tensor:
        return other * self.by

    def __enter__(self) -> float:
        return self.by + 1

    def __exit__(self, *raised: object) -> None:
        pass


class Special(nn.Module):
    """Special methods of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain + float(self.gain) + len(self.gain) + self.gain[1]
        with self.gain as more:
            y = y + more
        return y if self.gain else -y


class Metered(type):
    """A metaclass."""

    unit = 0.375

    @property
    def level(cls) -> float:
        return cls.unit * 2


class OfMeta(metaclass=Metered):
    slope = 1.25


class Late(nn.Module):
    """Imports within forward, names by their text, a metaclass, and a name that a module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "RATE"

    def forward(self, x: Tensor) -> Tensor:
        import change_deep as deep
        from change_helpers import GAIN

        y = x * globals()[self.name] * GAIN + vars(change_helpers)["SCALE"] + deep.DEPTH
        y = y * getattr(change_helpers, "FROM_ENVIRONMENT") + OfMeta.level * OfMeta.slope  # noqa: B009
        return y + change_helpers.COMPUTED


class References(nn.Module):
    """Weak references, a cycle to the module itself, and a module that is hidden in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.power = self.kept = Power()
        self.weak, self.hidden, self.scale = weakref.ref(self.power), (nn.LeakyReLU(0.25),), 1.5
        self.itself = [self]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x) * self.weak().factor + self.itself[0].scale


@singledispatch
def described(x: object) -> Tensor:
    raise TypeError(x)


@described.register
def _(x: Tensor) -> Tensor:
    return x * 0.75


@cache
def remembered() -> float:
    return RATE * 2


class Dispatching(nn.Module):
    """A single-dispatch function, a cached one, and a cached property."""

    @cached_property
    def once(self) -> float:
        return RATE + 1

    def __init__(self) -> None:
        super().__init__()
        self.half = self.once / 2

    def forward(self, x: Tensor) -> Tensor:
        return described(x) + remembered() + self.once + self.half


CONTEXT: ContextVar[float] = ContextVar("context", default=0.5)
LOCAL = threading.local()
LOCAL.value = 1.5
LOGGER = logging.getLogger("change_subjects")


class Contextual(nn.Module):
    """Objects of Python's library that keep a state."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * CONTEXT.get() + LOCAL.value
        return y + 1 if LOGGER.isEnabledFor(logging.DEBUG) else y


class TorchFlags(nn.Module):
    """Flags of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 if torch.backends.mkldnn.enabled else x * 3
        y = y + 1 if torch.is_autocast_enabled("cpu") else y
        return y - 1 if torch.get_float32_matmul_precision() == "medium" else y


class ReadsFile(nn.Module):
    """Reads a file in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(Path(change_helpers.__file__).with_name("change_scale.txt").read_text())


class Asked(nn.Module):
    """Looks into its own dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.act = 0.5, nn.Tanh()
        self.register_buffer("shift", torch.full((8,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.__dict__.get("known", 2.0) + vars(self).get("unknown", 0.0)
        y = y + 1 if type(self.act).__name__ == "Tanh" else y - 1
        y = y * 3 if "extra" in self._modules else y
        for _, buffer in self.named_buffers():
            y = y + buffer
        return y + sum(name == "act" for name, _ in self.named_modules())


TOGETHER = (
    *(Slots, Activations, Numbers, Containers, Objects, Configured, Globals, Imported, FromFile, Defaults, Closures),
    *(ClassAttributes, Callables, PlainTensors, Buffers, Lists, Chain, Hooked, Methods, Special, Late, References),
    *(Dispatching, Contextual, Descriptors, Numpy, More, Norms),
)


class Together(nn.Module):
    """Several subjects, of which one compile is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(subject() for subject in TOGETHER)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts]


class Frame(nn.Module):
    """The module around a subject that is a region."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def make(name: str, framed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = globals()[name]()
    return Frame(module) if framed else module
