"""Integers that a model reads as values: what `aotc.record` writes of them is what the model takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import aotc
from aotc.compiler.fix_buckets import main as check_main
from aotc.compiler.fix_buckets import why_not_captured
from aotc.compiler.planning.key import model_factors
from aotc.compiler.value_trials import Tried, try_values
from aotc.errors import ManifestError
from aotc.manifest import read_manifest
from aotc.manifest.edit import ModelEdit, edited
from aotc.models.example_inputs import example_leaves
from aotc.models.factory import build_module
from aotc.tools.recording import check_written
from aotc.tools.recording.values_file import keep_used_values, values_file

NETS = """\
import torch
from torch import nn
from torch.nn import functional as F

IMAGE = 98


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(99, 4)

    def forward(self, ids, mask=None):
        words = self.words(ids)
        return words if mask is None else words * mask.unsqueeze(-1)


class Images(Tokens):
    def forward(self, ids, pixels):
        here = (ids == IMAGE).unsqueeze(-1)
        torch._check(4 * here.sum().item() == pixels.numel())
        return self.words(ids).masked_scatter(here.expand(-1, -1, 4), pixels)


class Edges(nn.Module):
    def forward(self, x, edges):
        return x.index_add(0, edges[1], x[edges[0]])


class Graphs(nn.Module):
    def forward(self, x, edges, graph, size):
        x = x.index_add(0, edges[1], x[edges[0]])
        return x.new_zeros(size.shape[0], 4).index_add(0, graph, x) / size.unsqueeze(-1)


class Lengths(nn.Module):
    def forward(self, x, lengths):
        keep = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(-1)
        torch._assert_async((lengths <= x.shape[1]).all(), "too long")
        return (x * keep.unsqueeze(-1)).sum(1) / lengths.unsqueeze(-1)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(99, 4, mode="sum")

    def forward(self, ids, offsets):
        torch._assert_async((offsets[1:] >= offsets[:-1]).all() & (offsets[0] == 0), "not sorted")
        return self.words(ids, offsets)


class Picks(nn.Module):
    def forward(self, x, last):
        return x[torch.arange(x.shape[0]), last]


class Masked(nn.Module):
    def forward(self, x, mask):
        return x.masked_fill(~mask, float("-inf")).softmax(-1)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(64, 4)

    def forward(self, x, positions):
        return x + self.places(positions)


class Grids(nn.Module):
    def forward(self, patches, grid):
        torch._assert_async(grid.prod(-1).sum() == patches.shape[0], "another number of patches")
        return patches * grid.sum()


class Ragged(nn.Module):
    def forward(self, batch):
        return [each["x"][each["at"]] for each in batch]
"""


def ids(count: int) -> Tensor:
    """Up to 89."""
    return 89 - torch.arange(count) * 7 % 60


def ids_with_images(seq: int, count: int) -> Tensor:
    ids = torch.arange(seq).view(1, -1)
    ids[:, 1 : 1 + count] = 98
    return ids


def edges(nodes: int, count: int) -> Tensor:
    return torch.stack([torch.arange(count) % nodes, torch.arange(count) * 3 % nodes])


RECORDED = {"recorded": "recorded.values.safetensors#net"}
"""What stays where no other values will do."""

KINDS: dict[str, tuple[str, list[tuple[Any, ...]], dict[str, Any]]] = {
    "tokens": (
        "Tokens",
        [(ids(seq).view(1, -1), torch.arange(seq).view(1, -1) % 3 > 0) for seq in (5, 9)],
        {"ids": {"randint": [0, 90]}, "mask": {"randint": [0, 2]}},
    ),
    "image tokens": (
        "Images",
        [(ids_with_images(seq, 6), torch.randn(6, 4)) for seq in (9, 16)],
        {"ids": RECORDED},
    ),
    "edges": (
        "Edges",
        [(torch.randn(nodes, 4), edges(nodes, count)) for nodes, count in ((10, 30), (14, 50))],
        {"edges": {"randint": [0, "length"]}},
    ),
    "graphs of a batch": (
        "Graphs",
        [
            (torch.randn(nodes, 4), edges(nodes, 3 * nodes), torch.arange(nodes) % graphs, torch.arange(graphs) + 1)
            for nodes, graphs in ((10, 2), (14, 3), (21, 7))
        ],
        {
            "edges": {"randint": [0, "length"]},
            "graph": {"randint": [0, "length2"]},
            "size": {"randint": [1, "length2 + 1"]},
        },
    ),
    "lengths": (
        "Lengths",
        [(torch.randn(2, seq, 4), torch.tensor([seq, seq // 2])) for seq in (8, 12)],
        {"lengths": {"randint": [4, "seq + 1"]}},
    ),
    "offsets": (
        "Bags",
        [(ids(count), torch.arange(0, count, 5)) for count in (15, 20)],
        {"ids": {"randint": [0, 90]}, "offsets": RECORDED},
    ),
    "indices of another input": (
        "Picks",
        [(torch.randn(3, seq, 4), torch.tensor([0, seq - 2, seq - 1])) for seq in (8, 12)],
        {"last": {"randint": [0, "seq"]}},
    ),
    "masks": (
        "Masked",
        [(torch.randn(2, seq), torch.arange(seq).expand(2, -1) % 3 > 0) for seq in (5, 9)],
        {"mask": RECORDED},  # a row without any is NaN
    ),
    "positions": (
        "Positions",
        [(torch.randn(1, seq, 4), torch.arange(seq).view(1, -1)) for seq in (5, 9)],
        {"positions": {"randint": [0, 9]}},
    ),
    "image grids": (
        "Grids",
        [(torch.randn(a * b, 4), torch.tensor([[1, a, b]])) for a, b in ((2, 3), (4, 5))],
        {"grid": RECORDED},
    ),
    "ragged": (
        "Ragged",
        [
            ([{"x": torch.randn(n, 4), "at": torch.arange(2, n)} for n in sizes],)
            for sizes in ((5, 9), (12, 7), (6, 15))
        ],
        {"batch[0].at": {"randint": [0, "length"]}, "batch[1].at": {"randint": [0, "length3"]}},
    ),
}


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "value_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "value_nets", raising=False)
    import value_nets

    return value_nets


def recorded(nets: Any, name: str, calls: list[tuple[Any, ...]]) -> Any:
    """What is recorded of these calls, unchecked."""
    module = getattr(nets, name)().eval()
    factories = {"net": f"value_nets:{name}"}
    with torch.no_grad(), aotc.record("recorded.yaml", {"net": module}, factories=factories, check=False):
        for call in calls:
            module(*call)
    return read_manifest("recorded.yaml").models["net"]


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_drawn_where_the_model_takes_others_and_else_are_those_of_the_calls(
    kind: str, nets: Any, tmp_path: Path
) -> None:
    name, calls, inits = KINDS[kind]
    spec = recorded(nets, name, calls)
    tried = try_values(spec, tmp_path)
    assert {path: tried.inits.get(path, RECORDED) for path in inits} == inits
    text = Path("recorded.yaml").read_text()
    text, errors = edited(text, [ModelEdit("net", inits=tried.inits)])
    assert not errors
    Path("recorded.yaml").write_text(text)
    keep_used_values(tmp_path / "recorded.yaml")
    spec = read_manifest("recorded.yaml").models["net"]
    assert values_file(tmp_path / "recorded.yaml").exists() is (RECORDED in inits.values())
    module = build_module(spec, tmp_path)
    for bucket in spec.buckets:
        sizes = [dims for dims in tried.fixed if dims.keys() == bucket.keys()] or [bucket]
        for one in sizes[:2]:
            assert why_not_captured(spec, tmp_path, dict(one)) is None, module


def test_a_range_becomes_the_recorded_sizes_where_recorded_values_go_with_no_others(nets: Any, tmp_path: Path) -> None:
    spec = recorded(nets, "Grids", KINDS["image grids"][1])
    assert try_values(spec, tmp_path) == Tried({}, ({"length": 6}, {"length": 20}))
    spec = recorded_again(nets, "Tokens", KINDS["tokens"][1])
    assert try_values(spec, tmp_path).fixed == ()


def recorded_again(nets: Any, name: str, calls: list[tuple[Any, ...]]) -> Any:
    Path("recorded.yaml").unlink()
    return recorded(nets, name, calls)


def test_a_model_that_ends_the_process_keeps_its_recorded_values(nets: Any, tmp_path: Path) -> None:
    """As a kernel that trusts its indices."""
    text = NETS + "\n\nclass Trusting(nn.Module):\n    def forward(self, x, at):\n        import os\n"
    text += "        return x[at] if int(at.max()) < x.shape[0] else os.abort()\n"
    Path("value_nets.py").write_text(text)
    sys.modules.pop("value_nets")
    import value_nets

    spec = recorded(value_nets, "Trusting", [(torch.randn(n, 4), torch.arange(n)) for n in (4, 6)])
    assert try_values(spec, tmp_path) == Tried()


def test_values_of_the_nearest_call_are_cut_or_repeated(nets: Any) -> None:
    calls = [(torch.arange(seq).view(1, -1) + 10 * seq % 90, torch.ones(1, seq)) for seq in (3, 6)]
    spec = recorded(nets, "Tokens", calls)
    for seq, ids in ((3, range(30, 33)), (6, range(60, 66)), (5, range(60, 65)), (8, [*range(60, 66), 65, 65])):
        values = example_leaves(spec, {"batch": 1, "seq": seq}, "cpu", 3)
        assert values[0].tolist() == [[*ids]]  # type: ignore[union-attr]


def test_a_key_depends_on_the_values_that_are_used_and_on_no_others(nets: Any, tmp_path: Path) -> None:
    spec = recorded(nets, "Images", KINDS["image tokens"][1])
    module, file = nets.Images().eval(), values_file(tmp_path / "recorded.yaml")
    before = model_factors(spec, module, {})
    assert before["manifest"]["recorded"].startswith("sha256:")
    tensors, metadata = load_file(file), {"net": _metadata(file)["net"], "other": "[]"}
    save_file({**tensors, "other/0/x": torch.ones(1)}, file, metadata)
    assert model_factors(read_manifest("recorded.yaml").models["net"], module, {}) == before
    tensors["net/0/ids"][0, -1] += 1
    save_file(tensors, file, metadata)
    assert model_factors(read_manifest("recorded.yaml").models["net"], module, {}) != before


def _metadata(file: Path) -> dict[str, str]:
    data = file.read_bytes()
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


CALL = json.dumps([{"ids": [1, 2]}])
HOSTILE: dict[str, tuple[Any, str]] = {
    "not safetensors": (b"\xff" * 64, "cannot be read"),
    "a header of four gigabytes": ((1 << 32).to_bytes(8, "little") + b"{}", "cannot be read"),
    "no metadata": (({}, None), "holds no calls of `net`"),
    "another model": (({}, {"other": CALL}), "holds no calls of `net`"),
    "no values": (({}, {"net": CALL}), "holds no values of `ids`"),
    "another shape": (({"net/0/ids": torch.ones(2, 1, dtype=torch.int64)}, {"net": CALL}), "not integers [1, 2]"),
    "floats": (({"net/0/ids": torch.ones(1, 2)}, {"net": CALL}), "not integers [1, 2]"),
    "another dtype": (({"net/0/ids": torch.ones(1, 2, dtype=torch.int32)}, {"net": CALL}), "values are int32"),
    "calls that are not a list": (({}, {"net": "{"}), "cannot be read"),
    "a link": ("link", "is a link"),
    "a folder": ("folder", "there is no file"),
    "too large": ("large", "recorded values may have"),
}


@pytest.mark.parametrize("defect", HOSTILE)
def test_a_file_of_values_that_cannot_be_used_is_told(defect: str, nets: Any, tmp_path: Path) -> None:
    content, message = HOSTILE[defect]
    recorded(nets, "Tokens", KINDS["tokens"][1])
    file = values_file(tmp_path / "recorded.yaml")
    other = file.rename(tmp_path / "other")
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "link":
        file.symlink_to(other)
    elif content == "folder":
        file.mkdir()
    elif content == "large":
        with file.open("wb") as stream:
            stream.truncate(17 << 20)
    else:
        save_file(content[0], file, content[1])
    with pytest.raises(ManifestError) as caught:
        read_manifest("recorded.yaml")
    (issue,) = caught.value.issues
    assert message in issue.message
    line = Path("recorded.yaml").read_text().splitlines()[int(issue.where.rpartition(":")[2]) - 1]
    assert "init: {recorded" in line


def test_what_the_check_finds_is_written_and_values_that_are_not_needed_are_removed(
    nets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the check, here in this one."""
    recorded(nets, "Edges", KINDS["edges"][1])
    sent: list[ModelEdit] = []

    class Asked:
        def job(self, kind: Any) -> Any:
            return kind(str(tmp_path / "recorded.yaml"), ("net",))

        def send(self, edit: ModelEdit) -> None:
            sent.append(edit)

    with monkeypatch.context() as patched:
        patched.setattr("aotc.compiler.fix_buckets.Parent", Asked)
        check_main()
    assert sent[-1].inits == {"edges": {"randint": [0, "length"]}} and sent[-1].problem is None
    monkeypatch.setattr(check_written, "_edits", lambda *asked: iter(sent))
    check_written.check_written(tmp_path / "recorded.yaml", {"net": []})
    assert "init: {randint: [0, length]}" in Path("recorded.yaml").read_text()
    assert not values_file(tmp_path / "recorded.yaml").exists()
