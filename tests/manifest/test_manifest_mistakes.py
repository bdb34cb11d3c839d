"""Every mistake in a manifest is reported: with its line, both values, a hint, and all at once."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from aotc.errors import Issue, ManifestError
from aotc.manifest import read_manifest


def mistakes(folder: Path, text: str, only: tuple[str, ...] = ()) -> tuple[Issue, ...]:
    path = folder / "m.yaml"
    path.write_text(dedent(text))
    with pytest.raises(ManifestError) as caught:
        read_manifest(path, only)
    return caught.value.issues


def the_mistake(folder: Path, text: str) -> tuple[int, str, str]:
    """Line, message and hint of the only mistake."""
    issues = mistakes(folder, text)
    assert len(issues) == 1, [str(issue) for issue in issues]
    file, _, line = issues[0].where.rpartition(":")
    assert file == str(folder / "m.yaml")
    return int(line), issues[0].message, issues[0].hint


def model(lines: str, inputs: str = "{x: {shape: [batch]}}", buckets: str = "[{batch: 1}]") -> str:
    """A manifest with one sound model whose further lines begin on line 7."""
    head = (
        f"version: 1\nmodels:\n  m:\n    factory: package.module:make\n    inputs: {inputs}\n    buckets: {buckets}\n"
    )
    return head + indent(dedent(lines), "    ")


# -- the form ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        (
            "version: 1\ndefaults: {regions: [b]}\nmodels: {m: {factory: 'p:f', inputs: {}}}",
            2,
            "unknown key `regions`",
            "not a default",
        ),
        (
            "version: 1\nmodels: {m: {factory: 'p:f', inputs: {x: {cache: None}}}}",
            2,
            "`x.cache` is the text",
            "write `null`",
        ),
        (model("dtyp: float32"), 7, "unknown key `dtyp` in `models.m`", "did you mean `dtype`?"),
        (model("", inputs="{x: {shape: [batch], inti: ones}}"), 5, "unknown key `inti`", "did you mean `init`?"),
        (model("outputs: {corp: [batch]}"), 7, "unknown key `corp`", "did you mean `crop`?"),
        (
            model("", buckets="[{batch: {range: [1, 8], multipleof: 2}}]"),
            6,
            "unknown key `multipleof`",
            "did you mean `multiple_of`?",
        ),
        ("version: 1\nmodel: {}\nmodels: {m: {factory: 'p:f', inputs: {}}}", 2, "unknown key `model`", "`models`"),
        ("version: 1\ndefaults: {mod: default}\nmodels: {m: {factory: 'p:f', inputs: {}}}", 2, "`mod`", "`mode`"),
        ("version: 1\nmodels:\n  m: {factori: 'p:f', inputs: {}}", 3, "unknown key `factori`", "`factory`"),
        ("version: 1\nmodels:\n  m: {inputs: {}}", 3, "`factory` is missing in `models.m`", "add a factory"),
        (
            "version: 1\nmodels:\n  m: {factory: 'p:f'}",
            3,
            "`inputs` is missing in `models.m`",
            "add a mapping of inputs, or `auto`",
        ),
        ("models: {m: {factory: 'p:f', inputs: {}}}", 1, "`version` is missing", "add version 1"),
        ("version: 2\nmodels: {m: {factory: 'p:f', inputs: {}}}", 1, "`version` is 2", "reads version 1"),
        ("version: '1'\nmodels: {m: {factory: 'p:f', inputs: {}}}", 1, '`version` is "1"', "reads version 1"),
        ("version: 1", 1, "`models` is missing", ""),
        ("version: 1\nmodels: {}", 2, "`models` is empty", ""),
        ("version: 1\nmodels:", 2, "`models` is nothing", ""),
        ("version: 1\nmodels:\n  m:", 3, "`models.m` is nothing; expected a model", ""),
        ("", 1, "the manifest is empty", "`aotc init` writes a first manifest"),
        ("- 1", 1, "the manifest is [1]", ""),
        ("version: 1\nmodels:\n  ../m: {factory: 'p:f', inputs: {}}", 3, '"../m" cannot be a name', ""),
        ("version: 1\nmodels:\n  a..b: {factory: 'p:f', inputs: {}}", 3, '"a..b" cannot be a name', ""),
        (f"version: 1\nmodels:\n  {'a' * 129}: {{factory: 'p:f', inputs: {{}}}}", 3, "at most 128 letters", ""),
        ('version: 1\nmodels:\n  "a\\n": {factory: "p:f", inputs: {}}', 3, "cannot be a name", ""),
        (model("kwargs: [1]"), 7, "`models.m.kwargs` is [1]; expected a mapping", ""),
        (model("make_contiguous: 1"), 7, "is 1; expected true or false", ""),
        (model("dtype: half"), 7, '`models.m.dtype` is "half"', "did you mean `float16`?"),
        (model("dtype: torch.float32"), 7, '"torch.float32"', "did you mean `float32`?"),
        (model("dtype: int64"), 7, "expected a floating dtype", ""),
        (model("mode: max_autotune"), 7, "expected a mode", "did you mean `max-autotune`?"),
        (model("mode: 5"), 7, "expected a mode (default, reduce-overhead, max-autotune, ", ""),
        (model("weights: frozn"), 7, "expected `live` or `frozen`", "did you mean `frozen`?"),
        (model("autocast: float32"), 7, "expected bfloat16, float16 or null", "did you mean `float16`?"),
        (model("targets: [native, cpu:x86-64-v2]"), 7, "`models.m.targets[1]`", "did you mean `cpu:x86-64-v"),
        (model("targets: [cuda:sm_x]"), 7, "expected a target", "did you mean `cuda:sm_"),
        (model("targets: [native, native]"), 7, '"native" is there twice', "remove"),
        (model("targets: []"), 7, "`models.m.targets` is empty; expected a list of targets", ""),
        (model("cuda_graphs: sometimes"), 7, "expected auto, always or never", ""),
        (model("activation_memory: 0.5"), 7, "only a training step keeps activations", "write `train: true`"),
        (model("train: true\nweights: frozen"), 8, "frozen weights cannot be trained", "leave out"),
        (model("train: true\ncuda_graphs: always"), 8, "are not captured alone", "aotc.TrainingStep"),
        (model("train: true\nactivation_memory: 2"), 8, "expected a number from 0 to 1", ""),
        (
            model("train: true", inputs="{x: {shape: [batch], dtype: 5, requires_grad: true}}"),
            5,
            "is 5; expected a dtype",
            "",
        ),
        (model("runtime: standalon"), 7, "expected `any` or `standalone`", "did you mean `standalone`?"),
        (model("runtime: standalone\ntrain: true"), 8, "excludes `train`: gradients need torch", "`runtime: any`"),
        (model("runtime: standalone\nautocast: bfloat16"), 8, "excludes `autocast`", "`runtime: any`"),
        (model("runtime: standalone\nparallel: {tensor: 2}"), 8, "excludes `parallel`", "`runtime: any`"),
        (model('runtime: standalone\nregions: ["a.*"]'), 8, "excludes `regions`", "`runtime: any`"),
        (model("factory: 5").replace("    factory: package.module:make\n", ""), 6, "is 5; expected a factory", ""),
    ],
)
def test_a_wrong_form_is_told_with_its_line(tmp_path: Path, text: str, line: int, message: str, hint: str) -> None:
    found_line, found_message, found_hint = the_mistake(tmp_path, text)
    assert (found_line, message in found_message, hint in found_hint) == (line, True, True), (
        found_line,
        found_message,
        found_hint,
    )


def test_a_hint_does_not_list_what_the_message_lists(tmp_path: Path) -> None:
    _, message, hint = the_mistake(tmp_path, model("mode: quick"))
    assert message.endswith("expected a mode (default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs)")
    assert hint == ""


@pytest.mark.parametrize("factory", ["module", "module:", ":name", "a b:name", "a.:name", "a/b:name", "/x/y.py:name"])
def test_a_factory_must_name_a_module_and_an_object_in_it(tmp_path: Path, factory: str) -> None:
    """An absolute path is refused too: artifacts carry the factory's name to other machines."""
    line, message, _ = the_mistake(tmp_path, model("").replace("package.module:make", repr(factory)))
    assert line == 4
    assert factory in message


# -- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "message", "hint"),
    [
        ("{dtype: float32}", "`shape` is missing in `models.m.inputs.x`", "add a shape"),
        ("{init: ones}", "`shape` is missing in `models.m.inputs.x`", "add a shape"),
        ("{shap: [1, 2]}", "unknown key `shap` in `models.m.inputs.x`", "did you mean `shape`?"),
        ("{shap: [1, 2], dtyp: float32}", "unknown key `shap` in `models.m.inputs.x`", "did you mean `shape`?"),
        ("[{a: {Shape: [1, 2]}}]", "unknown key `Shape` in `models.m.inputs.x[0].a`", "did you mean `shape`?"),
        ("{shape: 3}", "`models.m.inputs.x.shape` is 3; expected a shape", ""),
        ("{shape: [1], dtype: int46}", "expected a dtype", "did you mean `int64`?"),
        ("{shape: [-1]}", "`models.m.inputs.x.shape[0]` is -1; expected a size", ""),
        ("{shape: [1.0]}", "is 1.0; expected a size", "write 1"),
        ("{shape: [true]}", "is true; expected a size", ""),
        ("{shape: [null]}", "is nothing; expected a size", ""),
        ('{shape: ["2*"]}', "`2*` is not an expression over dims", "`2*seq`"),
        ('{shape: ["seq.x"]}', "`seq.x` is not an expression over dims", ""),
        ("{shape: [1], init: rand}", "expected an init", "did you mean `randn`?"),
        ("{shape: [1], init: {randnit: [0, 1]}}", "unknown key `randnit`", "did you mean `randint`?"),
        ("{shape: [1], init: {}}", "is empty; expected {randint: [low, high]}, {constant: value} or {rec", ""),
        ("{shape: [1], init: {randint: [0]}}", "is [0]; expected [low, high]", ""),
        ("{shape: [1], init: {randint: [3, 3]}}", "holds no integer: the high end is excluded", "write [3, 4]"),
        ("{shape: [1], dtype: int64, init: {randint: [0, n]}}", "names `n`, which is a dim of no shape", ""),
        ('{shape: [1], dtype: int64, init: {randint: [0, "2*"]}}', "`2*` is not an expression over dims", "`2*seq`"),
        ("{shape: [1], init: {randint: [0, 1.5]}}", "is 1.5; expected an integer, a dim, or an expression", ""),
        ("{shape: [1], init: {recorded: 3}}", "is 3; expected FILE.safetensors#NAME", ""),
        ("{shape: [1], init: {recorded: ../a.safetensors#m}}", "expected FILE.safetensors#NAME, a file beside", ""),
        ("{shape: [1], init: {recorded: /a.safetensors#m}}", "expected FILE.safetensors#NAME, a file beside", ""),
        (
            "{shape: [1], init: {recorded: a.safetensors#m}}",
            "there is no file a.safetensors beside the manifest",
            "keep",
        ),
        ("{shape: [1], dtype: int8, init: {randint: [0, 300]}}", "299 is outside of int8's range -128 to 127", ""),
        ("{shape: [1], dtype: uint8, init: {constant: -1}}", "-1 is outside of uint8's range 0 to 255", ""),
        ("{shape: [1], dtype: int64, init: {constant: 0.5}}", "0.5 is not a value of int64", ""),
        ("{shape: [1], init: []}", "is empty; expected a list of inits", ""),
        ("{shape: [1], init: [ones, rand]}", '`models.m.inputs.x.init[1]` is "rand"', "did you mean `randn`?"),
        ("{shape: [1], dtype: int64, init: [ones, randn]}", "randn makes numbers that are not integers", "randint"),
        (f"{{shape: [1], init: {[{'constant': n} for n in range(17)]}}}", "17 combinations of `init`s; at most 16", ""),
        ("{shape: [1], dtype: int64, init: randn}", "randn makes numbers that are not integers", "randint"),
        ("{shape: [1], init: 'a b:f'}", "`a b` in `a b:f` is neither a module nor a Python file", "package.module"),
        ("{shape: [1], init: 'a.b:f-g'}", "`a.b:f-g` names no function", "package.module:function"),
        ("{shape: [1], layout: channels_lost}", "expected a layout", "did you mean `channels_last`?"),
        ("{shape: [1, 2, 3], layout: channels_last}", "3 dimensions; the layout channels_last needs 4", ""),
        ("{shape: [1], requires_grad: true}", "has no gradient in a model that is not trained", "write `train: true`"),
        ("{shape: [1], pad: {seq: left}}", 'is "left"; expected `edge` or a value', ""),
    ],
)
def test_a_wrong_tensor_is_told(tmp_path: Path, tensor: str, message: str, hint: str) -> None:
    line, found_message, found_hint = the_mistake(tmp_path, model("", inputs=f"{{x: {tensor}}}", buckets="[]"))
    assert line == 5
    assert message in found_message
    assert hint in found_hint


@pytest.mark.parametrize(
    ("pad", "message", "hint"),
    [
        ("{seq: 0}", "`n[0].x` cannot be padded along `seq`: its shape is", "known: batch"),
        ("{bacth: 0}", "cannot be padded along `bacth`", "did you mean `batch`?"),
        ("{batch: 0.5}", "cannot be padded with 0.5: 0.5 is not a value of int64", ""),
    ],
)
def test_a_pad_must_suit_its_tensor(tmp_path: Path, pad: str, message: str, hint: str) -> None:
    nested = f"{{n: [{{x: {{shape: [batch, 4], dtype: int64, pad: {pad}}}}}], y: {{shape: [seq]}}}}"
    _, found_message, found_hint = the_mistake(tmp_path, model("", inputs=nested, buckets="[{batch: 1, seq: 1}]"))
    assert message in found_message
    assert hint in found_hint


@pytest.mark.parametrize(
    ("inputs", "more", "message"),
    [
        ("{x: {shape: [n], dtype: int64, default: 0.5}, y: {shape: [n]}}", "", "0.5 is not a value of int64"),
        ("{x: {shape: [n], default: zeros}, y: {shape: [n]}}", "", 'is "zeros"; expected a number or a bool'),
        ("{x: {shape: [n], default: 0}}", "", "`n` is in the shape of no input without one"),
        ("{x: {shape: [n], default: 0}, y: {shape: [2, n], default: 0}}", "", "`n` is in the shape of no input"),
        ("{x: {shape: [n], default: 0}, y: {shape: [n]}}", "regions: [a]", "the module itself runs"),
    ],
)
def test_a_default_must_suit_its_tensor_and_have_its_sizes_from_another(
    tmp_path: Path, inputs: str, more: str, message: str
) -> None:
    assert any(message in issue.message for issue in mistakes(tmp_path, model(more, inputs=inputs, buckets="[{n: 1}]")))


# -- buckets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "message", "hint"),
    [
        ("-1", "is -1; expected a size", ""),
        ("true", "is true; expected a size", ""),
        ("1.5", "is 1.5; expected a size", ""),
        ("1.0", "is 1.0; expected a size", "write 1"),
        ("null", "is nothing; expected a size", ""),
        ("'8'", 'is "8"; expected a size', ""),
        ("9223372036854775808", "expected a size", ""),
        ("[8, 1]", "the range [8, 1] is empty: 8 is more than 1", "write [1, 8]"),
        ("[1]", "is [1]; expected a range [low, high] of two sizes", ""),
        ("[1, 2, 3]", "is [1, 2, 3]; expected a range", ""),
        ("[-1, 2]", "is -1; expected a size", ""),
        ("{range: [8, 1]}", "the range [8, 1] is empty", "write [1, 8]"),
        ("{range: [1, 7], multiple_of: 8}", "holds no multiple of 8", "widen it to hold 0 or 8"),
        ("{range: [1, 7], multiple_of: 0}", "is 0; expected an integer of 1 or more", ""),
        ("{range: [1, 64], tune_at: 65}", "tune_at is 65, which is not in the range 1..64", "64"),
        ("{range: [1, 64], multiple_of: 8, tune_at: 12}", "not in the range 8..64 step 8", "16"),
        ("{multiple_of: 8}", "`range` is missing", "add a range"),
    ],
)
def test_an_impossible_size_is_told(tmp_path: Path, size: str, message: str, hint: str) -> None:
    line, found_message, found_hint = the_mistake(tmp_path, model("", buckets=f"[{{batch: {size}}}]"))
    assert line == 6
    assert message in found_message
    assert hint in found_hint


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("{batch: 8}", "is 8; expected a list of sizes"),
        ("{batch: []}", "`models.m.grid.batch` is empty"),
        ("{batch: [1, -8]}", "`models.m.grid.batch[1]` is -8"),
        ("{batch: [[1, 8]]}", "is [1, 8]; expected a size (an integer of 0 or more) or {range: [low, high]}"),
        ("{batch: [{range: [8, 1]}]}", "the range [8, 1] is empty"),
        ("{'b c': [1]}", '"b c" cannot be a name'),
        ("{batch: [1], seq: [2]}", "the dim `seq` is in no shape"),
    ],
)
def test_an_impossible_grid_is_told(tmp_path: Path, grid: str, message: str) -> None:
    line, found_message, _ = the_mistake(tmp_path, model(f"grid: {grid}"))
    assert line == 7
    assert message in found_message


def test_a_grid_of_too_many_buckets_is_refused_and_not_unfolded(tmp_path: Path) -> None:
    names = [f"d{index}" for index in range(20)]
    sizes = ", ".join(f"{name}: [{', '.join(map(str, range(100)))}]" for name in names)
    text = model(f"grid: {{{sizes}}}", inputs=f"{{x: {{shape: [{', '.join(names)}]}}}}", buckets="[]")
    assert "a model may have 10000" in the_mistake(tmp_path, text)[1]


def test_a_dim_that_a_bucket_does_not_give_is_told_at_the_bucket(tmp_path: Path) -> None:
    text = model(
        "grid: {batch: [1]}", inputs="{x: {shape: [batch, 2*seq]}}", buckets="[{batch: 1, seq: 1}, {batch: 2}]"
    )
    bucket, grid = mistakes(tmp_path, text)
    assert bucket.where.endswith(":6")
    assert bucket.message == "the bucket gives no size for `seq`, which the shape of `x` uses"
    assert grid.where.endswith(":7")
    assert grid.message == "the grid gives no size for `seq`, which the shape of `x` uses"


def test_a_mistyped_dim_is_told_once(tmp_path: Path) -> None:
    (unused,) = mistakes(tmp_path, model("", buckets="[{bacth: 1}]"))
    assert "the dim `bacth` is in no shape" in unused.message
    assert unused.hint == "did you mean `batch`?"


def test_a_shape_without_its_key_is_told(tmp_path: Path) -> None:
    (bare,) = mistakes(tmp_path, model("", inputs="{x: [batch, 3]}"))
    assert bare.hint == "a tensor needs `shape`: write `x: {shape: [batch, 3]}`"


@pytest.mark.parametrize("buckets", ["[]", "[]\n    grid: {}"])
def test_a_model_whose_shapes_use_dims_needs_a_bucket(tmp_path: Path, buckets: str) -> None:
    line, message, hint = the_mistake(tmp_path, model("", buckets=buckets))
    assert (line, hint) == (5, "add buckets: [{batch: 1}]")
    assert "`m` has no bucket, but its shapes use the dims `batch`" in message


@pytest.mark.parametrize(
    ("expression", "size", "message"),
    [
        ("batch-5", "3", "`batch-5` is negative: -2 at batch=3"),
        ("batch-5", "[1, 8]", "`batch-5` is negative: -4 at batch=1"),
        ("8//batch", "0", "`8//batch` divides by zero at batch=0"),
        ("batch*9223372036854775807", "2", "more than 64 bits hold"),
    ],
)
def test_a_derived_dim_must_be_a_possible_size_at_the_ends_of_ranges_too(
    tmp_path: Path, expression: str, size: str, message: str
) -> None:
    inputs = f'{{x: {{shape: [batch, "{expression}"]}}}}'
    line, found, _ = the_mistake(tmp_path, model("", inputs=inputs, buckets=f"[{{batch: {size}}}]"))
    assert line == 5
    assert message in found


def test_a_dim_cannot_have_the_name_of_a_function_or_word_of_expressions(tmp_path: Path) -> None:
    text = model("", inputs="{x: {shape: [4]}}", buckets="[{max: 1}]")
    assert "`max` has a meaning of its own" in mistakes(tmp_path, text)[0].message


# -- outputs and graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        ("outputs: {crop: [bacth]}", "cannot be cropped along `bacth`", "did you mean `batch`?"),
        ('outputs: {crop: {"[0]": [null, seq]}}', "cannot be cropped along `seq`", "known: batch"),
        ("outputs: {crop: batch}", "expected a list of dims", ""),
        ("graph_sizes: {seq: [1]}", "names the dim `seq`", "known: batch"),
        ("graph_sizes: {batch: [9]}", "9 is in no bucket's `batch`", "the buckets have 1"),
        ("graph_sizes: {batch: [-1]}", "is -1; expected a size", ""),
    ],
)
def test_outputs_and_graphs_must_name_known_dims(tmp_path: Path, lines: str, message: str, hint: str) -> None:
    line, found_message, found_hint = the_mistake(tmp_path, model(lines))
    assert line == 7
    assert message in found_message
    assert hint in found_hint


# -- all at once ------------------------------------------------------------------------------------------------------


def test_all_mistakes_of_all_kinds_come_together_in_the_order_of_lines(tmp_path: Path) -> None:
    issues = mistakes(
        tmp_path,
        """\
        version: 3
        defaults: {mod: default}
        models:
          one:
            factory: nowhere
            inputs:
              x: {shape: [batch, "2*"], dtype: flaot32}
              y: {shape: [2], pad: {seq: 0}}
            buckets:
              - {batch: [8, 1]}
          two:
            factory: p:f
            inputs: {x: {shape: [seq]}}
          one: {}
        """,
        only=("three",),
    )
    assert [int(issue.where.rpartition(":")[2]) for issue in issues] == [1, 2, 3, 5, 7, 7, 8, 10, 13, 14]


def test_a_default_that_does_not_suit_a_model_names_the_model(tmp_path: Path) -> None:
    text = """\
    version: 1
    defaults: {buckets: [{batch: 1}]}
    models:
      one: {factory: "p:f", inputs: {x: {shape: [batch]}}}
      two: {factory: "p:f", inputs: {x: {shape: [4]}}}
    """
    line, message, _ = the_mistake(tmp_path, text)
    assert line == 2
    assert message == "the dim `batch` is in no shape of the model's inputs (for the model `two`)"


def test_only_must_name_a_model_of_the_manifest(tmp_path: Path) -> None:
    (issue,) = mistakes(tmp_path, model(""), only=("n",))
    assert issue.message == "there is no model `n` in this manifest"
    assert issue.hint == "known: m"


def test_the_error_reads_well(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(model("dtyp: float32"))
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path / "m.yaml")
    assert str(caught.value) == (
        f"{tmp_path / 'm.yaml'} has 1 mistake\n"
        f"  - {tmp_path / 'm.yaml'}:7: unknown key `dtyp` in `models.m`\n"
        "    hint: did you mean `dtype`?"
    )
