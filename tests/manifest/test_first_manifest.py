"""`aotc init` and `inputs: auto`: manifests that follow from a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import run_here
from torch import Tensor, nn

from aotc.errors import ManifestError
from aotc.manifest import Manifest, read_manifest
from aotc.models.auto_inputs import auto_inputs, with_inputs
from aotc.models.factory import build_modules
from aotc.tools.recording.first_manifest import write_first_manifest
from aotc.tools.recording.manifest_text import to_yaml

pytestmark = pytest.mark.usefixtures("unchecked")

NETS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.pixels = nn.Conv2d(3, width, 2)

    def forward(self, input_ids, mask=None, *, images=None, extra=None, scale=1.0):
        return self.words(input_ids) * scale


def call():
    ids = torch.tensor([[1, 7, 0, 41], [2, 3, 4, 5]])
    images = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    more = {"extra": {"on": True, "at": [torch.zeros(2, dtype=torch.bool)]}, "images": images, "scale": 1.0}
    return (ids, torch.ones_like(ids)), more


def of_random_numbers():
    return (torch.randint(0, 50, (2, 4)),)


def of_another_forward():
    return torch.ones(1), torch.ones(1), torch.ones(1)


def of_objects():
    return {"input_ids": torch.ones(1, 2, dtype=torch.int64), "extra": object()}


class Offers(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def example_inputs(self):
        return torch.randn(3, 4)


def prints():
    print("made")
    return Offers()


def plain():
    return nn.Linear(4, 4)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def test_the_manifest_s_folder_is_made_and_it_alone_is_printed(folder: Path) -> None:
    ran = run_here("init", "nets.py:prints", "--output", folder / "new" / "net.yaml", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == (folder / "new" / "net.yaml").read_text()
    assert "made" in ran.stderr, "what the factory prints is not a result"


def test_a_place_that_nothing_can_be_written_to_is_said(folder: Path) -> None:
    (folder / "file").touch()
    for output, said in ((folder / ("n" * 300), "File name too long"), (folder / "file" / "net.yaml", "File exists")):
        ran = run_here("init", "nets.py:prints", "--output", output, cwd=folder)
        assert ran.returncode == 2
        assert f"error: cannot write {output}: {said}" in ran.stderr and "--output" in ran.stderr


def test_a_call_becomes_a_manifest_that_builds(folder: Path) -> None:
    arguments = ("nets.py:Net", "--call", "nets.py:call", "--kwarg", "width=4", "--output", folder / "net.yaml")
    ran = run_here("init", *arguments, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == (folder / "net.yaml").read_text()
    manifest = read_manifest(folder / "net.yaml")
    assert build_modules(manifest)["net"].words.embedding_dim == 4  # type: ignore[union-attr]
    spec = manifest.models["net"]
    assert spec.buckets == ({"batch": 2, "seq": 4},) and spec.dtype == "float32"
    assert spec.inputs == {
        "input_ids": {"shape": ["batch", "seq"], "dtype": "int64", "init": {"recorded": "net.values.safetensors#net"}},
        "mask": {"shape": ["batch", "seq"], "dtype": "int64", "init": "ones"},
        "images": {"shape": ["batch", 3, 6, 6], "dtype": "float32", "layout": "channels_last"},
        "extra": {"on": True, "at": [{"shape": ["batch"], "dtype": "bool", "init": "zeros"}]},
    }  # scale has its default value, and is a comment
    assert "      # scale: 1.0\n" in ran.stdout and "None or forward's default" in ran.stdout


def test_the_same_call_gives_the_same_manifest_each_time(folder: Path) -> None:
    """The token ids are those of the example, which are often random."""
    texts = []
    for name in ("one", "two"):
        torch.rand(len(texts) + 1)  # another state of the random numbers
        text = write_first_manifest(folder / f"{name}.yaml", "nets.py:Net", "nets.py:of_random_numbers", {})
        values = (folder / f"{name}.values.safetensors").read_bytes()
        texts.append((text.replace(f"{name}.", "manifest."), values))
    assert texts[0] == texts[1] and "recorded" in texts[0][0]


def test_a_file_is_not_overwritten(folder: Path) -> None:
    (folder / "manifest.yaml").write_text("mine")
    ran = run_here("init", "nets.py:Net", "--call", "nets.py:call", cwd=folder)
    assert ran.returncode == 2 and "manifest.yaml exists" in ran.stderr
    assert (folder / "manifest.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--name", "a/b"), "'a/b' cannot be a model's name"),
        (("--name", "a\udce9"), r"'a\udce9' cannot be a model's name"),
        (("--name", "a" * 129), "cannot be a model's name"),
        (("--output", "a\udce9.yaml"), r"a\udce9.yaml' is not UTF-8"),
    ],
)
def test_names_that_cannot_be_written_are_refused(folder: Path, more: tuple[str, str], reason: str) -> None:
    before = sorted(folder.iterdir())
    ran = run_here("init", "nets.py:Offers", *more, cwd=folder)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert reason in ran.stderr
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before


def test_a_module_may_offer_its_call(folder: Path) -> None:
    ran = run_here("init", "nets.py:Offers", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    (spec,) = read_manifest(folder / "manifest.yaml").models.values()
    assert spec.inputs == {"input": {"shape": ["batch", 4], "dtype": "float32"}}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nets.py:plain",), "there is no example call: Linear has no `config`"),
        (("nets.py:Net", "--call", "nets.py:of_another_forward"), "does not fit Net.forward: too many positional"),
        (("nets.py:Net", "--call", "nets.py:of_objects"), "`extra` is object; a manifest holds tensors"),
        (("nets.py:Net", "--call", "nets"), "'nets' does not name an object of a module"),
        (("nets.py:Net", "--call", "nets.py:nowhere"), "has no `nowhere`"),
        (("nets.py:Net", "--kwarg", "width"), "'width' is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_is_left(
    folder: Path, arguments: tuple[str, ...], reason: str
) -> None:
    ran = run_here("init", *arguments, cwd=folder)
    assert ran.returncode == 2 and reason in ran.stderr, ran.stderr
    assert not list(folder.glob("*.yaml")) and not list(folder.glob(".*.yaml"))


# -- auto -------------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """As models of transformers are: a configuration, and the name of the first input."""

    main_input_name = "input_ids"

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**{"vocab_size": 50, **config})

    def forward(self, input_ids: Tensor, attention_mask: Any = None, decoder_input_ids: Any = None) -> Tensor:
        return input_ids


class Pictures(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=size, num_channels=1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return pixel_values


IDS = {"shape": ["batch", "seq"], "dtype": "int64", "init": {"randint": [0, 50]}}
MASK = {"shape": ["batch", "seq"], "dtype": "int64", "init": "ones"}


def test_inputs_follow_from_a_configuration() -> None:
    assert auto_inputs(Words()) == {"attention_mask": MASK, "input_ids": IDS}
    decoder = {**IDS, "shape": ["batch", "decoder_seq"]}
    assert auto_inputs(Words(is_encoder_decoder=True))["decoder_input_ids"] == decoder
    for size in (16, [16, 16], {"height": 16, "width": 16}):
        assert auto_inputs(Pictures(size)) == {"pixel_values": {"shape": ["batch", 1, 16, 16]}}


@pytest.mark.parametrize(("types", "init"), [(2, 2), (0, 1), (1, None)])
def test_types_of_tokens_are_an_input_where_tokenizers_give_them(types: int, init: int | None) -> None:
    """That is: unless the model tells one type from itself, as RoBERTa does; DeBERTa tells none, and is given zeros."""

    class Typed(Words):
        def forward(self, input_ids: Tensor, token_type_ids: Any = None) -> Tensor:  # type: ignore[override]
            return input_ids

    expected = {} if init is None else {"token_type_ids": {**IDS, "init": {"randint": [0, init]}, "default": 0}}
    assert auto_inputs(Typed(type_vocab_size=types)) == {"input_ids": IDS, **expected}
    assert auto_inputs(Typed()) == {"input_ids": IDS}


def test_a_model_that_may_return_a_cache_is_asked_for_none() -> None:
    class Writing(Words):
        def forward(self, input_ids: Tensor, use_cache: Any = None) -> Tensor:  # type: ignore[override]
            return input_ids

    class Passing(Words):
        def forward(self, input_ids: Tensor, cache: Any = None, **more: Any) -> Tensor:  # type: ignore[override]
            return input_ids

    assert auto_inputs(Writing()) == {"input_ids": IDS, "use_cache": False}
    assert auto_inputs(Passing(text_config=SimpleNamespace(use_cache=True)))["use_cache"] is False
    assert "use_cache" not in auto_inputs(Passing())


class Both(Words):
    def forward(self, input_ids: Tensor, pixel_values: Any = None) -> Tensor:  # type: ignore[override]
        return input_ids


class Sounds(nn.Module):
    def __init__(self, main: str, **config: Any) -> None:
        super().__init__()
        self.main_input_name, self.config = main, SimpleNamespace(**config)

    def forward(self, decoder_input_ids: Any = None, **more: Tensor) -> Any:
        return more


def test_each_end_of_an_encoder_decoder_has_its_own_vocabulary() -> None:
    parts = {"encoder": SimpleNamespace(vocab_size=50), "decoder": SimpleNamespace(vocab_size=70)}
    module = Words(is_encoder_decoder=True, vocab_size=None, get_text_config=lambda: parts["decoder"], **parts)
    inputs = auto_inputs(module)
    assert inputs["input_ids"] == IDS
    assert inputs["decoder_input_ids"]["init"] == {"randint": [0, 70]}


def test_the_vocabulary_of_a_nested_text_is_the_one() -> None:
    text = SimpleNamespace(vocab_size=50)

    def ambiguous() -> Any:
        raise ValueError("Multiple valid text configs")

    assert auto_inputs(Words(vocab_size=None, get_text_config=lambda: text))["input_ids"] == IDS
    assert auto_inputs(Words(text_encoder=text, vocab_size=None, get_text_config=ambiguous))["input_ids"] == IDS


def test_a_model_of_texts_and_images_takes_both_unless_a_text_holds_the_image() -> None:
    pictures = {"vision_config": SimpleNamespace(image_size=16, num_channels=1)}
    assert auto_inputs(Both(**pictures))["pixel_values"] == {"shape": ["batch", 1, 16, 16]}
    assert auto_inputs(Both(**pictures, image_token_id=3)) == {"input_ids": IDS}
    assert auto_inputs(Both()) == {"input_ids": IDS}


def test_images_of_an_encoder_and_of_videos() -> None:
    module = Pictures(None)
    module.config.encoder = SimpleNamespace(image_size=16, num_channels=1)
    assert auto_inputs(module)["pixel_values"] == {"shape": ["batch", 1, 16, 16]}
    module.config.encoder.num_frames = 4
    assert auto_inputs(module)["pixel_values"] == {"shape": ["batch", 4, 1, 16, 16]}


def test_sounds_are_waves_or_spectrograms() -> None:
    assert auto_inputs(Sounds("input_values", conv_stride=[5, 2])) == {"input_values": {"shape": ["batch", "samples"]}}
    spectrogram = Sounds("input_values", num_mel_bins=32, max_length=64)
    assert auto_inputs(spectrogram) == {"input_values": {"shape": ["batch", 64, 32]}}
    whisper = Sounds("input_features", num_mel_bins=32, max_source_positions=10, vocab_size=50, is_encoder_decoder=True)
    decoder = {**IDS, "shape": ["batch", "decoder_seq"]}
    assert auto_inputs(whisper) == {"input_features": {"shape": ["batch", 32, 20]}, "decoder_input_ids": decoder}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Pictures(None), "no size of an image"),
        (nn.ReLU(), "no `config`"),
        (Words(vocab_size=None), "no `vocab_size`"),
        (Sounds("input_values"), "takes `input_values`, whose sizes its configuration does not say"),
        (Sounds("past_values", vocab_size=50), "takes `past_values`, whose sizes its configuration does not say"),
    ],
)
def test_a_model_that_does_not_say_them_is_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        auto_inputs(module)


def auto_manifest(folder: Path, buckets: str) -> Manifest:
    path = folder / "auto.yaml"
    path.write_text(f"version: 1\nmodels:\n  words:\n    factory: nets:Net\n    inputs: auto\n    buckets: {buckets}\n")
    return read_manifest(path)


def test_a_manifest_may_leave_its_inputs_to_the_model(tmp_path: Path) -> None:
    manifest = auto_manifest(tmp_path, "[{batch: 1, seq: [2, 8]}]")
    spec = with_inputs(manifest, manifest.models["words"], Words())
    assert spec.inputs == {"attention_mask": MASK, "input_ids": IDS}


def test_buckets_of_other_dims_are_refused_with_their_line(tmp_path: Path) -> None:
    manifest = auto_manifest(tmp_path, "[{batch: 1, seqs: 8}]")
    with pytest.raises(ManifestError) as caught:
        with_inputs(manifest, manifest.models["words"], Words())
    messages = [(issue.where.rpartition(":")[2], issue.message, issue.hint) for issue in caught.value.issues]
    assert messages == [
        ("6", "the dim `seqs` is in no shape of the inputs", "did you mean `seq`?"),
        ("6", "a bucket gives no size for `seq`", "the inputs have batch, seq"),
    ]


def test_another_word_than_auto_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text("version: 1\nmodels:\n  words:\n    factory: nets:Net\n    inputs: automatic\n")
    with pytest.raises(ManifestError, match=r"expected `auto` or a mapping of inputs") as caught:
        read_manifest(path)
    assert "did you mean `auto`?" in str(caught.value)


# -- factories within kwargs ------------------------------------------------------------------------------------------

NESTED = """
version: 1
models:
  net:
    factory: nested:Net
    kwargs:
      config: {factory: "nested:Config", kwargs: {width: 6, parts: [{factory: "nested:part"}]}}
      options: {factory: not called, other: 1}
    inputs: {x: {shape: [2, 6]}}
"""


def test_a_value_of_kwargs_may_be_made_by_a_factory(tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(
        "import torch\n"
        "class Config:\n"
        "    def __init__(self, width, parts): self.width, self.parts = width, parts\n"
        "def part(): return 'made'\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, config, options):\n"
        "        super().__init__(config.width, 1)\n"
        "        self.parts, self.options = config.parts, options\n"
        "    def forward(self, x): return super().forward(x)\n"
    )
    path = tmp_path / "manifest.yaml"
    path.write_text(NESTED)
    module: Any = build_modules(read_manifest(path))["net"]
    assert module.in_features == 6 and module.parts == ["made"]
    assert module.options == {"factory": "not called", "other": 1}  # other keys: a plain mapping
    path.write_text(NESTED.replace("nested:Config", "nested.Config"))
    with pytest.raises(ManifestError, match=r"`nested\.Config` names no factory") as caught:
        read_manifest(path)
    assert caught.value.issues[0].where.endswith(":7")


@pytest.mark.parametrize("value", [1e-6, 1e-05, 2.5e-07, 1e16, 1e300, 1.0, -1e-6, "1e-06"])
def test_a_number_is_written_so_that_every_reader_of_yaml_takes_it_for_one(value: Any) -> None:
    import yaml

    assert yaml.safe_load(to_yaml(value)) == value
