"""Factories: where they are looked up, what they must give, and how their failures are told."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

from aotc.compiler.mistakes import read_checked
from aotc.errors import Issue, ManifestError
from aotc.manifest import Manifest, ModelSpec, read_manifest
from aotc.models.factory import build_module, build_modules, import_object, visit_modules
from aotc.reads.sources import public_name

LINEAR = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, input_ids, scale=1.0, *, mask=None):
        return self.linear(input_ids) * scale


class Varied(Net):
    def forward(self, *xs, **more):
        return xs[0]


class NoForward(nn.Module):
    pass


def make(width=4):
    return Net(width)


def fail(width=4):
    return nn.Linear(width, "wide")


def leave():
    raise SystemExit(3)


number = 5


def not_a_module():
    return [1]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "linear.py").write_text(LINEAR)
    return tmp_path


def spec(factory: str, **more: object) -> ModelSpec:
    return ModelSpec("m", factory, {"input_ids": {"shape": [4]}}, ({},), **more)  # type: ignore[arg-type]


# -- imports ----------------------------------------------------------------------------------------------------------


def test_a_package_that_imports_a_name_late_and_fails_is_told(folder: Path) -> None:
    """As transformers does for a model whose requirements are not installed."""
    (folder / "late.py").write_text("def __getattr__(name):\n    raise ModuleNotFoundError(f'cannot import {name}')\n")
    with pytest.raises(
        ManifestError, match=r"`late:Model` cannot be imported: ModuleNotFoundError: cannot import Model"
    ):
        import_object("late:Model", folder)


@pytest.mark.parametrize("reference", ["nets.linear:make", "nets/linear.py:make"])
def test_a_factory_is_found_in_the_manifests_folder_and_in_the_working_folder(
    folder: Path, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert import_object(reference, folder).__name__ == "make"
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(folder)
    assert import_object(reference, elsewhere).__name__ == "make"


def test_the_manifests_folder_comes_before_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working = folder / "working"
    working.mkdir()
    (folder / "same_name_b.py").write_text("where = 'manifest'")
    (working / "same_name_b.py").write_text("where = 'working'")
    monkeypatch.chdir(working)
    assert import_object("same_name_b:where", folder) == "manifest"
    import_object("same_name_b:where", folder)
    assert sys.path[:2] == [str(folder), str(working)]
    assert len([entry for entry in sys.path if entry in sys.path[:2]]) == 2


def test_a_file_and_its_dotted_name_are_one_module(folder: Path) -> None:
    """Else a class would be another one at build than in the service."""
    assert import_object("nets/linear.py:Net", folder) is import_object("nets.linear:Net", folder)
    assert import_object("nets/linear.py:Net", folder).__module__ == "nets.linear"


def test_a_file_outside_of_the_manifest_s_folder_has_the_name_that_its_script_has(folder: Path) -> None:
    """So that what forward reads of the script's global variables is compared with those of `__main__`."""
    (folder / "program_of_a_user.py").write_text(LINEAR)
    inner = folder / "manifests" / "deep"
    inner.mkdir(parents=True)
    net = import_object("../../program_of_a_user.py:Net", inner)
    assert public_name(net.__module__) == "program_of_a_user"


def test_a_file_with_the_name_of_another_module_replaces_nothing(folder: Path) -> None:
    import json

    (folder / "json.py").write_text("def make():\n    return 'mine'\n")
    make = import_object("json.py:make", folder)
    assert make() == "mine"
    assert sys.modules["json"] is json
    assert make.__module__.startswith("json_")
    assert import_object("json.py:make", folder) is make


def test_a_folder_beside_the_manifest_replaces_no_package_that_torch_imports(folder: Path) -> None:
    """On a machine without Triton, an empty folder of its name would be taken for it."""
    for name in ("triton", "mpmath"):
        (folder / name).mkdir()
        (folder / name / "kernels.py").write_text("def make(): return 'mine'\n")
    (folder / "mpmath" / "__init__.py").write_text("raise RuntimeError\n")
    before = importlib.util.find_spec("triton")
    assert import_object("nets.linear:make", folder)
    found = [importlib.util.find_spec(name) for name in ("triton", "mpmath")]
    assert (found[0] is None) == (before is None) and found[1] is not None
    assert not any(str(folder) in str(spec.origin or spec.submodule_search_locations) for spec in found if spec)
    assert import_object("triton/kernels.py:make", folder)() == "mine"  # which is not a package of that name


def test_a_dotted_attribute_is_followed(folder: Path) -> None:
    assert import_object("nets.linear:Net.forward", folder).__qualname__ == "Net.forward"


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        ("nets.nothing:make", "there is no module `nets.nothing`", "manifest's folder and in the working folder"),
        ("nots.linear:make", "there is no module `nots`", "manifest's folder"),
        ("nets/none.py:make", "there is no file `nets/none.py`", "looked in "),
        ("nets.linear:maek", "`nets.linear` has no `maek`", "did you mean `make`?"),
        ("nets.linear:Net.forwrd", "`nets.linear:Net.forwrd` has no `forwrd`", "did you mean `forward`?"),
    ],
)
def test_what_cannot_be_found_is_told(folder: Path, reference: str, message: str, hint: str) -> None:
    with pytest.raises(ManifestError) as caught:
        import_object(reference, folder)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("reference", ["half_c:make", "half_c/__init__.py:make"])
def test_a_module_that_fails_is_told_with_its_line_and_not_left_behind(folder: Path, reference: str) -> None:
    (folder / "half_c").mkdir()
    (folder / "half_c" / "__init__.py").write_text("import half_c.part\n\nimport not_installed_anywhere\n")
    (folder / "half_c" / "part.py").write_text("x = 1")
    with pytest.raises(ManifestError) as caught:
        import_object(reference, folder)
    assert "No module named 'not_installed_anywhere'" in caught.value.message
    assert "half_c/__init__.py:3)" in caught.value.message
    assert not [name for name in sys.modules if name.startswith("half_c")]
    (folder / "half_c" / "__init__.py").write_text(
        "import half_c.part\n\n\ndef make(): return half_c.part.x  # repaired\n"
    )
    assert import_object(reference, folder)() == 1


def test_a_syntax_error_is_told_with_its_line(folder: Path) -> None:
    (folder / "wrong_d.py").write_text("x = 1\ny = = 2\n")
    with pytest.raises(ManifestError, match=r"SyntaxError: .*wrong_d.py:2\)"):
        import_object("wrong_d:x", folder)


# -- modules ----------------------------------------------------------------------------------------------------------


def test_the_module_is_in_eval_mode_and_of_the_specs_dtype(folder: Path) -> None:
    module = build_module(spec("nets.linear:make", dtype="bfloat16", kwargs={"width": 8}), folder)
    assert not module.training
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in module.state_dict().items()} == {
        "linear.weight": (torch.bfloat16, (8, 8)),
        "linear.bias": (torch.bfloat16, (8,)),
        "count": (torch.int64, (1,)),
    }


def test_random_weights_are_equal_each_time_and_the_random_state_is_kept(folder: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one = build_module(spec("nets.linear:make"), folder).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    other = build_module(spec("nets.linear:make"), folder).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("factory", "kwargs", "message", "hint"),
    [
        (
            "number",
            {},
            "is int; expected a function or a class",
            "it is called with `kwargs`, and what it returns is used",
        ),
        (
            "not_a_module",
            {},
            "gave list; expected a torch.nn.Module",
            "name a class of modules, or a function that returns a module",
        ),
        ("fail", {}, "raised TypeError", ""),
        ("make", {"widht": 3}, "raised TypeError", "kwargs must fit make(width=4)"),
        ("leave", {}, "raised SystemExit: 3", ""),
    ],
)
def test_a_factory_that_fails_is_told(
    folder: Path, factory: str, kwargs: dict[str, int], message: str, hint: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        build_module(spec(f"nets.linear:{factory}", kwargs=kwargs), folder)
    assert message in caught.value.message
    assert hint == caught.value.hint


def test_the_line_told_is_the_innermost_of_the_users_own_code(folder: Path) -> None:
    """Not the line in torch, where the exception came up."""
    with pytest.raises(ManifestError, match=r"nets/linear.py:29\)"):
        build_module(spec("nets.linear:fail"), folder)


# -- a whole manifest -------------------------------------------------------------------------------------------------


def manifest_of(folder: Path, text: str) -> Manifest:
    (folder / "m.yaml").write_text(dedent(text))
    return read_manifest(folder / "m.yaml")


def issues_of(manifest: Manifest) -> list[tuple[str, str, str]]:
    with pytest.raises(ManifestError) as caught:
        build_modules(manifest)
    issues: tuple[Issue, ...] = caught.value.issues
    return [(issue.where.rpartition(":")[2], issue.message, issue.hint) for issue in issues]


def test_every_model_is_built(folder: Path) -> None:
    manifest = manifest_of(
        folder,
        """\
        version: 1
        models:
          a: {factory: "nets.linear:make", inputs: {input_ids: {shape: [4]}, mask: null}}
          b: {factory: nets/linear.py:Varied, inputs: {anything: {shape: [4]}}}
        """,
    )
    assert {name: type(module).__name__ for name, module in build_modules(manifest).items()} == {
        "a": "Net",
        "b": "Varied",
    }


def test_each_model_is_gone_when_the_next_is_built(folder: Path) -> None:
    """Models of one manifest need not fit into memory side by side."""
    text = "version: 1\nmodels:\n"
    for name in "abc":
        text += f'  {name}: {{factory: "nets.linear:make", inputs: {{input_ids: {{shape: [4]}}, mask: null}}}}\n'
    seen: list[tuple[str, weakref.ref[nn.Module]]] = []

    def visit(spec: ModelSpec, module: nn.Module, seconds: float) -> None:
        assert not [name for name, earlier in seen if earlier() is not None]
        seen.append((spec.name, weakref.ref(module)))

    visit_modules(manifest_of(folder, text), visit)
    assert [name for name, _ in seen] == ["a", "b", "c"]


def test_the_failures_of_all_models_come_together_with_their_lines(folder: Path) -> None:
    manifest = manifest_of(
        folder,
        """\
        version: 1
        models:
          missing: {factory: "nowhere_e:make", inputs: {}}
          failing: {factory: "nets.linear:fail", inputs: {input_ids: {shape: [4]}}}
          inputs:
            factory: nets.linear:make
            inputs:
              inputs_ids: {shape: [4]}
          rest:
            factory: nets.linear:Varied
            inputs:
              xs: [{shape: [4], init: "nets.linear:drawn"}]
          bare: {factory: "nets.linear:NoForward", inputs: {}}
          unnamed: {factory: "nets.linear:make", inputs: {}}
        """,
    )
    told = issues_of(manifest)
    assert [line for line, _, _ in told] == ["3", "4", "8", "12", "13", "14"]
    assert "there is no module `nowhere_e`" in told[0][1]
    assert "raised TypeError" in told[1][1]
    assert told[2][1:] == ("Net.forward takes no input `inputs_ids`", "did you mean `input_ids`?")
    assert told[3][1] == "`nets.linear` has no `drawn`"
    assert told[4][1] == "NoForward has no forward"
    assert told[5][1] == "Net.forward needs `input_ids`, and no input has that name"


def test_mistakes_of_form_of_options_and_of_models_come_in_one_round(folder: Path) -> None:
    (folder / "m.yaml").write_text(
        dedent(
            """\
            version: 1
            models:
              a:
                factory: nets.linear:Net
                options: {max_autotun: true}
                inputs:
                  inputs_ids: {shap: [n], dtype: int64}
                buckets: [{n: 0}]
              b: {factory: "nowhere_g:make", inputs: {x: {shape: [4], inti: ones}}, options: {cpp.threads: many}}
              c: {factory: "nets.linear:Net", inputs: {input_id: {shape: [4]}}}
              d: {factory: "nets.linear:fail", kwargs: 3, inputs: {}}
              e: {factory: "nets.linear:fail", inputs: 3}
            """
        )
    )
    with pytest.raises(ManifestError) as of_form:
        read_manifest(folder / "m.yaml")
    with pytest.raises(ManifestError) as all_found:
        read_checked(folder / "m.yaml")
    issues = all_found.value.issues
    assert set(of_form.value.issues) < set(issues)
    further = [(issue.where.rpartition(":")[2], issue.message) for issue in issues if issue not in of_form.value.issues]
    assert further == [
        ("5", "Inductor has no option `max_autotun`"),
        ("7", "Net.forward takes no input `inputs_ids`"),
        ("9", 'the option `cpp.threads` is "many"; expected int'),
        ("9", "`nowhere_g:make` cannot be imported: there is no module `nowhere_g`"),
        ("10", "Net.forward takes no input `input_id`"),
    ]  # and nothing of d and e, whose factories cannot be called as they are meant


@pytest.mark.parametrize(
    ("made", "message", "hint"),
    [
        ("nn.LazyLinear(4)", "`weight` has no shape yet", "call the module once"),
        ("nn.Sequential(nn.LazyBatchNorm1d())", "`0.weight` has no shape yet", "call the module once"),
        ("nn.Linear(4, 4, device='meta')", "`weight` lies on the meta device", "to_empty"),
        ("nn.BatchNorm1d(4, affine=False, device='meta')", "`running_mean` lies on the meta device", "to_empty"),
    ],
)
def test_a_module_whose_tensors_have_no_values_yet_is_refused(folder: Path, made: str, message: str, hint: str) -> None:
    (folder / "nets" / "unfilled.py").write_text(f"from torch import nn\ndef make(): return {made}\n")
    manifest = manifest_of(
        folder,
        """\
        version: 1
        models:
          unfilled: {factory: "nets.unfilled:make", inputs: {input: {shape: [2, 4]}}}
        """,
    )
    ((line, told, offered),) = issues_of(manifest)
    assert line == "3" and message in told and hint in offered


def test_a_scripted_module_is_refused(folder: Path) -> None:
    (folder / "nets" / "scripted.py").write_text(
        "import torch\ndef make(): return torch.jit.trace(torch.nn.Linear(4, 4), torch.ones(4))\n"
    )
    manifest = manifest_of(
        folder,
        """\
        version: 1
        models:
          scripted: {factory: "nets.scripted:make", inputs: {input: {shape: [4]}}}
        """,
    )
    assert [(line, message.partition(",")[0]) for line, message, _ in issues_of(manifest)] == [
        ("3", "the factory gives a scripted or traced module")
    ]


def test_inputs_cannot_be_given_to_star_args(folder: Path) -> None:
    (folder / "nets" / "stars.py").write_text(
        "from torch import nn\nclass Stars(nn.Module):\n    def forward(self, *xs): return xs\n"
    )
    text = "version: 1\nmodels: {m: {factory: 'nets.stars:Stars', inputs: {xs: {shape: [1]}}}}"
    ((_, message, hint),) = issues_of(manifest_of(folder, text))
    assert message == "Stars.forward takes no input `xs`"
    assert "`*xs` cannot be given by name" in hint
