"""What torch.export finds out and the manifest does not say: `aotc build` says so in the manifest's words.

Only the export stage runs here, so nothing is compiled.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from in_process import run_here
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv, Max, Mod, OpaqueUnaryFn_log
from torch.utils._sympy.value_ranges import ValueRanges

from aotc.compiler.capture.checks.captured_graph import run_graph
from aotc.compiler.capture.checks.specialization import edge_sizes
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.ranges.bucket_proposals import proposal, split_sizes
from aotc.compiler.capture.ranges.dynamic_shapes import (
    conditions,
    constraints_explained,
    dynamic_shapes,
    explain_constraints,
)
from aotc.compiler.capture.ranges.range_solver import settled
from aotc.compiler.messages import Job, Unit
from aotc.compiler.unit import compile_unit
from aotc.errors import BuildError
from aotc.machine.native_target import resolve_target
from aotc.machine.targets import parse_target
from aotc.manifest import ModelSpec, read_manifest
from aotc.models.calls import signature_leaves
from aotc.models.factory import build_module
from aotc.models.signature import make_signature
from aotc.records import SizeRange, tuned_dims

MODELS = """
import torch
from torch import nn


class Eights(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0], -1, 8).sum(-1)


class LoneBatch(nn.Module):
    def forward(self, x):
        return x.sum(-1) if x.shape[0] != 1 else x.squeeze(0).sum(-1)


class Chunks(nn.Module):
    def forward(self, x):
        count = x.shape[0] // 8
        whole = x[: 8 * count].view(count, 8, 4)
        states = [whole[0]]
        for chunk in range(count):
            states.append(states[-1] + whole[chunk])
        return torch.cat([x, x[8 * count :], states[-1]])


class LoneBatchOfOtherValues(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] != 1 else x * 3


class LoneBatchOfOtherShares(nn.Module):
    def forward(self, x):
        return torch.arange(5e3).mul(x.sum() if x.shape[0] != 1 else -x.sum()).sin().softmax(0) + 0 * x.sum()


class LoneBatchWritesMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.add_(x.sum(0) if x.shape[0] != 1 else x[0] * 2)
        return x + 1


class LoneBatchWritesElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("lone", torch.zeros(4))

    def forward(self, x):
        if x.shape[0] == 1:
            self.lone.add_(x[0])
        return x + 1


class HalfInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class FirstTwo(nn.Module):
    def forward(self, x):
        return x[:2] + 1


class FirstFour(nn.Module):
    def forward(self, x, y):
        return (x[:, :1] * y[:, 0]).flatten()[:4] + 1


class BesideDiagonal(nn.Module):
    def forward(self, x):
        return x[:, :1].diagonal(-1)


class AllButTwo(nn.Module):
    def forward(self, x):
        return x[2:] + 1


class Long(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 4 else x * 3


class NotNine(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] == 9 else x * 3


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(16, 4))

    def forward(self, x):
        return x + self.position


class Lone(nn.Module):
    def forward(self, x, y, m):
        return m * 3 if m.shape[0] == 1 else m * 2, x, y


class Rounded(nn.Module):
    def forward(self, x):
        return x[: round(x.shape[0] / 2)]


class Counted(nn.Module):
    def forward(self, x):
        return x[: int(x.shape[0] / 1)]


class Pair(nn.Module):
    def forward(self, x, y):
        return x + y


class Joined(nn.Module):
    def forward(self, x, y):
        joined = torch.cat([x, y])
        return joined * 2 if joined.shape[0] > 40 else joined


class Padded(nn.Module):
    # As attention on GPUs pads its mask: each size meets the condition, but torch.export cannot tell.
    def forward(self, x):
        n = x.shape[0]
        padded = torch.nn.functional.pad(x, (0, 0, 0, 8 - n % 8))
        return padded[:n] * 2 if n * padded.shape[0] > 1 else x * 3


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)[0]


class Inverses(nn.Module):
    def forward(self, x):
        window, n = torch.hamming_window(64), x.shape[1]
        whole = torch.stft(x, 64, 16, window=window, return_complex=True)
        inner = torch.stft(x, 64, 16, window=window, center=False, return_complex=True)
        return (
            torch.istft(whole, 64, 16, window=window, length=n),
            torch.istft(whole, 64, 16, window=window, length=n + 40),
            torch.istft(inner, 64, 16, window=window, center=False, length=n),
            torch.istft(inner, 64, 16, window=window, center=False, length=n - 20),
        )


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x[None], [2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0]


class PaddedMask(nn.Module):
    # The same of two inputs' sizes, which are one dim: torch.export knows that in the end only.
    def forward(self, x, y):
        n = x.shape[0]
        padded = torch.nn.functional.pad(y, (0, 0, 0, 8 - y.shape[0] % 8))
        return padded[:n] * x if n * padded.shape[0] > 1 else x * 3


class Swings(nn.Module):
    # The same, but for the last size of the range.
    def forward(self, x):
        n = x.shape[0]
        return x * 2 if n * (8 + n - n % 8) != 64 * 72 else x * 3


class PaddedAndIndexed(Padded):
    # A range that becomes narrower meanwhile: torch clears what it has remembered of conditions.
    def forward(self, x):
        index = (x[0, 0] * 0).long().item()
        torch._check(index >= 0)
        torch._check(index < 4)
        return super().forward(x) + index


class Named(nn.Module):
    def forward(self, x):
        (y,) = x.values()
        return y.view(y.shape[0] // 2, 2, 4).sum(1)


class NeedsOne(nn.Module):
    def forward(self, x):
        return x - x.max(0).values
"""
ONE = "inputs: {x: {shape: [n, 4]}}"
ALIKE = "inputs: {x: {shape: [n, 4]}, y: {shape: [n, 4]}}"
TWO = "inputs: {x: {shape: [a, 4]}, y: {shape: [b, 4]}}"


class Reached(Exception):
    """The export stage was passed."""


@pytest.fixture
def spec_of(tmp_path: Path) -> Any:
    def make(model: str, inputs: str, bucket: str) -> ModelSpec:
        (tmp_path / "constrained.py").write_text(MODELS)
        manifest = tmp_path / "manifest.yaml"
        manifest.write_text(
            f"version: 1\nmodels:\n  m:\n    factory: constrained.py:{model}\n    {inputs}\n    buckets: [{bucket}]\n"
        )
        return read_manifest(manifest).models["m"]

    return make


def export(spec: ModelSpec, folder: Path) -> None:
    """Run a unit's stages up to the compile; raises BuildError."""

    def stage(name: str) -> None:
        if name == "compile":
            raise Reached

    unit = Unit(spec, spec.buckets[0], parse_target(resolve_target("native")), {}, "sha256:0")
    with pytest.raises(Reached):
        compile_unit(Job(unit, str(folder), str(folder / "out")), stage)


def refusal(spec: ModelSpec, folder: Path) -> BuildError:
    with pytest.raises(BuildError) as caught:
        export(spec, folder)
    assert len(str(caught.value)) < 600, "a message of one screen"
    assert "L['" not in str(caught.value), "the manifest's names, not export's"
    return caught.value


@pytest.mark.parametrize(
    ("model", "inputs", "bucket", "message", "proposal"),
    [
        pytest.param(
            "Eights",
            "inputs: {x: {shape: [2, seq]}}",
            "{seq: {range: [1, 64], tune_at: 16}}",
            "`seq: 1..64` as one graph: it needs `seq % 8 == 0`",
            "`seq: 8` and `seq: {range: [16, 64], multiple_of: 8, tune_at: 16}`",
            id="divisible by 8",
        ),
        pytest.param(
            "Eights",
            "inputs: {x: {shape: [2, seq]}}",
            "{seq: {range: [8, 64], multiple_of: 8}}",
            "`seq: 8..64 step 8` as one graph: it needs `seq // 8 != 1`; the range also holds 8",
            "`seq: 8` and `seq: {range: [16, 64], multiple_of: 8}`",
            id="stated, but one block is special to export",
        ),
        pytest.param(
            "LoneBatch",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "1 is a special size of `n: 1..32`: the model gives [] torch.float32 there, the captured graph [1]",
            "`n: 1` and `n: {range: [2, 32], tune_at: 8}`",
            id="batch 1 of another shape",
        ),
        pytest.param(
            "LoneBatch",
            ONE,
            "{n: [1, 2]}",
            "1 is a special size of `n: 1..2`: x is [1, 4] there, the code would be for [2, 4]",
            "`n: 1` and `n: 2`",
            id="of two sizes, both are kept",
        ),
        pytest.param(
            "LoneBatchOfOtherValues",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "1 is a special size of `n: 1..32`: output 0 differs there from the captured graph",
            "`n: 1` and `n: {range: [2, 32], tune_at: 8}`",
            id="batch 1 of other values",
        ),
        pytest.param(
            "LoneBatchOfOtherShares",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "1 is a special size of `n: 1..32`: output 0 differs there from the captured graph",
            "`n: 1` and `n: {range: [2, 32], tune_at: 8}`",
            id="batch 1 of other values, all small",
        ),
        pytest.param(
            "LoneBatchWritesMore",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "1 is a special size of `n: 1..32`: what is written to `seen` differs there",
            "`n: 1` and `n: {range: [2, 32], tune_at: 8}`",
            id="batch 1 writes something else",
        ),
        pytest.param(
            "LoneBatchWritesElsewhere",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "1 is a special size of `n: 1..32`: what is written to `lone` differs there",
            "`n: 1` and `n: {range: [2, 32], tune_at: 8}`",
            id="batch 1 writes to a buffer that others do not",
        ),
        pytest.param(
            "HalfInput",
            "inputs: {x: {shape: [1, 4], dtype: float16}}",
            "{}",
            "the model itself fails when it is called with its inputs (x): RuntimeError: mat1 and mat2 must",
            "list all `inputs` that it needs, of the shapes, dtypes and values that it takes",
            id="a dtype that eager refuses and the compiler takes",
        ),
        pytest.param(
            "NeedsOne",
            ONE,
            "{n: {range: [0, 32], tune_at: 8}}",
            "0 is a special size of `n: 0..32`: the model itself fails there (IndexError",
            "`n: {range: [1, 32], tune_at: 8}`",
            id="no empty batch",
        ),
        pytest.param(
            "FirstTwo",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "in forward is [1, 4] there, the code would be for [2, 4]",
            "`n: 1` and `n: {range: [2, 32], tune_at: 8}`",
            id="fewer rows than are taken",
        ),
        pytest.param(
            "FirstFour",
            TWO,
            "{a: {range: [2, 32], tune_at: 8}, b: {range: [1, 32], tune_at: 8}}",
            "1 is a special size of `b: 1..32` with `a` of 2: slice_",
            "`b: 1` and `b: {range: [2, 32], tune_at: 8}`",
            id="two small sizes",
        ),
        pytest.param(
            "BesideDiagonal",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "in forward is [0] there, the code would be for [1]",
            "`n: 1` and `n: {range: [2, 32], tune_at: 8}`",
            id="a number for all but 1",
        ),
        pytest.param(
            "Long",
            ONE,
            "{n: [1, 32]}",
            "`n: 1..32` as one graph: it needs `5 <= n",
            "`n: {range: [1, 4]}` and `n: {range: [5, 32]}`",
            id="a branch on length",
        ),
        pytest.param(
            "Rounded",
            ONE,
            "{n: {range: [2, 12], tune_at: 4}}",
            "`n: 2..12` as one graph: it needs `round(n / 2) != 1`; the range also holds 2",
            "`n: 2` and `n: {range: [3, 12], tune_at: 4}`",
            id="a rounded quotient",
        ),
        pytest.param(
            "AllButTwo",
            ONE,
            "{n: {range: [1, 32], tune_at: 8}}",
            "`n: 1..32` as one graph: it needs `-2 + n != 1` and `-8 + 4 * n >= 2`; the range also holds 1, 2, 3",
            "`n: {range: [1, 3]}` and `n: {range: [4, 32], tune_at: 8}`",
            id="a bound between two sizes",
        ),
        pytest.param(
            "NotNine",
            ONE,
            "{n: [1, 32]}",
            "`n: 1..32` as one graph: it needs `n != 9`; the range also holds 9",
            "`n: {range: [1, 8]}` and `n: 9` and `n: {range: [10, 32]}`",
            id="one size is special",
        ),
        pytest.param(
            "Learned",
            ONE,
            "{n: {range: [1, 32], tune_at: 16}}",
            "the captured graph holds for `n` of 16 only, the manifest has 1..32",
            "`n: 16`",
            id="one size only",
        ),
        pytest.param(
            "Pair",
            TWO,
            "{a: [1, 32], b: [1, 32]}",
            "the model needs `a` and `b` to be equal",
            "use one dim for both",
            id="two dims that are one",
        ),
        pytest.param(
            "Recurrent",
            ONE,
            "{n: {range: [2, 32], tune_at: 4}}",
            "the captured graph holds for `n` of 4",
            "under autocast, torch.export unrolls nn.LSTM",
            id="unrolled",
        ),
        pytest.param(
            "Packed",
            ONE,
            "{n: [2, 32]}",
            "the model packs sequences",
            "call the layer on the padded batch",
            id="packed",
        ),
        pytest.param(
            "LoneBatch",
            ONE,
            "{n: {range: [1, 32], tune_at: 1}}",
            "`n: 1..32` is tuned at 1",
            "`tune_at: 2`",
            id="tuned at 1",
        ),
    ],
)
def test_a_range_that_is_no_one_graph_is_refused_with_an_edit(
    spec_of: Any, tmp_path: Path, model: str, inputs: str, bucket: str, message: str, proposal: str
) -> None:
    error = refusal(spec_of(model, inputs, bucket), tmp_path)
    assert message in error.message
    assert proposal in error.hint


def test_the_line_that_makes_a_size_a_number_is_told(spec_of: Any, tmp_path: Path) -> None:
    counted, learned = (refusal(spec_of(name, ONE, "{n: [2, 32]}"), tmp_path) for name in ("Counted", "Learned"))
    assert "x[: int(x.shape[0] / 1)]" in counted.fields["source"] and "keep it a size there" in counted.hint
    assert "x + self.position" in learned.fields["source"] and "keep it a size" not in learned.hint


def test_a_loop_over_a_size_is_told_where_another_line_than_the_models_asks_for_it(
    spec_of: Any, tmp_path: Path
) -> None:
    """As xLSTM of transformers: the number of chunks becomes one in the loop, and the size itself in an operator."""
    error = refusal(spec_of("Chunks", "inputs: {x: {shape: [seq, 4]}}", "{seq: [8, 32]}"), tmp_path)
    assert "for chunk in range(count)" in error.fields["source"] and "without the loop" in error.hint
    assert "holds for `seq` of 32 only" in error.message and "each other size" in error.hint


@pytest.mark.parametrize(
    ("model", "inputs", "bucket"),
    [
        ("Eights", "inputs: {x: {shape: [2, seq]}}", "{seq: {range: [16, 64], multiple_of: 8}}"),
        ("Eights", "inputs: {x: {shape: [2, seq]}}", "{seq: 8}"),
        ("LoneBatch", ONE, "{n: {range: [2, 32], tune_at: 8}}"),
        ("NotNine", ONE, "{n: {range: [10, 32]}}"),
        ("Rounded", ONE, "{n: {range: [3, 12], tune_at: 4}}"),
        ("NeedsOne", ONE, "{n: {range: [1, 32], tune_at: 8}}"),
        ("FirstTwo", ONE, "{n: {range: [2, 32], tune_at: 8}}"),
        ("FirstTwo", ONE, "{n: 1}"),
        ("FirstFour", TWO, "{a: {range: [2, 32], tune_at: 8}, b: {range: [2, 32], tune_at: 8}}"),
        ("Pair", "inputs: {x: {shape: [a, 4]}, y: {shape: [a, 4]}}", "{a: [1, 32]}"),
    ],
)
def test_the_proposed_edit_is_accepted(spec_of: Any, tmp_path: Path, model: str, inputs: str, bucket: str) -> None:
    export(spec_of(model, inputs, bucket), tmp_path)


@pytest.mark.parametrize(("model", "inputs"), [("Padded", ONE), ("PaddedAndIndexed", ONE), ("PaddedMask", ALIKE)])
def test_a_condition_that_every_size_of_the_range_meets_is_none(
    spec_of: Any, tmp_path: Path, model: str, inputs: str
) -> None:
    export(spec_of(model, inputs, "{n: {range: [8, 50000], tune_at: 64}}"), tmp_path)


def test_a_condition_that_says_nothing_of_a_size_settles_nothing() -> None:
    size = sympy.Symbol("size", integer=True)
    ranges = {size: ValueRanges(8, 16)}
    assert settled(sympy.log(size) > 0, ranges) is sympy.true
    assert settled(OpaqueUnaryFn_log(size - 8) > -1000, ranges) is None


def test_each_of_hundreds_of_thousands_of_sizes_is_tried() -> None:
    samples, batch = sympy.symbols("samples batch", integer=True)
    ranges = {samples: ValueRanges(16_000, 480_000), batch: ValueRanges(1, 2)}
    frames = FloorDiv(FloorDiv(samples, 80) - 3, 2) + 1
    for always in (
        sympy.Ne(Mod(1, FloorDiv(samples, 16)), 0),
        sympy.Eq(Mod(64 * frames, 16 * frames), 0),
        sympy.Eq(Mod(64 * frames * batch, frames), 0),
        Max(samples, batch) > 2 * batch,
    ):
        assert settled(always, ranges) is sympy.true, always
        assert settled(sympy.Not(always), ranges) is sympy.false, always
    for but_one in (sympy.Ne(samples, 479_999), Mod(samples, 479_999) + batch > 1):
        assert settled(but_one, ranges) is None, but_one
    for unknown in (Mod(1, samples - 479_999) >= 0, Mod(samples**4, 7) >= 0):  # by zero; beyond 64 bits
        assert settled(unknown, ranges) is None, unknown


def test_a_condition_that_one_size_violates_is_still_one(spec_of: Any, tmp_path: Path) -> None:
    refused = refusal(spec_of("Swings", ONE, "{n: {range: [8, 64], tune_at: 23}}"), tmp_path)
    assert "`n: 8..64`" in str(refused)


def test_the_command_fails_with_the_proposal(tmp_path: Path, spec_of: Any) -> None:
    """`aotc build` ends with 1; its message names the model's dim and the edit, and no dump of export's is in it."""
    spec_of("Eights", "inputs: {x: {shape: [2, seq]}}", "{seq: {range: [1, 64], tune_at: 16}}")
    ran = run_here("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store")
    shown = ran.stdout + ran.stderr
    assert ran.returncode == 1
    assert "multiple_of: 8" in shown and "`seq % 8 == 0`" in shown
    assert "draft_export" not in shown and len(shown.splitlines()) < 30


def test_the_inverse_of_a_spectrogram_has_any_length(spec_of: Any, tmp_path: Path) -> None:
    """Cut or padded as eager does; a frame each 16 samples, so most lengths end between two."""
    spec = spec_of("Inverses", "inputs: {x: {shape: [2, n]}}", "{n: [100, 400]}")
    module, (bucket,) = build_module(spec, tmp_path), spec.buckets
    signature = make_signature(spec, module)
    leaves = signature_leaves(spec, signature, tuned_dims(bucket), "cpu", 0, tmp_path)
    captured = capture(module, signature, leaves, dynamic_shapes(signature, bucket), frozen=False)
    for samples in (100, 111, 112, 127, 399, 400):
        x = torch.randn(2, samples)
        results, other_size = run_graph(captured, [x], {})
        assert not other_size
        for result, expected in zip(results, module(x), strict=True):
            torch.testing.assert_close(result, expected)


def test_a_condition_over_two_dims_is_kept_in_their_names(spec_of: Any, tmp_path: Path) -> None:
    """It is in the guards that export gives and not in its range constraints (which allow 32 + 32)."""
    spec = spec_of("Joined", TWO, "{a: {range: [1, 32], tune_at: 8}, b: {range: [1, 32], tune_at: 8}}")
    module, (bucket,) = build_module(spec, tmp_path), spec.buckets
    signature = make_signature(spec, module)
    leaves = signature_leaves(spec, signature, tuned_dims(bucket), "cpu", 0, tmp_path)
    captured = capture(module, signature, leaves, dynamic_shapes(signature, bucket), frozen=False)
    assert all(limits.upper == 32 for limits in captured.program.range_constraints.values())
    assert conditions(captured.guards, signature, bucket) == ("b + a <= 40",)


@pytest.mark.parametrize(
    ("entry", "sizes", "needed"),
    [
        ("a*b", "{a: [1, 9], b: [1, 9]}", ("(a*b) >= 2",)),
        ("a - b + 7", "{a: [2, 9], b: [2, 9]}", ("(a - b + 7) >= 2",)),
        ("a + b", "{a: [1, 9], b: [1, 9]}", ()),
    ],
)
def test_a_size_of_several_dims_is_not_taken_for_0_or_1(
    spec_of: Any, tmp_path: Path, entry: str, sizes: str, needed: tuple[str, ...]
) -> None:
    """torch.export decides `m.shape[0] == 1` for good, and says so nowhere."""
    spec = spec_of("Lone", f"inputs: {{x: {{shape: [a, 4]}}, y: {{shape: [b, 4]}}, m: {{shape: ['{entry}']}}}}", sizes)
    module, (bucket,) = build_module(spec, tmp_path), spec.buckets
    signature = make_signature(spec, module)
    leaves = signature_leaves(spec, signature, tuned_dims(bucket), "cpu", 0, tmp_path)
    captured = capture(module, signature, leaves, dynamic_shapes(signature, bucket), frozen=False)
    assert conditions(captured.guards, signature, bucket) == needed


def test_conditions_are_said_by_the_paths_of_nested_inputs(spec_of: Any) -> None:
    spec = spec_of("Pair", "inputs: {x: [{k: {shape: [3, '2*n']}}], y: {shape: [n]}}", "{n: [1, 32]}")

    class Nested(nn.Module):
        def forward(self, x: list[dict[str, Tensor]], y: Tensor) -> Tensor:
            return x[0]["k"].sum() + y

    signature = make_signature(spec, Nested())
    (bucket,) = spec.buckets
    guards = ["L['x'][0]['k'].size()[1] >= 2", "L['y'].size()[0] <= 32", "not torch.is_grad_enabled()"]
    assert conditions(guards, signature, bucket) == ("2 * n >= 2", "n <= 32")


def test_a_branch_on_a_value_names_the_dims_that_it_is_compared_with(spec_of: Any, tmp_path: Path) -> None:
    spec = spec_of("Counts", "inputs: {x: {shape: ['2*rows', cols]}}", "{rows: [2, 32], cols: [2, 32]}")
    signature, (bucket,) = make_signature(spec, _Identity()), spec.buckets

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            count = (x > 0).sum().item()
            return x * 2 if count > x.shape[0] * x.shape[1] else x

    leaves = signature_leaves(spec, signature, tuned_dims(bucket), "cpu", 0, tmp_path)
    with (
        pytest.raises(RuntimeError, match="data-dependent") as caught,
        constraints_explained(nn.Identity(), signature, bucket),
    ):
        capture(Counts(), signature, leaves, dynamic_shapes(signature, bucket), frozen=False)
    first = str(caught.value).splitlines()[0]
    assert "cols" in first and "rows" in first and not re.search(r"\bs\d+\b", first)
    assert first.endswith(", where u0 is a value in a tensor")


def test_the_larger_and_the_smaller_of_sizes_are_said_in_pythons_words(spec_of: Any) -> None:
    """torch 2.15 writes its own functions there. A model that cuts a table to the size of its input asks so (MPT)."""
    spec = spec_of("Learned", ONE, "{n: [1, 32]}")
    signature, (bucket,) = make_signature(spec, _Identity()), spec.buckets
    size = "L['x'].size()[0]"
    guards = [f"(64 + ((-1)*torch.sym_max(0, 64 + ((-1)*{size})))) != 64", f"torch.sym_min(1, {size} // 1) >= 1"]
    assert conditions(guards, signature, bucket) == ("64 + -1 * max(0, 64 + -1 * n) != 64", "min(1, n // 1) >= 1")
    violated = f"Not all values of n satisfy the generated guard torch.sym_max(4, {size}) == {size}."
    problem = explain_constraints(f"Constraints violated (n)!\n  - {violated}", signature, bucket)
    assert problem is not None and "it needs `max(4, n) == n`; the range also holds 1, 2, 3" in problem.message


@pytest.mark.parametrize(
    ("fixes", "bucket", "message", "hint"),
    [
        (
            "  _n = Dim('_n', min=2, max=4)\n  n = 8*_n",
            "{n: [1, 64]}",
            "`n: 1..64` as one graph",
            "`n: {range: [16, 32], multiple_of: 8}`",
        ),
        (
            "  n_over_4 = 2*_n_over_4\n  _n_over_4 = Dim('_n_over_4', max=3)",
            "{n: {range: [8, 64], multiple_of: 4}}",
            "`n: 8..64 step 4` as one graph: it needs `n % 8 == 0",
            "`n: {range: [8, 24], multiple_of: 8}`",
        ),
        ("  n = 64", "{n: [1, 64]}", "the captured graph holds for `n` of 64", "`n: 64`"),
    ],
)
def test_fixes_that_torch_suggests_are_said_in_the_manifest_s_dims(
    spec_of: Any, fixes: str, bucket: str, message: str, hint: str
) -> None:
    """Where torch's message has no condition that can be said over dims."""
    spec = spec_of("Learned", ONE, bucket)
    text = f"Constraints violated (n)!\n  - unknown\nSuggested fixes:\n{fixes}\n"
    problem = explain_constraints(text, make_signature(spec, _Identity()), spec.buckets[0])
    assert problem is not None
    assert message in problem.message and hint in problem.hint


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Not all values of a satisfy the generated guard L['x'].size()[0] * 2 > L['y'].size()[0]", "`a * 2 > b`"),
        ("a is not what it should be", "a is not what it should be"),
        ("Not all values of a satisfy the generated guard unknown(L['x'].size()[0])", "unknown(L['x'].size()[0])"),
    ],
)
def test_a_range_that_torch_refuses_for_any_other_reason_is_named_with_what_to_write(
    spec_of: Any, tmp_path: Path, reason: str, said: str
) -> None:
    spec = spec_of("Pair", TWO, "{a: {range: [2, 32], tune_at: 8}, b: {range: [2, 8], multiple_of: 2}}")
    text = f"Constraints violated (a, b_over_2)! For more information, run.\n  - {reason}.\n"
    problem = explain_constraints(text, make_signature(spec, build_module(spec, tmp_path)), spec.buckets[0])
    assert problem is not None and said in problem.message and "onstraints violated" not in problem.message
    assert "holds for all of `a: 2..32` and `b: 2..8 step 2`" in problem.message
    assert "in the manifest's buckets: `a: 8`, … and `b: 8`, …" in problem.hint


def test_a_dim_that_follows_from_another_is_said_as_an_expression(spec_of: Any, tmp_path: Path) -> None:
    spec = spec_of("Pair", TWO, "{a: [2, 32], b: {range: [8, 64], multiple_of: 8}}")
    text = (
        "Constraints violated (b_over_8)!\n  - The values of b_over_8 = L['y'].size()[0] must always be related to the "
        "values of a = L['x'].size()[0] by b_over_8 = a + 1.\nSuggested fixes:\n  b_over_8 = a + 1\n"
    )
    problem = explain_constraints(text, make_signature(spec, build_module(spec, tmp_path)), spec.buckets[0])
    assert problem is not None and problem.message == "the model needs `b` to be `8*(a + 1)`"


@pytest.mark.parametrize(
    ("guard", "kept"),
    [
        ("-1*{n} >= -1*{n}", ()),  # as transformers' Lfm2 has it
        ("{n} <= {n}", ()),
        ("{n} == {n}", ()),
        ("{n} > -1*{n}", ("n > -1 * n",)),
        ("1 <= {n} <= {n}", ("1 <= n <= n",)),
    ],
)
def test_a_size_that_is_compared_with_itself_is_no_condition(spec_of: Any, guard: str, kept: tuple[str, ...]) -> None:
    spec = spec_of("Learned", ONE, "{n: [1, 32]}")
    signature, (bucket,) = make_signature(spec, _Identity()), spec.buckets
    found = conditions([guard.format(n="L['x'].size()[0]"), "L['x'].size()[0] < 100"], signature, bucket)
    assert found == (*kept, "n < 100")


@pytest.mark.parametrize("name", ["pixel-values", "two words", "a.b", "it's", "a[0]"])
def test_a_nested_input_may_have_any_name(spec_of: Any, tmp_path: Path, name: str) -> None:
    inputs = f'inputs: {{x: {{"{name}": {{shape: [n, 4]}}}}}}'
    export(spec_of("Named", inputs, "{n: {range: [4, 64], multiple_of: 2}}"), tmp_path)
    error = refusal(spec_of("Named", inputs, "{n: {range: [4, 64], tune_at: 8}}"), tmp_path)
    assert "it needs `n % 2 == 0`" in error.message


def test_a_guard_that_cannot_be_said_over_dims_is_a_build_error(spec_of: Any) -> None:
    spec = spec_of("Learned", ONE, "{n: [1, 32]}")
    signature = make_signature(spec, _Identity())
    with pytest.raises(BuildError, match="cannot use as a guard"):
        conditions(["math.sqrt(L['x'].size()[0]) > 2"], signature, spec.buckets[0])


def test_other_complaints_of_export_are_left_alone(spec_of: Any) -> None:
    spec = spec_of("Learned", ONE, "{n: [1, 32]}")
    signature = make_signature(spec, _Identity())
    assert explain_constraints("Could not guard on data-dependent expression", signature, spec.buckets[0]) is None


class _Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_edges_are_the_sizes_at_which_an_axis_is_0_or_1(spec_of: Any) -> None:
    spec = spec_of("Pair", 'inputs: {x: {shape: [n, 4]}, y: {shape: ["n-2"]}}', "{n: {range: [2, 32], tune_at: 8}}")

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x

    signature = make_signature(spec, Two())
    assert [size for _, _, size in edge_sizes(signature, spec.buckets[0])] == [2, 3]


def test_running_the_edges_leaves_the_models_buffers_as_they_were(tmp_path: Path) -> None:
    """A counter in the model counts calls, and the build's own trials are none."""
    (tmp_path / "counting.py").write_text(
        "import torch\n"
        "class Counting(torch.nn.Module):\n"
        "    made = []\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('calls', torch.zeros((), dtype=torch.int64))\n"
        "        self.made.append(self)\n"
        "    def forward(self, x):\n"
        "        self.calls.add_(1)\n"
        "        return x + self.calls\n"
    )
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(
        f"version: 1\nmodels:\n  m:\n    factory: counting.py:Counting\n    {ONE}\n"
        "    buckets: [{n: {range: [0, 8]}}]\n"
    )
    spec = read_manifest(manifest).models["m"]
    export(spec, tmp_path)
    made = type(build_module(spec, tmp_path)).made  # type: ignore[attr-defined]
    assert [int(module.calls) for module in made if module.calls.device.type == "cpu"] == [0] * len(made)


@pytest.mark.parametrize(
    ("sizes", "takes", "proposed"),
    [
        (SizeRange(1, 16), lambda n: n % 4 == 0, "`n: {range: [4, 16], multiple_of: 4}`"),
        (
            SizeRange(1, 16, 1, 8),
            lambda n: n != 4,
            "`n: {range: [1, 3]}` and `n: 4` and `n: {range: [5, 16], tune_at: 8}`",
        ),
        (SizeRange(3, 16, 1, 4), lambda n: n < 5, "`n: {range: [3, 4]}` and `n: {range: [5, 16]}`"),
        (SizeRange(1, 16), lambda n: n == 16, "`n: 16`"),
        (SizeRange(1, 16), lambda n: False, ""),
    ],
)
def test_split_proposals(sizes: SizeRange, takes: Any, proposed: str) -> None:
    assert proposal("n", split_sizes(sizes, takes)) == proposed


def test_a_proposal_of_more_buckets_than_a_person_reads_is_left_out() -> None:
    assert proposal("n", split_sizes(SizeRange(1, 64), lambda n: bin(n).count("1") % 2 == 0)) == ""
