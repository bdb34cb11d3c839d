"""The key of a unit: a different key because …, the same key despite …, and why a unit is stale in words."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from processes import ROOT, run_python

from aotc.compiler.messages import Factors, Job, Unit
from aotc.compiler.patches.machinery.registry import PATCHES
from aotc.compiler.planning import key as key_module
from aotc.compiler.planning.key import code_key, explain
from aotc.compiler.planning.plan import plan_units
from aotc.compiler.unit import compile_unit
from aotc.errors import BuildError
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest
from aotc.reads import syntax
from aotc.reads.imported_files import imported_files, source_closure
from aotc.reads.sources import file_identity
from aotc.reads.syntax import syntax_digest
from aotc.records import decode

MODEL = """
import os
import torch
from keyed_helper import SCALE

class Keyed(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        torch.nn.init.constant_(self.linear.weight, float(os.environ.get("KEYED_FILL", "1")))

    def forward(self, x):
        return self.linear(x) * SCALE

def other():
    return Keyed()

def plain():
    return torch.nn.Linear(8, 8)
"""
HELPER = "SCALE = 2.0\n"
SPEC: dict[str, Any] = {
    "factory": "keyed_model.py:Keyed",
    "inputs": {"x": {"shape": ["batch", 8]}},
    "targets": ["cpu:x86-64-v3"],
    "buckets": [{"batch": 2}],
}

PADDED = {"x": {"shape": ["batch", 8], "pad": {"batch": 0}}}


class Project:
    """A folder with a manifest, a model's file and a helper that it imports."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.write("keyed_model.py", MODEL)
        self.write("keyed_helper.py", HELPER)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def unit(self, text: str = "", **changes: Any) -> Unit:
        """The only unit; `changes` replace parts of the model's entry, `text` the whole manifest."""
        path = self.folder / "manifest.yaml"
        path.write_text(text or yaml.safe_dump({"version": 1, "models": {"keyed": {**SPEC, **changes}}}))
        (unit,) = plan_units(read_manifest(path))
        return unit

    def factors(self, text: str = "", **changes: Any) -> Factors:
        return self.unit(text, **changes).factors

    def key(self, text: str = "", **changes: Any) -> str:
        return key_module.unit_key(self.factors(text, **changes))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield Project(tmp_path / "project")
    for name in [name for name in sys.modules if "keyed_" in name]:
        del sys.modules[name]


# -- a different key because … ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"buckets": [{"batch": 4}]},
        {"buckets": [{"batch": {"range": [1, 8], "tune_at": 2}}]},
        {"targets": ["cpu:x86-64-v4"]},
        {"options": {"max_fusion_size": 8}},
        {"kwargs": {"width": 8}},
        {"dtype": "bfloat16"},
        {"mode": "default"},
        {"inputs": {"x": {"shape": ["batch", 8], "dtype": "bfloat16"}}},
        {"inputs": {"x": {"shape": ["batch", 8], "pad": {"batch": 0}}}},
        {"autocast": "bfloat16"},
        {"float32_matmul_precision": "high"},
        {"make_contiguous": True},
        {"patches": {"serial_small_loops": False}},
        {"factory": "keyed_model.py:other"},
    ],
    ids=lambda change: next(iter(change)) + str(len(str(change))),
)
def test_a_different_key_because_of_the_manifest(project: Project, change: dict[str, Any]) -> None:
    assert project.key(**change) != project.key()


@pytest.mark.parametrize(
    ("factory", "parameter"),
    [("keyed_model.py:Keyed", "x"), ("keyed_model:Keyed", "x"), ("keyed_model.py:plain", "input")],
)
def test_a_different_key_because_of_the_source_of_the_model_or_its_factory(
    project: Project, factory: str, parameter: str
) -> None:
    changes = {"factory": factory, "inputs": {parameter: {"shape": ["batch", 8]}}}
    before = project.factors(**changes)
    project.write("keyed_model.py", MODEL.replace("* SCALE", "+ SCALE"))
    after = project.factors(**changes)
    assert key_module.unit_key(before) != key_module.unit_key(after)
    (issue,) = explain(before, after)
    assert (issue.message, issue.where) == ("source of keyed_model changed", "keyed_model.py")


def test_what_changed_in_the_manifest_is_named_by_its_innermost_keys_and_their_line(project: Project) -> None:
    before = project.factors(options={"max_fusion_size": 8}, mode="default")
    text = """\
version: 1
defaults: {mode: max-autotune}
models:
  keyed:
    factory: keyed_model.py:Keyed
    kwargs: {width: 8}
    options:
      max_fusion_size: 16
    inputs:
      x:
        shape: [batch, 8]
        dtype: float32
    buckets: [{batch: 2}]
"""
    after = project.factors(text)
    line_of = partial(read_manifest(project.folder / "manifest.yaml").where, "models", "keyed")
    found = {issue.message: issue.where.rpartition(":")[2] for issue in explain(before, after, line_of)}
    expected = {
        "manifest options.max_fusion_size 8 → 16": "8",
        "manifest inputs.x.dtype absent → float32": "12",
        "manifest mode default → max-autotune": "2",
    }
    assert expected.items() <= found.items()
    assert not any("manifest options {" in message or "manifest inputs {" in message for message in found)


@pytest.mark.parametrize(
    "line",
    [
        "from keyed_helper import SCALE",
        "import keyed_helper; SCALE = keyed_helper.SCALE",
        "from keyed_between import SCALE",
        "def later():\n    from keyed_helper import SCALE\nSCALE = 2.0",
    ],
)
def test_a_different_key_because_of_the_source_of_a_module_that_the_model_imports(project: Project, line: str) -> None:
    project.write("keyed_between.py", "from keyed_helper import SCALE\n")
    project.write("keyed_model.py", MODEL.replace("from keyed_helper import SCALE", line))
    before = project.factors()
    project.write("keyed_helper.py", "SCALE = 3.0\n")
    assert [issue.message for issue in explain(before, project.factors())] == ["source of keyed_helper changed"]


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        pytest.param("from keyed_late import SCALE", "keyed_late", id="a file"),
        pytest.param("from keyed_part.deep.late import SCALE", "keyed_part.deep.late", id="a package"),
        pytest.param("from keyed_part import SCALE", "keyed_part.deep.late", id="a package's own import"),
        pytest.param("import keyed_part.other; SCALE = keyed_part.SCALE", "keyed_part", id="the package around it"),
        pytest.param("from keyed_space.deep.late import SCALE", "keyed_space.deep.late", id="a namespace package"),
    ],
)
@pytest.mark.parametrize("of", ["keyed_model", "keyed_helper"])
def test_a_different_key_because_of_what_is_imported_only_when_code_runs(
    project: Project, line: str, changed: str, of: str
) -> None:
    for package in ("keyed_part", "keyed_space"):
        (project.folder / package / "deep").mkdir(parents=True)
        project.write(f"{package}/deep/late.py", "SCALE = 2.0\n")
    project.write("keyed_part/__init__.py", "from .deep.late import SCALE\n")
    for name in ("keyed_part/deep/__init__", "keyed_part/other", "keyed_late"):
        project.write(f"{name}.py", "SCALE = 2.0\n")
    project.write(f"{of}.py", f"{MODEL if of == 'keyed_model' else HELPER}\ndef later():\n    {line}\n")
    before = project.factors()
    file = project.folder / changed.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    file.write_text(file.read_text() + "SCALE = 3.0\n")
    after = project.factors()
    assert [issue.message for issue in explain(before, after)] == [f"source of {changed} changed"]
    assert not {"keyed_late", "keyed_part", "keyed_space"} & sys.modules.keys()
    model = sys.modules["keyed_model"].Keyed()
    assert imported_files(model) == after["sources"]
    assert {name: file_identity(name) for name in after["sources"]} == after["sources"], "what a load compares"


@pytest.mark.parametrize("folder", ["code", "aotc"])
def test_a_different_key_because_of_a_file_in_a_folder_named_like_what_is_not_the_user_s(
    project: Project, folder: str
) -> None:
    (project.folder / folder).mkdir()
    changes = {"factory": f"{folder}/keyed_model.py:Keyed"}
    project.write(f"{folder}/keyed_model.py", MODEL)
    before = project.factors(**changes)
    assert set(before["sources"]) == {f"{folder}.keyed_model", "keyed_helper"}
    project.write(f"{folder}/keyed_model.py", MODEL.replace("* SCALE", "+ SCALE"))
    after = project.factors(**changes)
    assert [issue.message for issue in explain(before, after)] == [f"source of {folder}.keyed_model changed"]


def test_a_different_key_because_of_a_file_that_hides_a_module_of_python_s(project: Project) -> None:
    project.write("keyed_helper.py", HELPER + "\ndef later():\n    from this import SCALE\n    import wave\n")
    project.write("this.py", "SCALE = 2.0\n")
    assert set(project.factors()["sources"]) == {"keyed_model", "keyed_helper", "this"}


def test_a_different_key_because_of_files_in_a_zip(project: Project) -> None:
    files = {"keyed_model": MODEL, "keyed_helper": "from keyed_inner import SCALE\n", "keyed_inner": HELPER}
    for name in ("keyed_model", "keyed_helper"):
        (project.folder / f"{name}.py").unlink()
    with zipfile.ZipFile(project.folder / "models.zip", "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.py", text)
    sys.path.insert(0, str(project.folder / "models.zip"))
    sources = project.factors(factory="keyed_model:Keyed")["sources"]
    assert sources == {name: syntax_digest(text.encode()) for name, text in files.items()}


def test_files_of_the_user_s_are_compared_at_load_and_installed_ones_not(project: Project) -> None:
    installed = project.folder / "dist-packages"
    installed.mkdir()
    (installed / "keyed_installed.py").write_text("BIAS = 1.0\n")
    line = "from keyed_helper import SCALE\nfrom keyed_installed import BIAS"
    project.write("keyed_model.py", MODEL.replace("from keyed_helper import SCALE", line))
    sys.path[:0] = [str(project.folder), str(installed)]
    model = importlib.import_module("keyed_model").Keyed()
    assert set(source_closure(model, ())) == {"keyed_model", "keyed_helper", "keyed_installed"}
    assert set(imported_files(model)) == {"keyed_model", "keyed_helper"}
    bare = torch.nn.Identity()
    bare.act = importlib.import_module("keyed_model").other
    assert set(imported_files(bare)) == {"keyed_model", "keyed_helper"}


def test_a_different_key_because_of_a_module_in_the_same_package(project: Project) -> None:
    package = project.folder / "keyed_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "keyed_helper.py").write_text(HELPER)
    (package / "model.py").write_text(MODEL.replace("keyed_helper", ".keyed_helper"))
    before = project.factors(factory="keyed_package.model:Keyed")
    (package / "keyed_helper.py").write_text("SCALE = 3.0\n")
    after = project.factors(factory="keyed_package.model:Keyed")
    assert [issue.message for issue in explain(before, after)] == ["source of keyed_package.keyed_helper changed"]


def test_a_different_key_because_of_an_attribute_that_code_elsewhere_sets(project: Project) -> None:
    before = project.factors()
    init = sys.modules["keyed_model"].Keyed.__init__

    def patched(self: Any, width: int = 8) -> None:
        init(self, width)
        self.flag = True

    sys.modules["keyed_model"].Keyed.__init__ = patched
    assert [issue.message for issue in explain(before, project.factors())] == ["attributes changed"]


def test_a_different_key_because_of_torch(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = project.factors()
    monkeypatch.setattr(torch, "__version__", f"{before['torch']}.local")
    issues = explain(before, project.factors())
    assert [issue.message for issue in issues] == [f"torch {before['torch']} → {before['torch']}.local"]


def test_a_different_key_because_of_a_patch_of_torch(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = project.factors()
    monkeypatch.setattr(key_module, "PATCHES", PATCHES[1:])
    issues = explain(before, project.factors())
    assert [issue.message for issue in issues] == [f"patches {PATCHES[0].name} applied → absent"]


def test_a_different_key_because_of_the_compiler(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = project.factors()
    compiler = tmp_path / "new-g++"
    compiler.write_text("#!/bin/sh\necho 'g++ (Imaginary) 99.1'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    key_module.compiler_version.cache_clear()
    try:
        issues = explain(before, project.factors())
    finally:
        key_module.compiler_version.cache_clear()
    assert [issue.message for issue in issues] == [f"compiler {before['compiler']} → (Imaginary) 99.1"]


@pytest.mark.parametrize(
    "name",
    [
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
        "TORCHINDUCTOR_PROLOGUE_FUSION",
        "TORCHINDUCTOR_CPP_GEMM_CACHE_BLOCKING",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
        "PTXAS_OPTIONS",
        "TRITON_PTXAS_PATH",
        "CPLUS_INCLUDE_PATH",
        "CUTLASS_EPILOGUE_FUSION",
        "ENABLE_PERSISTENT_TMA_MATMUL",
        "ENABLE_TEMPLATE_TMA_STORE",
        "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE",
        "TORCHDYNAMO_AUTO_FUNCTIONALIZED_V2",
        "TORCH_DYNAMO_DO_NOT_EMIT_RUNTIME_ASSERTS",
    ],
)
def test_a_different_key_because_of_a_variable_that_the_compilers_read(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = project.factors()
    monkeypatch.setenv(name, "1")
    issues = explain(before, project.factors())
    assert [issue.message for issue in issues] == [f"variables {name} absent → 1"]


def test_a_different_key_because_of_triton(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = project.factors()
    monkeypatch.setattr(key_module, "triton_version", lambda: "9.9")
    (issue,) = explain(before, project.factors())
    assert issue.message == f"triton {before['triton']} → 9.9"


def test_a_different_key_because_of_frozen_weights(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"weights": "frozen", "targets": ["native"]}
    before = project.factors(**changes)
    monkeypatch.setenv("KEYED_FILL", "2")
    assert [issue.message for issue in explain(before, project.factors(**changes))] == ["weights changed"]


def test_a_different_key_because_of_aotc(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = project.factors()
    monkeypatch.setattr(key_module, "build_version", lambda: "other")
    (issue,) = explain(before, project.factors())
    assert issue.message.startswith("aotc record schema 2, build ") and issue.message.endswith("other")


NOT_IN_KEYS = {
    "aotc.store": "where the files are put",
    "aotc.runtime": "runs the library",
    "aotc.call_table": "makes a result's views, with which a captured graph is checked, as a load does",
    "aotc.standalone": "says what it would refuse of a unit that is compiled",
}


def test_every_module_that_a_unit_is_compiled_by_counts_in_its_key() -> None:
    """Those that the compiling process imports, and what these import, unless it is said why not."""
    found: dict[str, Path] = {}
    ahead = [
        *(
            "aotc.compiler.workers.compile_worker",
            "aotc.compiler.workers.unit_servers",
            "aotc.compiler.toolchain.pattern_warmup",
        ),
        "aotc.compiler.smoke.launch_choice",
        *(patch.module for patch in PATCHES),
    ]
    while ahead:
        name = ahead.pop()
        path = ROOT.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not name.startswith("aotc.") or name in found or not file.is_file():
            continue
        found[name] = file
        if ".".join(name.split(".")[:2]) in NOT_IN_KEYS:
            continue
        tree = ast.parse(file.read_text())
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]  # `if TYPE_CHECKING`
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                ahead += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    counted = set(key_module.builders())
    assert {".".join(name.split(".")[:2]) for name, file in found.items() if file not in counted} == NOT_IN_KEYS.keys()
    assert len(found) > 100 and {path.suffix for path in counted} == {".py", ".jinja", ".cpp"}
    assert all((ROOT / "aotc" / room).is_dir() for room in (*key_module._ROOMS, *key_module._OF_THE_GRAPH))


# -- the same key despite … -------------------------------------------------------------------------------------------

KEY = """
import sys
from pathlib import Path
from aotc.compiler.patches.machinery.registry import PATCHES
from aotc.compiler.planning.plan import plan_units
from aotc.reads.imported_files import imported_files, source_closure
from aotc.manifest import read_manifest
(unit,) = plan_units(read_manifest(Path(sys.argv[1])))
print(unit.key)
"""


def test_the_same_key_despite_another_process_folder_home_cache_and_hash_seed(tmp_path: Path) -> None:
    keys = set()
    for number in ("1", "2"):
        project = Project(tmp_path / number / "deep" / "er")
        key = project.folder / "manifest.yaml"
        key.write_text(yaml.safe_dump({"version": 1, "models": {"keyed": SPEC}}))
        keys |= {
            run_python(
                KEY,
                key,
                HOME=str(tmp_path / f"home{number}"),
                USER=f"user{number}",
                PYTHONHASHSEED=number,
                TMPDIR=str(project.folder),
                XDG_CACHE_HOME=str(tmp_path / f"cache{number}"),
                AOTC_CACHE_DIR=str(tmp_path / f"cache{number}"),
                AOTC_STORE=str(tmp_path / f"store{number}"),
                TORCHINDUCTOR_CACHE_DIR=str(tmp_path / f"inductor{number}"),
                TRITON_CACHE_DIR=str(tmp_path / f"triton{number}"),
                TORCHINDUCTOR_COMPILE_THREADS=number,
            )
        }
    assert len(keys) == 1


def test_no_factor_holds_a_path_of_this_machine(project: Project, tmp_path: Path) -> None:
    text = json.dumps(project.factors())
    assert str(tmp_path) not in text
    assert str(Path.home()) + "/" not in text
    assert sys.prefix not in text


def test_the_same_key_despite_where_the_compiler_lies(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for folder in ("here", "there"):
        compiler = tmp_path / folder / "g++"
        compiler.parent.mkdir()
        compiler.write_text("#!/bin/sh\necho 'g++ (Imaginary) 99.1'\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        key_module.compiler_version.cache_clear()
        try:
            keys.add(project.key())
        finally:
            key_module.compiler_version.cache_clear()
    assert len(keys) == 1


def test_the_same_key_despite_comments_in_the_model_s_code_and_its_docstrings(project: Project) -> None:
    before = project.key()
    project.write("keyed_helper.py", f'"""What helps."""\n# A comment.\n{HELPER}')
    assert project.key() == before
    project.write("keyed_helper.py", f"{HELPER}\nMORE = 1")
    assert project.key() != before


def test_the_same_key_despite_comments_and_the_order_of_keys(project: Project) -> None:
    one = """
    version: 1
    models:
      keyed:
        factory: keyed_model.py:Keyed   # the model
        kwargs: {width: 8}
        inputs: {x: {shape: [batch, 8], dtype: float32}}
        targets: [cpu:x86-64-v3]
        buckets: [{batch: 2}]
    """
    other = """
    # What we serve.
    version: 1
    defaults:
      targets: ["cpu:x86-64-v3"]
    models:
      keyed:
        buckets:
          - batch: 2
        inputs:
          x:
            dtype: float32
            shape: [batch, 8]
        kwargs: {"width": 8}
        factory: "keyed_model.py:Keyed"
    """
    assert project.key(one) == project.key(other)


def test_the_same_key_despite_other_buckets_targets_and_models_beside_it(project: Project) -> None:
    key = project.key()
    path = project.folder / "manifest.yaml"
    more = {**SPEC, "buckets": [{"batch": 1}, {"batch": 2}], "targets": ["cpu:x86-64-v4", "cpu:x86-64-v3"]}
    path.write_text(yaml.safe_dump({"version": 1, "models": {"another": SPEC, "keyed": more}}))
    assert [unit.key for unit in plan_units(read_manifest(path))].count(key) == 1


def test_a_file_is_parsed_once_for_all_models_that_share_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    digest = syntax.syntax_digest

    def noting(source: bytes) -> str:
        parsed.append(source)
        return digest(source)

    monkeypatch.setattr(syntax, "syntax_digest", noting)
    path = project.folder / "manifest.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": dict.fromkeys(["one", "two", "three"], SPEC)}))
    assert len(plan_units(read_manifest(path))) == 3
    files = [(project.folder / name).read_bytes() for name in ("keyed_helper.py", "keyed_model.py")]
    assert [parsed.count(file) for file in files] == [1, 1]


def test_the_same_key_despite_other_weights_that_stay_live(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = project.key()
    monkeypatch.setenv("KEYED_FILL", "2")
    assert project.key() == before


@pytest.mark.parametrize(
    "name",
    [
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_LOGS", "PWD", "LOGNAME"),
        *("TORCHINDUCTOR_WORKER_LOGPATH", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_DUMP_PTXAS_LOG"),
        *("TRITON_HOME", "TRITON_LIBCUDA_PATH"),
    ],
)
def test_the_same_key_despite_a_variable_that_does_not_change_code(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = project.key()
    monkeypatch.setenv(name, "/somewhere/else")
    assert project.key() == before


def test_the_same_key_despite_a_module_of_the_same_name_that_is_loaded_already(
    project: Project, tmp_path: Path
) -> None:
    """A file whose name is taken is loaded under a made-up one, which must not show."""
    before = project.factors()
    copied = Project(tmp_path / "copied")
    copied.write("keyed_model.py", MODEL)
    after = copied.factors()
    assert sys.modules["keyed_model"].__file__ == os.fspath(project.folder / "keyed_model.py")
    assert explain(before, after) == []


def test_the_same_key_despite_a_default_that_is_written_out(project: Project) -> None:
    assert project.key(mode="max-autotune", weights="live", autocast=None) == project.key()


# -- while a build runs -----------------------------------------------------------------------------------------------


class Reached(Exception):
    """The export stage was passed."""


def export(project: Project, sources: dict[str, str], edit: Callable[[], object] = lambda: None) -> None:
    """Run a unit's stages up to the compile, with an edit once the model is made; raises BuildError."""

    def stage(name: str) -> None:
        if name == "export":
            edit()
        if name == "compile":
            raise Reached

    spec = read_manifest(project.folder / "manifest.yaml").models["keyed"]
    unit = Unit(spec, spec.buckets[0], parse_target(spec.targets[0]), {"sources": sources}, "sha256:0")
    with pytest.raises(Reached):
        compile_unit(Job(unit, str(project.folder), ""), stage)


def test_a_file_that_changes_while_the_build_runs_is_named(project: Project) -> None:
    sources = project.factors()["sources"]
    export(project, sources)
    with pytest.raises(BuildError, match="the source of `keyed_helper` changed while the build ran") as caught:
        export(project, sources, lambda: project.write("keyed_helper.py", "SCALE = 3.0\n"))
    assert caught.value.hint == "build again"
    project.write("keyed_model.py", MODEL + "\nMORE = 1\n")
    with pytest.raises(BuildError, match="the source of `keyed_helper`, `keyed_model` changed"):
        export(project, sources)


def test_where_the_same_files_lie_elsewhere_nothing_has_changed(project: Project, tmp_path: Path) -> None:
    """As on the nodes of a cluster, where a package may be installed, or not be imported yet."""
    node = Project(tmp_path / "node")
    for each in (project, node):
        (each.folder / "dist-packages").mkdir()
        each.write("keyed_helper.py", "from keyed_installed import SCALE\n")
        each.write("dist-packages/keyed_installed.py", f"__version__ = '1.0'\nSCALE = {len(each.folder.name)}\n")
    sys.path.insert(0, str(project.folder / "dist-packages"))
    planned = {**project.factors()["sources"], "keyed_late": "sha256:0"}
    assert planned["keyed_installed"] == "keyed_installed 1.0"
    for name in [name for name in sys.modules if "keyed_" in name]:
        del sys.modules[name]
    sys.path.insert(0, str(node.folder / "dist-packages"))
    node.factors()
    assert Path(sys.modules["keyed_helper"].__file__ or "").is_relative_to(node.folder)
    export(node, {**planned, "keyed_installed": "sha256:0"})


@pytest.mark.parametrize("change", [{}, {"options": {"max_fusion_size": 8}}, {"inputs": PADDED}])
def test_a_process_finds_the_code_key_of_its_unit_in_its_job(project: Project, change: dict[str, Any]) -> None:
    unit = project.unit(**change)
    read = decode(msgspec.json.encode(Job(unit, str(project.folder), "")), Job).unit
    assert code_key(read.factors) == code_key(unit.factors)
    assert read == msgspec.structs.replace(unit, factors=read.factors)


# -- in words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"inputs": PADDED, "outputs": {"crop": ["batch"]}}, {"weights": "frozen"}])
def test_factors_that_come_back_from_a_store_explain_nothing(project: Project, change: dict[str, Any]) -> None:
    factors = project.factors(**change, **({"targets": ["native"]} if "weights" in change else {}))
    assert explain(json.loads(json.dumps(factors)), factors) == []


def test_every_change_is_explained_with_both_values() -> None:
    old = {"torch": "2.13.0", "target": "a", "sources": {"m": "sha256:1", "gone": "sha256:2"}, "retired": "x"}
    new = {"torch": "2.15.0", "target": "a", "sources": {"m": "sha256:3", "package": "package 1.0"}}
    assert [issue.message for issue in explain(old, new)] == [
        "torch 2.13.0 → 2.15.0",
        "source of gone sha256:2 → absent",
        "source of m changed",
        "source of package absent → package 1.0",
        "retired x → absent",
    ]
