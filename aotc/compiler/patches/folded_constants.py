"""[inductor] Freezing folds a factor into the weight of a transposed convolution along the wrong axis.

Expected: eager's result. Seen: the first axis of the weight, that of the input's channels, is scaled (`binary_folding`
in `fx_passes`). A constant also counts as one value for each channel if the number of channels is anywhere in its
shape.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch
from aotc.compiler.patches.shared.inductor import ConfigCheck, both, patterns_narrowed
from aotc.compiler.patches.shared.operators import PRODUCTS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0012",
    operators=("aten.conv", "aten._conv", "aten.mkldnn_conv", *PRODUCTS),
    only=("frozen",),
    targets=("torch._inductor.pattern_matcher:PatternMatcherPass.apply(gm)",),
)

_aten = torch.ops.aten


def apply() -> AbstractContextManager[None]:
    """While active, Inductor folds a constant into a weight only if it has one value for each channel of the result."""

    def narrowed(found: Any, check: ConfigCheck) -> ConfigCheck | None:
        from torch._inductor.fx_passes.freezing_patterns import binary_folding_pass

        return both(_folds_channels, check) if found is binary_folding_pass else None

    return patterns_narrowed(narrowed)


def _folds_channels(match: Any) -> bool:
    """Whether the constant is a number, or has one value for each channel of the convolution's or product's result."""
    node, other = match.output_node().args[0], match.kwargs["other"]
    computed = node.args[0] if node.target is _aten.reshape.default else node
    result, channels = node.meta["val"].shape, 1
    if computed.target is _aten.convolution.default:
        if computed.args[6]:  # transposed: the weight's axes are channels in, and channels out of a group
            return False
    else:
        channels = len(result) - 1
        if result[-1] != computed.meta["val"].shape[-1]:
            return False
    if not isinstance(other, fx.Node):
        return True
    shape = other.meta["val"].shape
    before = len(result) - len(shape)
    return before >= 0 and all(size == 1 or before + at == channels for at, size in enumerate(shape))


def reproduce(patches: Torch) -> None:
    from torch._inductor import freezing
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = nn.ConvTranspose2d(4, 4, 3).eval().requires_grad_(False)
    factor, x = nn.Parameter(torch.rand(4, 1, 1), requires_grad=False), torch.randn(2, 4, 4, 4)
    graph = make_fx(lambda x: layer(x) * factor, decomposition_table=select_decomp_table(), tracing_mode="real")(x)
    with torch.no_grad(), patches.patched("compile"):
        expected = layer(x) * factor
        passes: Any = freezing
        passes.freezing_passes(graph, [x])
        torch.testing.assert_close(graph(x), expected)
