"""The operators of `values.py`: small expressions of one or two tensors, element by element or along an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]


def _named(*names: str) -> dict[str, Function]:
    return {name.rpartition(".")[2]: _attribute(name) for name in names}


def _attribute(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _whole(x: Tensor) -> Tensor:
    """A divisor of integers: not 0, and not -1, with which the smallest integer has no quotient."""
    if x.is_floating_point() or x.dtype == torch.bool:
        return x
    return torch.where((x == 0) | (x == -1), 3, x).to(x.dtype)


OF_ONE: Mapping[str, Function] = {
    **_named("abs", "neg", "sign", "sgn", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log"),
    **_named("log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh"),
    **_named("acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma", "sigmoid", "logit", "floor", "ceil"),
    **_named("round", "trunc", "frac", "relu", "isnan", "isinf", "isfinite", "signbit", "nan_to_num", "i0", "sinc"),
    **_named("deg2rad", "rad2deg", "logical_not", "bitwise_not", "isneginf", "isposinf", "positive", "angle"),
    **_named("special.i0e", "special.i1", "special.i1e", "special.entr", "special.ndtr", "special.log_ndtr"),
    **_named("special.ndtri", "special.erfcx", "special.bessel_j0", "special.modified_bessel_i0"),
    **_named("nn.functional.silu", "nn.functional.elu", "nn.functional.selu", "nn.functional.celu"),
    **_named("nn.functional.softplus", "nn.functional.hardtanh", "nn.functional.hardswish", "nn.functional.gelu"),
    **_named("nn.functional.hardsigmoid", "nn.functional.mish", "nn.functional.logsigmoid", "nn.functional.softsign"),
    **_named("nn.functional.tanhshrink", "nn.functional.hardshrink", "nn.functional.softshrink"),
    **_named("nn.functional.leaky_relu", "nn.functional.relu6"),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 1, 2),
    "round_decimals": lambda x: x.round(decimals=2),
    "times_zero": lambda x: x * 0,
    "times_zero_float": lambda x: 0.0 * x + 1,
    "plus_zero": lambda x: x + 0,
    "minus_itself": lambda x: x - x,
    "over_itself": lambda x: x / _whole(x),
    "zero_over": lambda x: 0 / _whole(x),
    "one_over": lambda x: 1 / _whole(x),
    "to_the_0": lambda x: x**0,
    "to_the_1": lambda x: x**1,
    "to_the_2": lambda x: x**2,
    "to_the_3": lambda x: x**3,
    "to_the_half": lambda x: x**0.5,
    "to_the_minus_half": lambda x: x**-0.5,
    "to_the_minus_1": lambda x: x**-1,
    "to_the_minus_2": lambda x: x.double() ** -2,
    "two_to_the": lambda x: 2.0**x,
    "one_to_the": lambda x: 1.0**x,
    "zero_to_the": lambda x: 0.0**x,
    "where_true": lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), x, 0),
    "where_positive": lambda x: torch.where(x > 0, x, x * 0),
    "where_itself": lambda x: torch.where(x == x, x, 7),
    "masked_fill": lambda x: x.masked_fill(x < 0, 1),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0),
    "clamp_nan": lambda x: x.clamp(max=float("nan")),
    "equals_itself": lambda x: x == x,
    "below_zero": lambda x: x < 0,
    "at_least_zero": lambda x: ~(x < 0),
    "is_zero": lambda x: x == 0,
    "floor_by_3": lambda x: x // 3,
    "floor_by_minus_3": lambda x: x // -3,
    "trunc_by_3": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "modulo_3": lambda x: x % 3,
    "modulo_minus_3": lambda x: x % -3,
    "modulo_half": lambda x: x % 0.5,
    "fmod_3": lambda x: torch.fmod(x, 3),
    "shift_left_1": lambda x: x << 1,
    "shift_right_1": lambda x: x >> 1,
    "xor_1": lambda x: x ^ 1,
    "polygamma_1": lambda x: torch.polygamma(1, x),
    "to_float32": lambda x: x.float() + 1,
    "to_float16": lambda x: x.half(),
    "to_bfloat16": lambda x: x.bfloat16(),
    "to_float64": lambda x: x.double() * 2,
    "to_int8": lambda x: x.to(torch.int8),
    "to_uint8": lambda x: x.to(torch.uint8),
    "to_int16": lambda x: x.to(torch.int16),
    "to_int32": lambda x: x.to(torch.int32),
    "to_int64": lambda x: x.to(torch.int64),
    "to_bool": lambda x: x.bool(),
    "steps": lambda x: torch.arange(x.shape[-1]) * 10**9 + x,
    "steps_of_int32": lambda x: torch.arange(x.shape[-1], dtype=torch.int32) * 2**28,
    "steps_of_floats": lambda x: torch.arange(x.shape[-1]) * 0.1 - x,
    "by_a_constant": lambda x: torch.div(x, torch.tensor(3), rounding_mode="floor"),
    "trunc_by_a_constant": lambda x: torch.div(x, torch.tensor(3), rounding_mode="trunc"),
    "times_a_constant": lambda x: x * torch.tensor(0) + torch.tensor(2.5),
    "above_a_constant": lambda x: torch.where(x > torch.tensor(1), x, torch.tensor(-1)),
    "flip": lambda x: x.flip(-1) + 1,
    "roll": lambda x: x.roll(1, -1) * 2,
    "pad": lambda x: F.pad(x, (1, 2), value=3) + 1,
}

OF_TWO: Mapping[str, Function] = {
    **_named("add", "sub", "mul", "atan2", "hypot", "maximum", "minimum", "fmax", "fmin", "copysign", "nextafter"),
    **_named("logaddexp", "logaddexp2", "xlogy", "heaviside", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and"),
    **_named("bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", "gcd", "special.xlog1py"),
    **_named("float_power", "pow", "ldexp", "special.zeta"),
    "div": lambda x, y: x / _whole(y),
    "div_floor": lambda x, y: torch.div(x, _whole(y), rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, _whole(y), rounding_mode="trunc"),
    "remainder": lambda x, y: x % _whole(y),
    "fmod": lambda x, y: torch.fmod(x, _whole(y)),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_equal": lambda x, y: torch.where(x == y, x * 0, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp_tensor": lambda x, y: torch.lerp(x, y, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=2),
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "clamp_tensor": lambda x, y: x.clamp(y, y.abs()),
    "isclose": lambda x, y: torch.isclose(x, y, equal_nan=True),
    "rsub": lambda x, y: torch.rsub(x, y),
    "shift_left": lambda x, y: x << (y & 7),
    "shift_right": lambda x, y: x >> (y & 7),
    "masked_fill_other": lambda x, y: x.masked_fill(y > 0, 5),
    "concatenated": lambda x, y: torch.cat([x * 2, y], -1),
}

ALONG: Mapping[str, Function] = {
    **_named("sum", "prod", "mean", "var", "std", "amin", "amax", "argmin", "argmax", "any", "all", "logsumexp"),
    **_named("cumsum", "cumprod", "logcumsumexp", "cummin", "cummax", "min", "max", "nansum", "nanmean"),
    **_named("softmax", "log_softmax", "count_nonzero", "aminmax"),
    "sum_same": lambda x, dim: x.sum(dim, dtype=x.dtype),
    "prod_same": lambda x, dim: x.prod(dim, dtype=x.dtype),
    "sum_float32": lambda x, dim: x.sum(dim, dtype=torch.float32),
    "amin_kept": lambda x, dim: x - x.amin(dim, keepdim=True),
    "amax_kept": lambda x, dim: x - x.amax(dim, keepdim=True),
    "argmin_kept": lambda x, dim: x.argmin(dim, keepdim=True),
    "norm": lambda x, dim: x.norm(dim=dim),
    "norm_1": lambda x, dim: x.norm(p=1, dim=dim),
    "norm_inf": lambda x, dim: x.norm(p=float("inf"), dim=dim),
    "any_positive": lambda x, dim: (x > 0).any(dim),
    "all_positive": lambda x, dim: (x > 0).all(dim),
    "amax_positive": lambda x, dim: (x > 0).amax(dim),
    "amin_positive": lambda x, dim: (x > 0).amin(dim),
    "argmax_positive": lambda x, dim: (x > 0).int().argmax(dim),
    "sum_positive": lambda x, dim: (x > 0).sum(dim),
    "amax_of_abs": lambda x, dim: x.abs().amax(dim),
    "amin_of_double": lambda x, dim: (x + x).amin(dim),
    "argmax_of_neg": lambda x, dim: (-x).argmax(dim),
    "normalized": lambda x, dim: F.normalize(x, dim=dim),
    "rms": lambda x, dim: x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6),
    "softmin": lambda x, dim: F.softmin(x, dim=dim),
    "masked_softmax": lambda x, dim: x.masked_fill(x <= 0, float("-inf")).softmax(dim),
    "median": lambda x, dim: x.median(dim).values,
    "sorted": lambda x, dim: x.sort(dim).values,
    "diff": lambda x, dim: x.diff(dim=dim),
}

WHOLE: Mapping[str, Function] = {
    **_named("sum", "prod", "mean", "var", "amin", "amax", "argmin", "argmax", "any", "all", "min", "max", "norm"),
    **_named("count_nonzero", "nansum"),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sum_same": lambda x: x.sum(dtype=x.dtype),
    "amin_2": lambda x: (x + 1).amin(),
}
