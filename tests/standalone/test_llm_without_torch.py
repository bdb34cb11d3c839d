"""examples/llm_without_torch: tokens of compiled code in processes without torch, and the service of them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import ROOT, finish, run_python, start
from torch import Tensor

pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples" / "llm_without_torch"
LONG = [int(token) for token in torch.randint(0, 1000, (150,), generator=torch.Generator().manual_seed(3))]
"""A prompt of 128 + 16 + 6 × 1 tokens."""


class Example(NamedTuple):
    """The options of the example's scripts, the variables of a process that has neither torch nor numpy, and the module
    that was compiled, with the weights of the checkpoint."""

    options: tuple[object, ...]
    variables: dict[str, str]
    eager: Any


@pytest.fixture(scope="module")
def example(shared_folder: Path, built: Any, tmp_path_factory: pytest.TempPathFactory) -> Example:
    from safetensors.torch import load_model

    from aotc.manifest import read_manifest
    from aotc.models.factory import build_module

    folder = tmp_path_factory.mktemp("llm")
    store = built(shared_folder, "llm_without_torch-store", EXAMPLE / "manifest.yaml")
    made = finish(start(EXAMPLE / "checkpoint.py", "--output", folder / "model.safetensors"))
    assert made.returncode == 0, made.stderr
    (folder / "forbidden").mkdir()
    for name in ("torch", "numpy", "transformers", "safetensors"):
        (folder / "forbidden" / f"{name}.py").write_text(f"raise ImportError('{name} is not for this process')")
    manifest = read_manifest(EXAMPLE / "manifest.yaml")
    module = build_module(manifest.models["llm"], manifest.folder).eval()
    load_model(module, folder / "model.safetensors")
    options = ("--ref", f"{store}#llm", "--weights", folder / "model.safetensors")
    return Example(options, {"PYTHONPATH": f"{folder / 'forbidden'}{os.pathsep}{ROOT}"}, module)


def of_eager(module: Any, prompt: Sequence[int], count: int, temperature: float, seed: int) -> list[int]:
    """The whole prompt in one call, and a call for each further token."""
    tokens, start_at, found = list(prompt), 0, list[int]()
    chosen = torch.tensor(temperature), torch.tensor(seed)
    with torch.no_grad():
        for _ in range(count):
            token = int(module(torch.tensor([tokens]), torch.tensor(start_at), *chosen))
            start_at, tokens = start_at + len(tokens), [token]
            found.append(token)
    return found


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_that_transformers_generates(example: Example) -> None:
    ran = finish(start(EXAMPLE / "generate.py", *LONG, "--max-tokens", 12, *example.options, **example.variables))
    assert ran.returncode == 0, ran.stderr
    ids = torch.tensor([LONG])
    theirs = example.eager.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert ran.stdout.split() == [str(token) for token in theirs[0, len(LONG) :].tolist()]


TOKENS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from generate import generator_of, parser
generator = generator_of(parser(None).parse_args(sys.argv[3:]))
found = [generator.generate(*each) for each in json.loads(sys.argv[2])]
imported = sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "aotc.runtime"))
print(json.dumps([found, generator._model.stats().buckets, imported]))
"""


def test_sampled_tokens_are_eager_s_of_the_same_seed(example: Example) -> None:
    """The noise depends on the seed and the position, and not on how a prompt is divided into calls."""
    asked = [([5, 17, 42, 8], 4, 1.0, seed) for seed in (*range(30), 2**32, 2**63 - 1, -1)]
    asked += [(LONG, 6, temperature, 7 + at) for at, temperature in enumerate((0.5, 1.0, 4.0))]
    ran = finish(start("-c", TOKENS, EXAMPLE, json.dumps(asked), *example.options, **example.variables))
    assert ran.returncode == 0, ran.stderr
    found, buckets, imported = json.loads(ran.stdout)
    assert found == [of_eager(example.eager, *each) for each in asked]
    assert len({tuple(each) for each in found}) == len(found)
    assert imported == [] and buckets == {"seq=128": 3, "seq=16": 3, "seq=1": 33 * 7 + 3 * (6 + 5)}


def drawn(logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor | int = 9) -> Tensor:
    """The token that each seed, at its position, chooses."""
    from examples.language_models import sampled_token

    draw = torch.vmap(sampled_token, in_dims=(None, None, 0, 0))
    return draw(logits, torch.tensor(temperature), seeds, torch.zeros_like(seeds) + positions)[:, 0]


def test_samples_follow_the_softmax() -> None:
    """By Pearson's chi-squared over 20 tokens: of 19 degrees of freedom, which is above 43.8 once in 1,000 tries."""
    logits = torch.linspace(-1.5, 1.5, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    for temperature in (0.7, 1.0, 2.0):
        counts = drawn(logits, temperature, torch.arange(4000)).bincount(minlength=20)
        expected = 4000 * torch.softmax(logits / temperature, 0)
        assert float(((counts - expected) ** 2 / expected).sum()) < 43.8


@pytest.mark.parametrize(("seed", "position"), [(1, 0), (0, 1), (2**32, 0), (1, -1)])
def test_neighbouring_seeds_and_positions_choose_independently(seed: int, position: int) -> None:
    """Of 64 equally likely tokens, 31 of 2,000 pairs are expected to be equal, with a standard deviation of 5.5."""
    logits, seeds, positions = torch.zeros(64), torch.arange(2000), torch.arange(2000) % 50 + 500
    equal = drawn(logits, 1.0, seeds, positions) == drawn(logits, 1.0, seeds + seed, positions + position)
    assert 10 < int(equal.sum()) < 60


def test_a_large_vocabulary_has_no_favourites() -> None:
    """Of 100,000 equally likely tokens, in 400 draws none comes three times, and each half of them comes as often."""
    logits = torch.zeros(100_000)
    chosen = torch.cat([drawn(logits, 1.0, seeds) for seeds in torch.arange(400).split(50)])
    assert int(chosen.bincount().max()) <= 2 and 150 < int((chosen < 50_000).sum()) < 250
    logits[99_999] = 30.0  # another one is chosen once in 10**8 times
    assert set(drawn(logits, 1.0, torch.arange(50)).tolist()) == {99_999}


def test_a_temperature_of_zero_takes_the_greatest_of_any_vocabulary() -> None:
    for size in (1, 2, 255, 256, 257, 1000):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
        assert set(drawn(logits, 0.0, torch.arange(5)).tolist()) == {int(logits.argmax())}


# -- the service ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 1,000 words, `w0` to `w999`."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{at}": at for at in range(1000)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.enable_padding(length=64)
    made.save(str(file := tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))
    return file


@pytest.fixture(scope="module")
def service(example: Example, tokenizer: Path) -> Iterator[str]:
    command = (EXAMPLE / "serve.py", *example.options, "--tokenizer", tokenizer, "--port", 0, "--end", 999)
    with listening(start(*command, **example.variables)) as url:
        yield url


class listening:
    """The URL of a started service, which ends with the block."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __enter__(self) -> str:
        assert self._process.stdout is not None and self._process.stderr is not None
        match = re.fullmatch(r"listening on port (\d+)\n", line := self._process.stdout.readline())
        if match is None:
            self._process.kill()
        assert match, line + self._process.stderr.read()
        return f"http://127.0.0.1:{match[1]}"

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def post(url: str, body: object, path: str = "/generate") -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as answer:
        return json.load(answer)


def test_a_text_is_answered_by_a_text_and_the_seed_that_gives_it_again(example: Example, service: str) -> None:
    asked = {"prompt": "w5 w17 w42", "max_tokens": 5, "temperature": 1.0}
    first = post(service, asked)
    assert first["tokens"] == of_eager(example.eager, [5, 17, 42], 5, 1.0, first["seed"])
    assert first["text"] == " ".join(f"w{token}" for token in first["tokens"])
    assert post(service, {**asked, "seed": first["seed"]}) == first
    assert post(service, {**asked, "prompt": [5, 17, 42], "seed": first["seed"]}) == first
    assert post(service, asked)["seed"] != first["seed"]


def test_requests_at_once_are_answered_as_one_after_another(service: str) -> None:
    asked = [{"prompt": LONG[at : at + 20], "max_tokens": 20, "temperature": 1.0, "seed": at} for at in range(8)]
    expected, found = [post(service, each) for each in asked], dict[int, Any]()
    threads = [threading.Thread(target=lambda at=at: found.update({at: post(service, asked[at])})) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(8)] == expected


def test_a_text_ends_with_its_end(example: Example) -> None:
    found = of_eager(example.eager, [5, 17], 8, 1.0, 4)
    ends = ("--end", found[3], "--end", 1001)
    command = (EXAMPLE / "generate.py", 5, 17, "--temperature", 1, "--seed", 4, "--max-tokens", 8, *ends)
    ran = finish(start(*command, *example.options, **example.variables))
    assert ran.stdout.split() == [str(token) for token in found[: found.index(found[3]) + 1]]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"{", 400, "Input data was truncated"),
        ({"max_tokens": 3}, 400, "missing required field `prompt`"),
        ({"prompt": []}, 400, "the prompt has no tokens"),
        ({"prompt": "", "max_tokens": 3}, 400, "the prompt has no tokens"),
        ({"prompt": [5, -1]}, 400, "the prompt has token -1, and the model those of 0 to 999"),
        ({"prompt": [1000]}, 400, "the prompt has token 1000, and the model those of 0 to 999"),
        ({"prompt": [2**70]}, 400, ""),
        ({"prompt": [True]}, 400, "Expected `int`, got `bool` - at `$.prompt[0]`"),
        ({"prompt": [5], "max_tokens": 0}, 400, "Expected `int` >= 1 - at `$.max_tokens`"),
        ({"prompt": [5], "temperature": -0.5}, 400, "Expected `float` >= 0.0 - at `$.temperature`"),
        (b'{"prompt": [5], "temperature": NaN}', 400, "invalid character"),
        ({"prompt": [5], "seed": 2**63}, 400, "$.seed"),
        ({"prompt": [5], "max_token": 3}, 400, "unknown field `max_token`"),
        (
            {"prompt": LONG, "max_tokens": 107},
            400,
            "the prompt has 150 tokens, and 107 more are asked for: the cache has room for 256 in all",
        ),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(service: str, body: object, code: int, words: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(service, body)
    assert caught.value.code == code and words in json.load(caught.value)["error"]
    assert len(post(service, {"prompt": [5], "max_tokens": 2})["tokens"]) == 2  # it serves on


@pytest.mark.parametrize("length", [None, "-1", "many", str((1 << 20) + 1)])
def test_a_body_of_unknown_length_or_too_large_a_one_is_not_read(service: str, length: str | None) -> None:
    connection = HTTPConnection(service.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/generate")
    if length is not None:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413 and "a body of at most 1048576 bytes" in json.load(answer)["error"]
    connection.close()


def test_the_cache_is_used_to_its_last_place(service: str, example: Example) -> None:
    found = post(service, {"prompt": LONG, "max_tokens": 106})["tokens"]
    assert found == of_eager(example.eager, LONG, 106, 0.0, 0)


def test_a_service_without_a_tokenizer_takes_ids_alone(example: Example) -> None:
    with listening(start(EXAMPLE / "serve.py", *example.options, "--port", 0, **example.variables)) as url:
        assert post(url, {"prompt": [5], "max_tokens": 2}).keys() == {"tokens", "seed"}
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(url, {"prompt": "w5"})
        assert "the service has no tokenizer" in json.load(caught.value)["error"]
        with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
            assert answer.status == 200


# -- the image --------------------------------------------------------------------------------------------------------

DOCKERFILE = (EXAMPLE / "Dockerfile").read_text()
LIMIT = 120_000_000
UNSHARED = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
IN_ROOT = 'mount --rbind /proc "$0/proc" && cd "$0" && exec chroot . "$@"'
"""As a container has it, with /proc; the mount ends with the process."""


def found_in_dockerfile(pattern: str) -> str:
    (found,) = re.findall(pattern, DOCKERFILE, re.MULTILINE)
    return str(found)


@pytest.fixture
def image(example: Example, tmp_path: Path) -> Path:
    """The root of the image, of this Python and the packages that are installed here."""
    named = found_in_dockerfile(r"^RUN python /collect\.py /root-of-image (.*)$").split()
    assert named == ["/packages", "/aotc-store", "/model.safetensors", "/generate.py", "/serve.py"]
    packages = [Path(importlib.import_module(name).__path__[0]) for name in ("msgspec", "zstandard", "tokenizers")]
    without = shutil.ignore_patterns(*found_in_dockerfile(r"rm /packages/zstandard/(\S+)$").split())
    for package in (ROOT / "aotc", *packages):
        shutil.copytree(package, tmp_path / "packages" / package.name, ignore=without)
    options = dict(zip(example.options[::2], example.options[1::2], strict=True))
    shutil.copytree(str(options["--ref"]).partition("#")[0], tmp_path / "aotc-store")
    shutil.copy(str(options["--weights"]), tmp_path / "model.safetensors")
    here = {**{name: tmp_path / name[1:] for name in named[:3]}, **{name: EXAMPLE / name[1:] for name in named[3:]}}
    run_python((ROOT / "examples/small_image/collect.py").read_text(), tmp_path / "root", *here.values())
    return tmp_path / "root"


def test_an_image_from_scratch_has_120_mb_and_serves(example: Example, image: Path) -> None:
    files = [path for path in image.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < LIMIT
    assert not [path for path in files if {"torch", "numpy"} & {*path.parts} or path.name.startswith("libtorch")]
    if subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting /proc needs root and CAP_SYS_ADMIN, or namespaces of users")
    (image / "proc").mkdir()
    entry = json.loads(found_in_dockerfile(r"^ENTRYPOINT (.*)$"))
    name, value = found_in_dockerfile(r"^ENV (.*)$").split("=")
    command = [*UNSHARED, "sh", "-c", IN_ROOT, str(image), *entry, "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    with listening(process) as url:
        answer = post(url, {"prompt": [5, 17, 42, 8], "max_tokens": 6, "temperature": 1.0, "seed": 3})
    assert answer == {"tokens": of_eager(example.eager, [5, 17, 42, 8], 6, 1.0, 3), "seed": 3}
