"""Restrict Inductor's pattern replacements to matches with the same result.

- Attention composed of other operators. torch's precompiled patterns contain no integers, such as the axis of a softmax
  or the order of a permute, so they match a softmax over any axis. Here the pattern's function is traced with tensors
  of the graph's shapes, and a match must equal this trace, integers included.
- Constants folded into the weight of a frozen convolution or linear layer. torch assumes that the weight's first axis
  is that of the output's channels, which is wrong for a transposed convolution, and that a constant has one value for
  each channel if the number of channels is anywhere in its shape. Here only constants with one value for each channel
  of the result are folded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

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

Check = Callable[[Any], bool]


def only_equal_attention_is_replaced() -> AbstractContextManager[None]:
    """While active, Inductor replaces operators by attention only if the result is the same."""

    def narrowed(found: Any, check: Check) -> Check | None:
        meant = _attention_meant(check)
        return meant and _no_error(_both(check, meant))

    return _patterns_narrowed(narrowed)


def only_constants_of_channels_are_folded() -> AbstractContextManager[None]:
    """While active, Inductor folds a constant into a weight only if it has one value for each channel."""

    def narrowed(found: Any, check: Check) -> Check | None:
        from torch._inductor.fx_passes.freezing_patterns import binary_folding_pass

        return _both(_folds_channels, check) if found is binary_folding_pass else None

    return _patterns_narrowed(narrowed)


@contextmanager
def _patterns_narrowed(narrowed: Callable[[Any, Check], Check | None]) -> Iterator[None]:
    """While active, a pattern of a pass uses the check that `narrowed` returns for it, if it returns one."""
    from torch._inductor.pattern_matcher import PatternMatcherPass

    apply: Any = PatternMatcherPass.apply
    seen: set[int] = set()

    def applied(self: Any, graph: Any) -> Any:
        for entry in [entry for entries in self.patterns.values() for entry in entries if id(entry) not in seen]:
            seen.add(id(entry))
            if check := narrowed(self, entry.extra_check):
                stack.enter_context(mock.patch.object(entry, "extra_check", check))
        return apply(self, graph)

    with ExitStack() as stack, mock.patch.object(PatternMatcherPass, "apply", applied):
        yield


def _both(first: Check, second: Check) -> Check:
    return lambda match: first(match) and second(match)


# -- attention --------------------------------------------------------------------------------------------------------


def _no_error(check: Check) -> Check:
    """A check that is false where `check` raises, as for a mask with too many axes."""

    def checked(match: Any) -> bool:
        try:
            return check(match)
        except Exception as error:
            _log.debug("not taken for attention: %s", error)
            return False

    return checked


def _attention_meant(check: Any) -> Check | None:
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


# -- constants that are folded ----------------------------------------------------------------------------------------


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
