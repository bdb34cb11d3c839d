"""Models of transformers in a process without torch: padded calls, caches in the model and passed in, and forks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from calls_without_torch import Part
from forked_python import CHILDREN
from processes import finish, start
from safetensors.torch import save_file
from test_calls_without_torch import Call, check_equal, in_numpy, in_torch, leaves_of, of
from test_standalone import module_of
from test_swaps_without_torch import told

HERE = Path(__file__).parent
MODELS = module_of(HERE / "library_models.py", "library_models_without_torch")


def batch_of(batch: int, seq: int, *lengths: int) -> Call:
    """With a mask if lengths are given, of each row."""
    tokens = torch.randint(1, 96, (batch, seq))
    if not lengths:
        return of(input_ids=tokens)
    mask = torch.arange(seq) < torch.tensor(lengths)[:, None]
    return of(input_ids=tokens, attention_mask=mask.long())


def tokens(count: int, place: str, **more: Part) -> list[Call]:
    """One after the other, and the second again."""
    ids = torch.randint(0, 96, (count + 1, 1, 1))
    return [
        of(input_ids=ids[at], **{place: torch.tensor([at % count or at // count])}, **more) for at in range(count + 1)
    ]


CACHE = {
    name: Part(torch.zeros(2, 1, 2, MODELS.LENGTH, 8), (2, 1, 2, MODELS.LENGTH, 8), (256, 256, 128, 8, 1))
    for name in ("keys", "values")
}
"""That each call writes to, and the next one continues: one array in either process."""

torch.manual_seed(4)
BERT = [
    batch_of(2, 16, 16, 9),
    batch_of(1, 5, 3),
    batch_of(2, 7),
    batch_of(2, 16),
    batch_of(3, 11, 11, 4, 1),
    batch_of(4, 32, 32, 17, 20, 2),
]
CASES: dict[str, tuple[Callable[[], torch.nn.Module], list[Call], list[str]]] = {
    "padded-bert": (MODELS.bert, BERT, ["batch=2,seq=16"] * 4 + ["batch=4,seq=8..32 step 8"] * 2),
    "decoder": (MODELS.decoder, tokens(4, "cache_position"), ["-"] * 5),
    "continuing": (lambda: MODELS.Continuing().eval(), tokens(4, "position", **CACHE), ["-"] * 5),
}
"""What makes the model, calls in turn, and the bucket of each."""


@pytest.fixture(scope="module")
def store(shared_folder: Path, built: Any) -> Path:
    return built(shared_folder, "libraries-store", HERE / "libraries.yaml")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def came(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of all calls, in one process."""
    folder = tmp_path_factory.mktemp("calls")
    asked = {
        name: (f"{store}#{name}", in_numpy(dict(make().state_dict())), [in_numpy(list(call)) for call in calls])
        for name, (make, calls, _) in CASES.items()
    }
    (folder / "asked.pickle").write_bytes(pickle.dumps(asked))
    ran = finish(start(HERE / "calls_without_torch.py", folder))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    loaded: dict[str, Any] = pickle.loads((folder / "told.pickle").read_bytes())
    assert loaded["imported"] == [] and "_cpu.abi3.so" in loaded["mapped"]
    assert not [name for name in loaded["mapped"] if "torch" in name or "c10" in name]
    return loaded


@pytest.mark.parametrize("name", CASES)
def test_library_models_give_eager_s_values_and_writes(came: dict[str, Any], name: str) -> None:
    """Of the decoders, each call needs what the ones before left in the cache."""
    make, calls, buckets = CASES[name]
    module = make()
    for (args, kwargs), of_call in zip(map(in_torch, calls), came[name], strict=True):
        with torch.no_grad():
            result = module(*args, **kwargs)
        result = dict(result) if isinstance(result, dict) else result
        check_equal(of_call["result"], in_numpy(result))
        check_equal(of_call["given"], in_numpy(leaves_of([args, kwargs])))
    assert [of_call["ran"] for of_call in came[name]] == [[bucket] for bucket in buckets]
    if name == "padded-bert":
        assert [of_call["padded"] for of_call in came[name]] == [0, 1, 1, 0, 1, 0]


def test_a_child_of_a_server_that_preloads_calls_them(came: dict[str, Any], store: Path, tmp_path: Path) -> None:
    """Padded BERT, and a decoder from where its parent stopped, whose cache stays as it was."""
    for name in ("padded-bert", "decoder"):
        make, calls, _ = CASES[name]
        save_file(dict(make().state_dict()), tmp_path / f"{name}.safetensors")
        arrays = {f"{at} {key}": in_numpy(each) for at, (_, call) in enumerate(calls) for key, each in call.items()}
        expected = {f"{at} y": leaves_of(each["result"])[0] for at, each in enumerate(came[name])}
        numpy.savez(tmp_path / f"{name}.npz", **arrays, **expected)
    code = """
folder = sys.argv[3]
of = {name: dict(numpy.load(f"{folder}/{name}.npz")) for name in ("padded-bert", "decoder")}
models = {name: aotc.standalone.load(f"{store}#{name}", weights=f"{folder}/{name}.safetensors") for name in of}
def right(name, at):
    arrays = {key.partition(" ")[2]: of[name][key] for key in of[name] if key.startswith(f"{at} ")}
    expected = arrays.pop("y")
    result = models[name](**arrays)
    result = result["last_hidden_state"] if isinstance(result, dict) else result
    return numpy.allclose(result, expected, atol=2e-5)
def served(first):
    return all(right("padded-bert", at) for at in range(6)) and all(right("decoder", at) for at in range(first, 4))
aotc.standalone.set_num_threads(2)
found = [right("padded-bert", 4), right("decoder", 0), right("decoder", 1)]
found += [child(lambda: served(2)), child(lambda: child(lambda: served(2)) == 0), served(2)]
print(json.dumps([found, models["padded-bert"].stats().padded_calls, "torch" in sys.modules]))
"""
    found = told(CHILDREN + code, store, tmp_path)
    assert found == [[True, True, True, 0, 0, True], 4, False]
