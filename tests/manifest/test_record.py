"""`aotc.record`: a manifest from the calls that a program makes, which builds what the program used."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import run_here
from processes import run_python
from torch import Tensor, nn

import aotc
from aotc.errors import ManifestError
from aotc.manifest import read_manifest
from aotc.models.factory import build_modules
from aotc.reads.attributes import training_differs

pytestmark = pytest.mark.usefixtures("unchecked")

NETS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8, words=50):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width)
        self.out = nn.Linear(width, width)
        self.words = words

    def forward(self, ids, mask=None, *, more=None, double=False):
        x = self.out(self.embedding(ids))
        if mask is not None:
            x = x * mask[:, :, None]
        if more is not None:
            x = x + more["shift"][0]
        return 2 * x if double else x


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for size in sizes)

    def forward(self, x):
        return self.layers[0](x)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder([8])

    def decode(self, x):
        return self.decoder(x)


class Pipe:
    def __init__(self):
        self.net, self.vae, self.unused = Net(16).eval(), Vae().eval(), nn.Identity()

    def __call__(self, batch, seq):
        ids = torch.arange(batch * seq).view(batch, seq) % 40
        more = {"shift": [torch.ones(batch, 1, 1)]}
        with torch.no_grad():
            x = self.net(ids, torch.ones(batch, seq, dtype=torch.int64), more=more, double=True)
            return self.vae.decode(x[..., :8])
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "recorded_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "recorded_nets", raising=False)
    import recorded_nets

    return recorded_nets


def models_in(path: str) -> dict[str, Any]:
    """What the manifest says of its models, as plain data."""
    import yaml

    models: dict[str, Any] = yaml.safe_load(Path(path).read_text())["models"]
    return models


def test_what_a_pipeline_was_called_with_is_built_and_verified(nets: Any, tmp_path: Path) -> None:
    pipe = nets.Pipe()
    with aotc.record(
        "net.yaml", pipe, factories={"vae.decoder": {"factory": "recorded_nets:Decoder", "kwargs": {"sizes": [8]}}}
    ):
        for batch, seq in ((1, 5), (2, 9), (1, 7), (2, 9)):
            expected = pipe(batch, seq)
    models = models_in("net.yaml")
    assert models["net"] == {
        "factory": "recorded_nets:Net",
        "kwargs": {"width": 16},
        "dtype": "float32",
        "inputs": {
            "ids": {"shape": ["batch", "seq"], "dtype": "int64", "init": {"recorded": "net.values.safetensors#net"}},
            "mask": {"shape": ["batch", "seq"], "dtype": "int64", "init": "ones"},
            "more": {"shift": [{"shape": ["batch", 1, 1], "dtype": "float32"}]},
            "double": True,
        },
        "buckets": [{"batch": 1, "seq": [5, 7]}, {"batch": 2, "seq": 9}],
    }
    assert models.keys() == {"net", "vae.decoder"} and models["vae.decoder"]["kwargs"] == {"sizes": [8]}
    for command in (("build",), ("verify", "--seeds", 1)):
        ran = run_here(command[0], "net.yaml", "--model", "net", *command[1:], "--store", "store", cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert aotc.attach(pipe, "store").keys() == {"net"}
    assert torch.allclose(pipe(2, 9), expected, atol=1e-5) and pipe.net.stats().calls == 1


def test_other_constants_and_containers_are_models_of_their_own(nets: Any) -> None:
    net = nets.Net().eval()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with aotc.record("net.yaml", {"net": net}):
        net(ids)
        net(ids, double=True)
        net(ids)
    models = models_in("net.yaml")
    assert models.keys() == {"net", "net-2"}
    assert "double" not in models["net"]["inputs"] and models["net-2"]["inputs"]["double"] is True
    assert models["net"]["buckets"] == [{"batch": 1, "seq": 4}], "one size: its dims are guessed, as by `aotc init`"


def test_calls_in_other_modes_of_torch_and_of_slices_say_so(nets: Any) -> None:
    decoder = nets.Vae().eval()
    x = torch.ones(2, 8)
    with aotc.record("vae.yaml", {"vae": decoder.decode}):
        decoder.decode(torch.ones(2, 9)[:, 1:])
        decoder.decode(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            decoder.decode(x)
    models = models_in("vae.yaml")
    assert [model.get("autocast") for model in models.values()] == [None, "bfloat16"]
    assert [model.get("make_contiguous") for model in models.values()] == [True, None]


def test_parts_in_another_training_mode_are_made_so(nets: Any) -> None:
    net = nets.Net().eval()
    net.out.train()
    with aotc.record("net.yaml", {"net": net}):
        net(torch.zeros(1, 4, dtype=torch.int64))
    (made,) = build_modules(read_manifest("net.yaml")).values()
    assert training_differs(made) == ("out",)


def test_a_method_is_recorded_as_one(nets: Any) -> None:
    pipe = nets.Pipe()
    with aotc.record("vae.yaml", {"vae": pipe.vae.decode, "net": pipe.net}):
        pipe(1, 5)
        pipe(1, 7)
    models = models_in("vae.yaml")
    assert models["vae"]["method"] == "decode" and models["vae"]["factory"] == "recorded_nets:Vae"
    assert models["vae"]["inputs"] == {"x": {"shape": ["batch", "seq", 8], "dtype": "float32"}}
    assert "method" not in models["net"] and "decode" not in vars(pipe.vae)
    assert build_modules(read_manifest("vae.yaml")).keys() == {"vae", "net"}


def test_without_a_module_the_outermost_calls_are_recorded(nets: Any) -> None:
    one, other = nets.Net().eval(), nets.Net(4).eval()
    with aotc.record("net.yaml"):
        for net in (one, other, one):
            net(torch.zeros(1, 4, dtype=torch.int64))
    models = models_in("net.yaml")
    assert {name: model.get("kwargs") for name, model in models.items()} == {"net": None, "net2": {"width": 4}}
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl", "torch's own again"


@pytest.mark.parametrize(
    ("seen", "init"),
    [
        ([torch.full((2, 2), 4), torch.full((2, 2), 4)], {"constant": 4}),  # the number of patches, say
        ([torch.full((2, 2), 4), torch.full((2, 2), 5)], {"recorded": "image.values.safetensors#image"}),
        ([torch.tensor([[4]])], {"recorded": "image.values.safetensors#image"}),  # a next token
        ([torch.full((2, 2), -4)], {"constant": -4}),
        ([torch.tensor([False, True])], {"recorded": "image.values.safetensors#image"}),
        ([torch.arange(1 << 17)], {"randint": [0, 1 << 17]}),  # too many to keep
        ([torch.ones(2, dtype=torch.bool)], "ones"),
    ],
)
def test_integers_are_kept_where_these_are_few_and_vary(seen: list[Tensor], init: Any, tmp_path: Path) -> None:
    module = Image()
    with aotc.record(tmp_path / "image.yaml", module):
        for steps in seen:
            module(torch.ones(2), torch.ones(2), steps)
    assert models_in(str(tmp_path / "image.yaml"))["image"]["inputs"]["steps"]["init"] == init


class Image(nn.Module):
    def forward(self, x: Tensor, small: Tensor, steps: Tensor) -> Tensor:
        return x


def test_images_get_a_bucket_for_each_size_and_multiples_are_expressions(tmp_path: Path) -> None:
    module = Image()
    with aotc.record(tmp_path / "image.yaml", module):
        for height, width in ((32, 32), (64, 32), (96, 48)):
            x = torch.ones(2, 3, 2 * height, width).contiguous(memory_format=torch.channels_last)
            module(x, torch.ones(2, 3, height, width), torch.tensor(height))
    model = models_in(str(tmp_path / "image.yaml"))["image"]
    assert model["inputs"]["x"] == {
        "shape": ["batch", 3, "height", "width"],
        "dtype": "float32",
        "layout": "channels_last",
    }
    assert model["inputs"]["small"]["shape"] == ["batch", 3, "height2", "width"]
    assert model["inputs"]["steps"]["init"] == {"recorded": "image.values.safetensors#image"} and "kwargs" not in model
    assert [bucket["height"] for bucket in model["buckets"]] == [64, 128, 192]


class Joined(nn.Module):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor, edges: Tensor) -> Tensor:
        return x


def test_sums_are_expressions(tmp_path: Path) -> None:
    """Of lengths alone: a batch that is another size less one is so by chance."""
    module = Joined()
    with aotc.record(tmp_path / "joined.yaml", module):
        for batch, first, second in ((1, 3, 9), (2, 7, 12), (3, 5, 30)):
            module(*(torch.ones(batch, size) for size in (first, second, first + second, second + 1)))
        module(*(torch.ones(2, size) for size in (2, 3, 5, 4)))
    inputs = models_in(str(tmp_path / "joined.yaml"))["joined"]["inputs"]
    shapes = [form["shape"] for form in inputs.values()]
    assert shapes == [["batch", "seq"], ["batch", "seq2"], ["batch", "seq + seq2"], ["batch", "seq2 + 1"]]


def test_the_shorter_of_two_lengths_is_the_dim(tmp_path: Path) -> None:
    """A mask comes before a cache that is one token shorter: of two ranges, most pairs are not those of a call."""
    module = Joined()
    with aotc.record(tmp_path / "joined.yaml", module):
        for length in (5, 6, 7, 9):
            module(*(torch.ones(1, size, 4) for size in (length + 1, length, length + 2, length + 4)))
    model = models_in(str(tmp_path / "joined.yaml"))["joined"]
    shapes = [form["shape"][1] for form in model["inputs"].values()]
    assert shapes == ["seq + 1", "seq", "seq + 2", "seq2"] and model["buckets"] == [
        {"batch": 1, "seq": [5, 9], "seq2": [9, 13]}
    ]


def test_what_a_manifest_cannot_hold_is_told_and_the_rest_is_written(
    nets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net, image = nets.Net().eval(), Image()
    with pytest.raises(ManifestError, match="holds the others") as raised, aotc.record("net.yaml"):
        net(torch.zeros(1, 4, dtype=torch.int64))
        image(torch.ones(1), object(), None)
    assert "`small` is object" in raised.value.issues[0].message and raised.value.issues[0].where == "image"
    assert models_in("net.yaml").keys() == {"net"}
    with pytest.raises(ManifestError, match="no call of a module"), aotc.record("none.yaml", nets.Pipe()):
        pass
    with pytest.raises(ManifestError, match="exists"), aotc.record("net.yaml"):
        pass
    with pytest.raises(ZeroDivisionError), aotc.record("none.yaml", net):
        net(torch.zeros(1, 4, dtype=torch.int64))
        _ = 1 / 0
    assert not Path("none.yaml").exists()


def test_a_factory_that_is_not_known_is_named_for_the_user_to_write(
    nets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = nets.Decoder([4])
    with aotc.record("decoder.yaml", decoder):
        decoder(torch.ones(1, 4))
    assert "how to make decoder, a Decoder, is not known" in caplog.text
    assert "my_models:decoder # write decoder: it returns the Decoder" in Path("decoder.yaml").read_text()


class DynamicCache:
    """As transformers passes it from one token to the next."""


def test_a_cache_object_has_a_hint_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no call can be recorded") as raised, aotc.record(tmp_path / "cache.yaml"):
        Image()(torch.ones(1), DynamicCache(), None)
    assert "use_cache=False" in raised.value.issues[0].hint and not (tmp_path / "cache.yaml").exists()


def test_a_dict_whose_keys_are_no_strings_cannot_be_recorded(tmp_path: Path) -> None:
    """As strings, which a manifest has, they would be other keys than the program's."""
    with pytest.raises(ManifestError, match="no call can be recorded") as raised, aotc.record(tmp_path / "keys.yaml"):
        Image()(torch.ones(1), {1: torch.ones(1)}, None)
    issue = raised.value.issues[0]
    assert "with the key 1" in issue.message and "strings as keys" in issue.hint


class Shapes(nn.Module):
    """As QwenImageTransformer2DModel of diffusers: a list within the list is a batch."""

    def forward(self, x: Tensor, shapes: Any) -> list[Tensor]:
        return [x * height for _, height in (shapes[0] if isinstance(shapes[0], list) else shapes)]


def test_tuples_stay_tuples(tmp_path: Path) -> None:
    module, x = Shapes(), torch.ones(3, 5)
    with aotc.record(tmp_path / "shapes.yaml", module):
        module(x, [(1, 4)])
        module(x, [[(1, 4)]])
    models = models_in(str(tmp_path / "shapes.yaml"))
    assert models["shapes"]["inputs"]["shapes"] == [{"tuple": [1, 4]}]
    assert models["shapes-2"]["inputs"]["shapes"] == [[{"tuple": [1, 4]}]], "another call, and another model"


Size = namedtuple("Size", ["height", "width"])


@pytest.mark.parametrize("value", [Size(4, 4), {"tuple": 3}, {"tuple": [1]}])
def test_containers_that_a_manifest_has_not_are_told(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no call can be recorded"), aotc.record(tmp_path / "size.yaml"):
        Image()(torch.ones(1), value, None)


def test_models_of_transformers_are_made_from_their_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 60,
    }
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    config = transformers.BertConfig(**sizes, attn_implementation="eager", id2label=labels)
    bert = transformers.BertModel(config).eval()
    with torch.no_grad(), aotc.record(tmp_path / "bert.yaml", SimpleNamespace(encoder=bert)):
        for seq in (4, 6):
            bert(input_ids=torch.ones(1, seq, dtype=torch.int64))
    (made,) = build_modules(read_manifest(tmp_path / "bert.yaml")).values()
    assert made.state_dict().keys() == bert.state_dict().keys()
    assert made.config.to_diff_dict() == bert.config.to_diff_dict() and made.config._attn_implementation == "eager"
    assert made.config.id2label == labels
    written = models_in(str(tmp_path / "bert.yaml"))["encoder"]["kwargs"]["config"]["kwargs"]
    assert written.items() >= sizes.items() and "hidden_act" not in written, "its class has that by default"


def test_a_mixture_of_experts_is_made_with_its_own_implementation(tmp_path: Path) -> None:
    """Another one calls operators of transformers, which a service would need."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=99,
        num_local_experts=4,
        experts_implementation="batched_mm",
    )
    module = transformers.MixtralModel(config).eval()
    with torch.no_grad(), aotc.record(tmp_path / "experts.yaml", {"experts": module}):
        module(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)
    made: Any = build_modules(read_manifest(tmp_path / "experts.yaml"))["experts"]
    assert made.config._experts_implementation == "batched_mm"


def test_a_configuration_with_a_default_that_no_manifest_holds_is_recorded(tmp_path: Path) -> None:
    """Mamba 2 limits a step to [0, inf], a tuple, by default."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=16,
        state_size=16,
        n_groups=1,
        vocab_size=99,
    )
    mamba = transformers.Mamba2Model(config).eval()
    with torch.no_grad(), aotc.record(tmp_path / "mamba.yaml", {"mamba": mamba}):
        mamba(input_ids=torch.ones(1, 4, dtype=torch.int64))
    made = build_modules(read_manifest(tmp_path / "mamba.yaml"))["mamba"]
    assert made.config.to_diff_dict() == config.to_diff_dict()  # type: ignore[union-attr]


def test_without_pyyaml_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['yaml'] = None; import aotc\ntry:\n with aotc.record('x.yaml'): pass\n"
    assert "aotc[build]" in run_python(code + "except aotc.ManifestError as error: print(error.hint)")


def test_a_factory_for_a_model_that_is_not_recorded_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    names = pytest.raises(aotc.ManifestError, match=r"names models that are not recorded")
    with names as refused, aotc.record(tmp_path / "m.yaml", {"cnn": module}, factories={"cn": "nets:cnn"}):
        pass
    assert refused.value.issues[0].hint == "did you mean `cnn`?"
    assert not (tmp_path / "m.yaml").exists()
