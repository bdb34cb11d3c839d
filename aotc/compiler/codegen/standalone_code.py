"""Code for the standalone runtime (`runtime: standalone`): operators are avoided where torch's compiler can generate
them, and those that the runtime lacks are refused, all at once. Attention and convolutions on a GPU:
`standalone_attention`, `standalone_convolutions`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from aotc.amounts import counted
from aotc.compiler.capture.replaced_functions import RECURRENT
from aotc.compiler.codegen.library_imports import OperatorCalls
from aotc.compiler.codegen.standalone_convolutions import convolution
from aotc.compiler.scoped import replaced, replaced_items
from aotc.errors import BuildError, Issue
from aotc.records import Artifact, LibraryImports
from aotc.shim import OPERATORS, lacking
from aotc.standalone.unsupported import unsupported

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"max_autotune_gemm_backends": "CPP,ATEN", "cpp.fallback_scatter_reduce_sum": False},
    "cuda": {
        "max_autotune_gemm": True,  # in `mode: default`, too, whose products are torch's otherwise
        "max_autotune_gemm_backends": "TRITON,ATEN",
        "max_autotune_conv_backends": "TRITON,ATEN",
    },
}
"""By device, options of Inductor by which it calls fewer operators."""

MOST_SCANNED = 4096
MOST_SORTED = 1024
"""Longest axes that are scanned and sorted by generated code, whose work grows with the square of the length."""

LARGEST_WINDOW = 25
"""Elements of a window over which Inductor pools by itself."""

_ONE_DNN = ("torch._inductor.fx_passes.mkldnn_fusion", "torch._inductor.fx_passes.quantization")


@contextmanager
def operators_avoided(device: str, *, frozen: bool) -> Iterator[None]:
    """While active, Inductor decomposes operators that it otherwise calls, generates products where it has a template,
    and leaves those of `frozen` weights as they are, for which it otherwise calls oneDNN's."""
    from torch._decomp import decompositions
    from torch._inductor import decomposition
    from torch._inductor.fx_passes import freezing_patterns

    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(_templates_alone())
        stack.enter_context(replaced_items(decomposition.decompositions, _decompositions(device)))
        # The other one, which torch takes where it can, is oneDNN's.
        one_layer = replaced(decompositions, "select_one_layer_lstm_function", _one_layer)
        stack.enter_context(one_layer)
        decomposition.fast_random_decomps.cache_clear()  # a copy of them
        stack.callback(decomposition.fast_random_decomps.cache_clear)
        if frozen:
            freezing_patterns.lazy_init(torch.device(device))
        for patterns in freezing_patterns.pass_patterns:
            others = {key: [one for one in each if not _packs(one)] for key, each in patterns.patterns.items()}
            stack.enter_context(replaced_items(patterns.patterns, others))
        yield


@contextmanager
def _templates_alone() -> Iterator[None]:
    """While active, torch's own products and convolutions are left out where there is a template, also on a small
    GPU, on which Inductor leaves templates out. So the layout that a template was made for is decided with it: else
    another reader may decide it, and Inductor takes torch's product."""
    from torch._inductor import select_algorithm, utils

    def templates(choices: list[Any]) -> list[Any]:
        found = [each for each in choices if isinstance(each, select_algorithm.TritonTemplateCaller)]
        # A subgraph, as of a product whose inner axis is long, has templates within.
        found = found or [each for each in choices if not isinstance(each, select_algorithm.ExternKernelCaller)]
        return found or choices

    select_algorithm.add_preprocessing_fn(templates)
    try:
        with (
            replaced(utils, "is_big_gpu", lambda *_: True),
            replaced(select_algorithm, "use_aten_gemm_kernels", lambda: False, create=True),  # not in each torch
        ):
            yield
    finally:
        select_algorithm.clear_preprocessing_fns()


def _packs(pattern: Any) -> bool:
    return getattr(getattr(pattern, "handler", None), "__module__", "") in _ONE_DNN


def _decompositions(device: str) -> dict[Any, Callable[..., Any]]:
    """By operator. One that returns NotImplemented leaves the operator as it is."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    # `replaced_functions` captures recurrent layers as operators of aotc.
    recurrent = {
        getattr(torch.ops.aotc, name).default: _unrolled(get_decompositions([layer])[layer.input])
        for name, layer in ((name, getattr(aten, name)) for name in RECURRENT)
    }
    sorts: Any = {aten.sort.default: _sorted, aten.sort.stable: _sorted_stable, aten.topk.default: _largest}
    pools: Any = dict.fromkeys((aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default), _pooled)
    truths: Any = {aten._is_all_true.default: torch.all, aten._is_any_true.default: torch.any}
    own = {**recurrent, **sorts, **pools, **truths}
    return {**own, aten.convolution.default: convolution} if device == "cuda" else {**own, **_on_a_cpu()}


def _on_a_cpu() -> dict[Any, Callable[..., Any]]:
    """For a GPU, Inductor generates scans and the search in buckets by itself."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    known = get_decompositions([aten.cumsum, aten.cumprod, aten.bucketize, flash])

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return known[flash](query, *args, **kwargs) if query.dtype is torch.float64 else NotImplemented

    scans = {each: _scanning(known[each]) for each in (aten.cumsum.default, aten.cumprod.default)}
    return {**known, **scans, flash: attention}


def _one_layer(*_: Any) -> Callable[..., Any]:
    from torch._decomp import decompositions

    layer: Callable[..., Any] = decompositions.one_layer_lstm
    return layer


def _unrolled(steps: Callable[..., Any]) -> Callable[..., Any]:
    def unrolled(x: Tensor, *args: Any) -> Any:
        return steps(x, *args) if isinstance(x.shape[0], int) else NotImplemented

    return unrolled


def _scanning(scan: Callable[..., Any]) -> Callable[..., Any]:
    def scanned(x: Tensor, dim: int, **kwargs: Any) -> Any:
        return scan(x, dim, **kwargs) if _has_at_most(MOST_SCANNED, x, dim) else NotImplemented

    return scanned


def _has_at_most(most: int, x: Tensor, dim: int) -> bool:
    """Whether the axis has no more elements; of a range, whether no size of it has."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return x.dim() > 0 and statically_known_true(x.shape[dim] <= most)


def _sorted(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    return _sorted_stable(x, stable=True, dim=dim, descending=descending)


def _sorted_stable(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """By the rank of each element, the number of those that come before it: NaN is above all numbers, as in eager, and
    equal elements keep their order."""
    if not _has_at_most(MOST_SORTED, x, dim) or x.is_complex():
        return NotImplemented
    last = x.movedim(dim, -1)
    position = torch.arange(last.shape[-1], device=x.device)
    one, other = last.unsqueeze(-1), last.unsqueeze(-2)
    less, more = (other < one), (other > one)
    if x.is_floating_point():
        less, more = less | (one.isnan() & ~other.isnan()), more | (other.isnan() & ~one.isnan())
    first, second = (more, less) if descending else (less, more)
    rank = (first | (~second & (position < position.unsqueeze(-1)))).sum(-1)
    index = ((rank.unsqueeze(-2) == position.unsqueeze(-1)) * position).sum(-1)
    return last.gather(-1, index).movedim(-1, dim), index.movedim(-1, dim)


def _largest(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    found = _sorted_stable(x, dim=dim, descending=largest)
    return NotImplemented if found is NotImplemented else tuple(part.narrow(dim, 0, k) for part in found)


def _pooled(x: Tensor, output_size: Sequence[int]) -> Any:
    """Axis by axis: the mean over the window of each output, by a mask. Small windows are left to Inductor's code."""
    lengths = x.shape[-len(output_size) :]
    if not all(isinstance(size, int) for size in (*lengths, *output_size)):
        return NotImplemented
    windows = [-(-(length + size - 1) // size) for length, size in zip(lengths, output_size, strict=True)]
    if len(output_size) == 2 and math.prod(windows) <= LARGEST_WINDOW:
        return NotImplemented
    result = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    for dim, length, size in zip(range(-len(output_size), 0), lengths, output_size, strict=True):
        output, position = torch.arange(size, device=x.device), torch.arange(length, device=x.device)
        first, end = output * length // size, ((output + 1) * length + size - 1) // size
        inside = (position >= first.unsqueeze(-1)) & (position < end.unsqueeze(-1))
        sums = torch.where(inside, result.movedim(dim, -1).unsqueeze(-2), 0).sum(-1)
        result = (sums / (end - first)).movedim(-1, dim)
    return result.to(x.dtype).contiguous()


# -- what is left -----------------------------------------------------------------------------------------------------

_ANY = "leave it to the code around the model, or write it with other operators of torch"
_CUSTOM = "write it with operators of torch, from which code is generated"
_HINTS = (
    (
        "fft|stft|view_as_real|view_as_complex",
        "spectra need torch: compute them in the code around the model, as with numpy.fft",
    ),
    (
        "rand|dropout|bernoulli|multinomial|normal|exponential|uniform",
        "make the random numbers outside, and take them as an input",
    ),
    (
        "sort|topk",
        f"code is generated for axes of at most {MOST_SORTED} elements: sort a shorter one, or the result, around the "
        "model",
    ),
    ("cumsum|cumprod", f"code is generated for axes of at most {MOST_SCANNED} elements: scan a shorter one"),
    (
        "cuda_convolution",
        "kernels are generated for convolutions in one to three axes, of float32, float16 and bfloat16; for transposed "
        "or dilated ones of fixed sizes, and not for both in one",
    ),
    ("cuda_(mm|addmm|bmm|baddbmm)", "kernels are generated for products of float32, float16 and bfloat16"),
    ("aten::(lstm|gru|rnn)", "steps are generated for a fixed length: list fixed buckets instead of a range"),
    (
        "brgemm|mkldnn",
        'it is for CPUs with AMX or float16: write `targets: ["cpu:x86-64-v3"]`, for which other code is generated',
    ),
)
_DTYPES = "the runtime has it for other dtypes: write `dtype: float32`"


def check_standalone(imports: LibraryImports, called: Mapping[str, OperatorCalls]) -> None:
    """Raises BuildError with all that a library takes from torch and the standalone runtime lacks."""
    issues = tuple(_issue(name, dtypes, called.get(name)) for name, dtypes in lacking(imports))
    if issues:
        raise BuildError(
            f"`runtime: standalone`, but the code calls what the standalone runtime lacks: "
            f"{counted(len(issues), 'operator')}",
            issues=issues,
            hint="or write `runtime: any`, and serve the model with torch",
            stage="compile",
            source=next((issue.where for issue in issues if issue.where), ""),
        )


def _issue(name: str, dtypes: str, calls: OperatorCalls | None) -> Issue:
    shown = (calls.operator if calls else "").removesuffix(".out") or _readable(name)
    lines = list(calls.lines) if calls else []
    more = f" (and {counted(len(lines) - 1, 'more line')})" if len(lines) > 1 else ""
    return Issue(
        f"{shown} of {dtypes}{more}" if dtypes else f"{shown}{more}",
        where=lines[0] if lines else "",
        hint=_DTYPES if name in OPERATORS else _hint(name, shown),
    )


def _readable(symbol: str) -> str:
    """`at::get_num_threads` for `_ZN2at15get_num_threadsEv`, without parameters; other names as they are."""
    parts: list[str] = []
    rest = symbol.removeprefix("_ZN")
    while rest is not symbol and (match := re.match(r"\d+", rest)):
        size = int(match[0])
        parts.append(rest[match.end() : match.end() + size])
        rest = rest[match.end() + size :]
    return "::".join(parts) or symbol


def _hint(name: str, shown: str) -> str:
    if "::" in shown and not shown.startswith(("aten::", "at::", "c10::")):
        return _CUSTOM
    return next((hint for pattern, hint in _HINTS if re.search(pattern, f"{name} {shown}")), _ANY)


def check_runs_standalone(artifact: Artifact) -> None:
    """Raises BuildError with everything in a record that the loader without torch refuses."""
    if issues := unsupported(artifact):
        raise BuildError(
            "`runtime: standalone`, but the model has what the standalone runtime does not do",
            issues=issues,
            hint="or write `runtime: any`, and serve the model with torch",
            stage="compile",
        )
