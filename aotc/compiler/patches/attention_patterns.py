"""[inductor] Other operators than attention are replaced by attention.

torch's precompiled patterns contain no integers, such as the axis of a softmax or the order of a permute, so they match
a softmax over any axis.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch
from aotc.compiler.patches.shared.inductor import ConfigCheck, both, patterns_narrowed

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0003",
    operators=("aten.softmax", "aten._softmax", "aten._safe_softmax", "aten.exp"),
    upstream="pytorch#196468",
    torch=">=2.11,<2.15",
    targets=("torch._inductor.pattern_matcher:PatternMatcherPass.apply(gm)",),
)

_log = logging.getLogger("aotc")

_aten = torch.ops.aten

_ATTENTION = "torch._inductor.fx_passes.fuse_attention"

_SIZES = {
    **dict.fromkeys((_aten.expand.default, _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default), 1),
    _aten.full.default: 0,
}
"""Operator → the position of the argument with the sizes of its result, which are compared by the result's shape."""

_AXES = (_aten.amax.default, _aten.sum.dim_IntList, _aten.permute.default, _aten._softmax.default)
"""Operators whose integer arguments are axes."""


class _Computed:
    """The graph of a pattern's function, traced with arguments like those of a match, at their hints' sizes."""

    def __init__(self, trace: Callable[..., Any], function: Callable[..., Any], given: list[Any]) -> None:
        from torch._subclasses import FakeTensorMode
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode():
            module = trace(function, [_at_hint(value) for value in given])
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._given = dict(zip(placeholders, given, strict=True))
        (output,) = module.graph.find_nodes(op="output")
        self.nodes: list[fx.Node] = torch.utils._pytree.tree_leaves(output.args[0])

    def same(self, meant: Any, found: Any) -> bool:
        """Whether a node of this graph, or an argument, equals one of the graph in which the match was found."""
        if isinstance(meant, fx.Node) and meant in self._given:
            return self._given[meant] is found
        if isinstance(meant, fx.Node):
            return isinstance(found, fx.Node) and self._same_node(meant, found)
        if isinstance(meant, list | tuple):
            return isinstance(found, list | tuple) and len(meant) == len(found) and all(map(self.same, meant, found))
        if isinstance(meant, bool | int | float | torch.dtype):
            return bool(meant == found)
        return not isinstance(found, fx.Node)  # a device, a layout, a memory format

    def _same_node(self, meant: Any, found: Any) -> bool:
        target = meant.target
        if (meant.op, target) != (found.op, found.target) or _form(meant) != _form(found):
            return False
        pairs = [*zip(meant.args, found.args, strict=False)]
        if target in _SIZES:
            del pairs[_SIZES[target]]
        if target in _AXES:
            rank = meant.args[0].meta["val"].dim()
            pairs[1:] = [(_axes(one, rank), _axes(other, rank)) for one, other in pairs[1:]]
        pairs += [(value, found.kwargs.get(name)) for name, value in meant.kwargs.items()]
        return len(meant.args) == len(found.args) and all(self.same(one, other) for one, other in pairs)


def apply() -> AbstractContextManager[None]:
    """While active, Inductor replaces operators by attention only if the result is the same.

    The pattern's function is traced with tensors of the graph's shapes, and a match must equal this trace, integers
    included.
    """

    def narrowed(found: Any, check: ConfigCheck) -> ConfigCheck | None:
        meant = _attention_meant(check)
        return meant and _no_error(both(check, meant))

    return patterns_narrowed(narrowed)


def _no_error(check: ConfigCheck) -> ConfigCheck:
    """A check that is false where `check` raises, as for a mask with too many axes."""

    def checked(match: Any) -> bool:
        try:
            return check(match)
        except Exception as error:
            _log.debug("not taken for attention: %s", error)
            return False

    return checked


def _attention_meant(check: Any) -> ConfigCheck | None:
    """A check whether a match of an attention pattern equals the pattern's function; None for other patterns.

    `check` is the closure that `torch._inductor.pattern_matcher.register_replacement` makes for a pattern.
    """
    code = getattr(check, "__code__", None)
    cells = dict(zip(code.co_freevars, check.__closure__ or (), strict=True)) if code else {}
    function: Any = cells["search_fn"].cell_contents if "search_fn" in cells else None
    if getattr(function, "__module__", "") != _ATTENTION:
        return None
    names, trace = cells["argnames_static"].cell_contents, cells["trace_fn"].cell_contents

    def meant(match: Any) -> bool:
        given = [match.kwargs[name] for name in names]
        outputs = _Computed(trace, function, given)
        found = match.output_nodes()
        return len(found) == len(outputs.nodes) and all(map(outputs.same, outputs.nodes, found))

    return meant


def _at_hint(value: Any) -> Any:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(value, Tensor):
        size, stride = map(_hints, (value.size(), value.stride()))
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return _hints([value])[0]


def _hints(values: Any) -> list[Any]:
    return [value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value for value in values]


def _form(node: Any) -> tuple[list[Any], torch.dtype]:
    value = node.meta["val"]
    return _hints(value.size()), value.dtype


def _axes(value: Any, rank: int) -> Any:
    if isinstance(value, list | tuple):
        return [axis % rank for axis in value]
    return value % rank if type(value) is int else value


def reproduce(patches: Torch) -> None:
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / 2.0).softmax(1) @ v  # over another axis than attention's

    inputs = [torch.randn(4, 4, 4, 4) for _ in range(3)]
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    with torch.no_grad(), patches.patched("compile"):
        joint_graph_passes(graph, torch.device("cpu"))
    torch.testing.assert_close(graph(*inputs), function(*inputs))
