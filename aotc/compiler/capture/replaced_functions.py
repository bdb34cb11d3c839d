"""Replacements for functions of torch that torch.export unrolls, specialises to one size, or cannot trace."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from aotc.compiler.explain_failure import lines_shown
from aotc.compiler.scoped import replaced
from aotc.errors import BuildError

# -- recurrent layers -------------------------------------------------------------------------------------------------

# Recurrent layers are captured as one call of torch's own operator, over any length.
#
# torch.export unrolls `aten::lstm`, `aten::gru` and `aten::rnn_*`, step by step, into a graph of one length. Here they
# are captured as operators of aotc with the same arguments, which have no decomposition. They exist only in a build: a
# library calls torch's by name (`called_as_torchs`), and so runs the same kernel as eager, oneDNN's or cuDNN's where
# there is one, on the module's own weights.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_library: Any = cast("Any", torch.library).Library("aotc", "FRAGMENT")


def _run(name: str, *args: Any) -> Any:
    return getattr(torch.ops.aten, name).input(*args)


def _results(name: str, x: Tensor, hidden: Any, parameters: Any, *options: Any) -> tuple[Tensor, ...]:
    """Empty tensors with the shapes of the operator's results, for `x` of length × batch × features."""
    states: Sequence[Tensor] = hidden if name == "lstm" else [hidden]
    bidirectional = options[4]
    features = states[0].shape[2] * (2 if bidirectional else 1)
    return x.new_empty((x.shape[0], x.shape[1], features)), *(state.new_empty(state.shape) for state in states)


for _name in RECURRENT:
    _schema = str(getattr(torch.ops.aten, _name).input._schema).removeprefix(f"aten::{_name}.input")
    _library.define(f"{_name}{_schema}")
    _library.impl(_name, partial(_run, _name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotc::{_name}", partial(_results, _name), lib=_library)


def _whole(name: str, *args: Any, **kwargs: Any) -> Any:
    """The layer as one operator, always with the length first: for `batch_first`, torch's operator returns a transposed
    view, whose strides depend on the kernel. Under autocast, the steps of a layer run in several dtypes, and to be
    trained, they need a backward, which the operators here have not: so torch.export unrolls it."""
    padded = len(args) == 9 and isinstance(args[3], bool)  # for packed sequences, this is the list of parameters
    if not padded or torch.is_autocast_enabled(args[0].device.type) or torch.is_grad_enabled():
        return getattr(torch._VF, name)(*args, **kwargs)
    x, *options, batch_first = args
    operator = getattr(torch.ops.aotc, name)
    if not batch_first:
        return operator(*args)
    output, *states = operator(x.transpose(0, 1), *options, False)
    return output.transpose(0, 1), *states


def _refuse_packed(*args: Any, **kwargs: Any) -> Any:
    raise BuildError(
        "the model packs sequences (`pack_padded_sequence`, `pack_sequence`): the shapes of its results depend on the "
        "values of the lengths",
        hint="call the layer on the padded batch, and mask its output beyond each length (in a layer of one direction, "
        "the values before are the same); call a layer of two directions on sequences of equal length; or leave the "
        "part that packs to eager: `aotc build MANIFEST --suggest-regions`",
        stage="export",
        source=lines_shown(traceback.extract_stack()),
    )


def called_as_torchs(calls: bytes) -> bytes:
    """A library's list of the operators that it calls by name, with the operators here replaced by torch's."""
    for name in RECURRENT:
        calls = calls.replace(b'"aotc::%s"' % name.encode(), b'"%s"' % torchs_name(f"aotc::{name}").encode())
    return calls


def torchs_name(operator: str) -> str:
    """`aten::lstm.input` for `aotc::lstm`; other names as they are."""
    namespace, _, name = operator.partition("::")
    return f"aten::{name}.input" if namespace == "aotc" and name in RECURRENT else operator


# -- spectrograms -----------------------------------------------------------------------------------------------------


def _inverse_of_a_range(
    spectrum: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> Tensor:
    """The inverse of a spectrogram, with a `length` that is a size of a range.

    `torch.istft` needs its `length` as a number, so torch.export specialises the range to one length. Here the signal
    is computed in full, then cropped or padded, as `torch.istft` does; by indices, since the size decides which of the
    two.
    """
    options: Any = {"normalized": normalized, "onesided": onesided, "return_complex": return_complex}
    if length is None or isinstance(length, int):
        return torch.istft(spectrum, n_fft, hop_length, win_length, window, center=center, length=length, **options)
    signal = torch.istft(spectrum, n_fft, hop_length, win_length, window, center=False, **options)
    samples = torch.arange(length, device=signal.device) + (n_fft // 2 if center else 0)
    last = signal.shape[-1] - 1
    return torch.where(samples <= last, signal[..., samples.clamp(max=last)], 0)


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    **{getattr(torch._VF, name): partial(_whole, name) for name in RECURRENT},
    torch._VF._pack_padded_sequence: _refuse_packed,
    torch.istft: _inverse_of_a_range,
}
"""Replacements of torch's functions while a model is captured."""


# -- moves ------------------------------------------------------------------------------------------------------------


@contextmanager
def needless_moves_skipped() -> Iterator[None]:
    """While active, `nn.Module.to` returns the module if each tensor already has the requested dtype and device.

    torch.export cannot follow a module's `to`, which sets parameters. Mixtures of experts call it in each forward to
    keep a router in float32, and mostly nothing is to change.
    """
    move: Any = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        asked: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, layout = asked
        if layout is None and all(_is_so(tensor, device, dtype) for tensor in _tensors(module)):
            return module
        moved: nn.Module = move(module, *args, **kwargs)
        return moved

    with replaced(nn.Module, "to", to):
        yield


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _is_so(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Whether a tensor already has what `nn.Module.to` asks for. A dtype applies to floating-point and complex tensors
    only."""
    casts = dtype is not None and (tensor.is_floating_point() or tensor.is_complex())
    return (device is None or tensor.device == device) and not (casts and tensor.dtype != dtype)
