"""What a manifest without mistakes means."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator

from aotc.digest import canonical_json
from aotc.manifest import Manifest, ModelSpec, editor_schema, read_manifest
from aotc.manifest.findings import Findings
from aotc.manifest.structure import check_structure
from aotc.records import SizeRange


def read(folder: Path, text: str) -> Manifest:
    path = folder / "manifest.yaml"
    path.write_text(dedent(text))
    return read_manifest(path)


def read_model(folder: Path, lines: str) -> ModelSpec:
    """The one model that these lines describe, beside a factory."""
    body = indent(dedent(lines), "    ")
    return read(folder, f"version: 1\nmodels:\n  m:\n    factory: package.module:make\n{body}").models["m"]


def test_a_model_that_says_little_gets_the_defaults_of_the_format(tmp_path: Path) -> None:
    spec = read_model(tmp_path, "inputs: {x: {shape: [2, 3]}}")
    assert spec == ModelSpec(
        name="m", factory="package.module:make", inputs={"x": {"shape": [2, 3]}}, buckets=({},), mode="max-autotune"
    )
    assert (spec.weights, spec.targets, spec.cuda_graphs, spec.dtype) == ("live", ("native",), "auto", None)


def test_every_key_of_a_model_reaches_its_spec(tmp_path: Path) -> None:
    spec = read_model(
        tmp_path,
        """
        kwargs: {hidden: 8, eps: 1e-5}
        dtype: bfloat16
        mode: default
        weights: frozen
        targets: [native, "cpu:x86-64-v3", "cuda:sm_90", cuda]
        options: {cpp.simdlen: 256}
        inputs: {x: {shape: [batch, 8]}}
        buckets: [{batch: 1}, {batch: [2, 64]}]
        outputs: {crop: [batch]}
        autocast: float16
        runtime: any
        make_contiguous: true
        cuda_graphs: never
        graph_sizes: {batch: [1, 8]}
        ptx: true
        """,
    )
    assert spec == ModelSpec(
        name="m",
        factory="package.module:make",
        inputs={"x": {"shape": ["batch", 8]}},
        buckets=({"batch": 1}, {"batch": SizeRange(2, 64, 1, 64)}),
        kwargs={"hidden": 8, "eps": 1e-5},
        dtype="bfloat16",
        mode="default",
        weights="frozen",
        targets=("native", "cpu:x86-64-v3", "cuda:sm_90", "cuda"),
        options={"cpp.simdlen": 256},
        crop=("batch",),
        autocast="float16",
        make_contiguous=True,
        cuda_graphs="never",
        graph_sizes={"batch": [1, 8]},
        ptx=True,
    )


def test_a_models_value_replaces_the_default_whole(tmp_path: Path) -> None:
    models = read(
        tmp_path,
        """
        version: 1
        defaults: {dtype: bfloat16, mode: default, options: {a: 1, b: 2}}
        models:
          one: {factory: "p:f", inputs: {}}
          two: {factory: "p:f", inputs: {}, dtype: null, options: {c: 3}}
        """,
    ).models
    assert (models["one"].dtype, models["one"].mode, models["one"].options) == ("bfloat16", "default", {"a": 1, "b": 2})
    assert (models["two"].dtype, models["two"].mode, models["two"].options) == (None, "default", {"c": 3})


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("128", 128),
        ("0", 0),
        ("[1, 512]", SizeRange(1, 512, 1, 512)),
        ("{range: [1, 512]}", SizeRange(1, 512, 1, 512)),
        ("{range: [1, 500], multiple_of: 8}", SizeRange(8, 496, 8, 496)),
        ("{range: [0, 64], multiple_of: 8, tune_at: 16}", SizeRange(0, 64, 8, 16)),
        ("[7, 7]", 7),
        ("{range: [9, 17], multiple_of: 8}", 16),
    ],
)
def test_a_bucket_takes_fixed_sizes_and_ranges(tmp_path: Path, written: str, size: int | SizeRange) -> None:
    """A range's ends are drawn in to its multiples; it is tuned at its largest size; one size alone is fixed."""
    spec = read_model(tmp_path, f"inputs: {{x: {{shape: [seq]}}}}\nbuckets: [{{seq: {written}}}]")
    assert spec.buckets == ({"seq": size},)


def test_a_grid_adds_its_product_to_the_buckets_each_once(tmp_path: Path) -> None:
    spec = read_model(
        tmp_path,
        """
        inputs: {x: {shape: [batch, seq]}}
        buckets: [{seq: 128, batch: 8}]
        grid: {seq: [128, {range: [1, 64]}], batch: [1, 8]}
        """,
    )
    assert spec.buckets == (
        {"batch": 8, "seq": 128},
        {"batch": 1, "seq": 128},
        {"batch": 1, "seq": SizeRange(1, 64, 1, 64)},
        {"batch": 8, "seq": SizeRange(1, 64, 1, 64)},
    )


def test_crop_may_name_the_dim_of_each_axis(tmp_path: Path) -> None:
    spec = read_model(
        tmp_path,
        """
        inputs: {x: {shape: [batch, 4, seq]}}
        buckets: [{batch: 1, seq: 1}]
        outputs: {crop: {"[0]": [batch, null, seq]}}
        """,
    )
    assert spec.crop == {"[0]": ["batch", None, "seq"]}


def test_comments_and_the_order_of_keys_change_nothing(tmp_path: Path) -> None:
    one = read(
        tmp_path,
        """
        version: 1
        models:
          m:
            factory: p:f
            kwargs: {a: 1, b: {c: 2, d: 3}}
            inputs: {x: {shape: [batch, seq], pad: {batch: 0, seq: edge}}, y: {shape: [batch]}}
            grid: {batch: [1, 8], seq: [16, 32]}
        """,
    )
    other = read(
        tmp_path,
        """
        # a comment
        models:
          m:
            grid:
              seq: [16, 32]  # another
              batch: [1, 8]
            inputs: {y: {shape: [batch]}, x: {pad: {seq: edge, batch: 0}, shape: [batch, seq]}}
            kwargs: {b: {d: 3, c: 2}, a: 1}
            factory: p:f
        version: 1
        """,
    )
    assert one.models == other.models
    # Equal in every order that code could look at, not only as sets of keys.
    assert msgspec.json.encode(one.models["m"]) == msgspec.json.encode(other.models["m"])


def test_a_spec_survives_the_json_of_an_artifacts_record(tmp_path: Path) -> None:
    spec = read_model(
        tmp_path,
        """
        inputs: {x: {shape: [batch, 2*seq], init: {constant: 1.0}}, deep: [{a: true}, null, text]}
        grid: {batch: [1, {range: [8, 64], multiple_of: 8}], seq: [16]}
        outputs: {crop: {"": [batch, null]}}
        """,
    )
    again = msgspec.json.decode(canonical_json(spec), type=ModelSpec)
    assert again == spec
    assert canonical_json(again) == canonical_json(spec)


def test_a_spec_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    spec = read_model(tmp_path, "inputs: {}")
    assert str(tmp_path).encode() not in canonical_json(spec)


def test_where_gives_the_line_of_a_key_of_its_ancestor_or_of_the_default(tmp_path: Path) -> None:
    manifest = read(
        tmp_path,
        """\
        version: 1
        defaults:
          options:
            cpp.simdlen: 256
        models:
          m:
            factory: p:f
            inputs:
              x: {shape: [1,
                          2]}
        """,
    )
    file = manifest.path
    assert manifest.where("models", "m", "factory") == f"{file}:7"
    assert manifest.where("models", "m", "inputs", "x", "shape", 1) == f"{file}:10"
    assert manifest.where("models", "m", "inputs", "x", "dtype") == f"{file}:9"
    assert manifest.where("models", "m", "weights") == f"{file}:6"
    assert manifest.where("models", "m", "options", "cpp.simdlen") == f"{file}:4"


def test_a_relative_file_is_named_as_the_caller_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(tmp_path, "version: 1\nmodels: {m: {factory: 'p:f', inputs: {}}}")
    monkeypatch.chdir(tmp_path)
    manifest = read_manifest("manifest.yaml")
    assert manifest.where("models", "m") == "manifest.yaml:2"
    assert manifest.folder == tmp_path


def test_only_keeps_the_models_that_are_asked_for(tmp_path: Path) -> None:
    text = "version: 1\nmodels: {a: {factory: 'p:f', inputs: {}}, b: {factory: 'p:f', inputs: {}}}"
    path = read(tmp_path, text).path
    assert list(read_manifest(path, only=["b"]).models) == ["b"]


def test_anchors_and_merges_are_plain_yaml(tmp_path: Path) -> None:
    models = read(
        tmp_path,
        """
        version: 1
        models:
          a: &a {factory: "p:f", inputs: {}, weights: frozen}
          b: {<<: *a, weights: live}
        """,
    ).models
    assert (models["b"].factory, models["a"].weights, models["b"].weights) == ("p:f", "frozen", "live")


def test_the_schema_is_a_valid_json_schema_and_describes_every_key_of_a_model() -> None:
    schema = editor_schema()
    Draft202012Validator.check_schema(schema)
    model = schema["$defs"]["ModelKeys"]["properties"]
    assert set(model) - {"grid", "outputs"} == set(ModelSpec.__struct_fields__) - {"name", "crop", "recorded"}
    mappings = [schema, *(part for name, part in schema["$defs"].items() if name != "Input")]
    assert all(key["description"] for part in mappings for key in part["properties"].values())
    assert model["dtype"]["description"] == "The module is cast to it. Default: as the factory built it."


EVERY_KEY = """
version: 1
picks: picks.json
defaults: {dtype: bfloat16, targets: [native], buckets: [{b: 1, s: [1, 8]}], outputs: {crop: [b]}}
models:
  m:
    factory: package.module:make
    kwargs: {a: 1}
    mode: default
    weights: live
    targets: [native, cpu:x86-64-v3, cuda:sm_90]
    options: {a.b: 2}
    patches: {one: false}
    method: encode
    inputs:
      x: {shape: [b, 2*s, 8], dtype: float32, init: randn, layout: contiguous, pad: {b: 0, s: edge}}
      y: {shape: [b], init: [ones, {constant: 3}, {randint: [0, s]}, {recorded: a.safetensors#m}], default: 1}
      z: [{tuple: [1, {shape: [s]}]}, {deep: {shape: [s], requires_grad: true}}, text, null]
    buckets: [{b: 1, s: 8}, {b: [1, 4], s: {range: [8, 64], multiple_of: 8, tune_at: 16}}]
    grid: {b: [2, {range: [16, 32]}]}
    outputs: {crop: {"[0]": [b, null]}}
    autocast: null
    float32_matmul_precision: high
    make_contiguous: true
    cuda_graphs: never
    graph_sizes: {b: [1, 2]}
    train: true
    activation_memory: 0.5
    runtime: any
    ptx: false
  n: {factory: "p:f", inputs: auto, regions: ["a.*"], parallel: {tensor: 2}}
"""
VALUES = (None, True, -1, 1, 1.5, 2**63, "", "text", "a b", "edge", [], [1, 1], ["b", "b"], [4, 1, 2], {}, {"b": 1})


def parts_of(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The keys of each part of a manifest's data, its own first."""
    yield keys
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from parts_of(item, (*keys, key))


def test_the_schema_for_editors_refuses_what_the_reader_refuses() -> None:
    """Both come from the same types. Each part of a manifest with every key is replaced by a value, and renamed."""
    whole = yaml.safe_load(EVERY_KEY)
    editor = Draft202012Validator(editor_schema())
    assert editor.is_valid(whole)
    verdicts = set()
    changes = list(itertools.product((keys for keys in parts_of(whole) if keys), (*VALUES, "rename")))
    for (*above, key), value in random.Random(0).sample(changes, 400):
        data = copy.deepcopy(whole)
        part = functools.reduce(operator.getitem, above, data)
        if value != "rename":
            part[key] = value
        elif isinstance(part, dict):
            part[f"{key}s"] = part.pop(key)
        findings = Findings("m.yaml", {}, (), ())
        check_structure(data, findings)
        verdicts.add(findings.found)
        assert editor.is_valid(data) != findings.found, (*above, key, value, findings.issues)
    assert verdicts == {True, False}


def test_reading_a_manifest_does_not_import_torch(tmp_path: Path) -> None:
    path = read(tmp_path, "version: 1\nmodels: {m: {factory: 'p:f', inputs: {}}}").path
    code = f"import sys, aotc.manifest as m; m.read_manifest({str(path)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
