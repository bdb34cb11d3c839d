"""The module at load must be the one that was captured: its class, its source, its attributes, its flag."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from bound_files import bind_files
from hand_built import CPU, FakeLibrary, make_artifact, tensor
from torch import nn

from aotc.digest import canonical_json, sha256_json
from aotc.errors import BindError, CorruptError, Issue, LibraryError
from aotc.reads.attributes import module_attributes, training_differs
from aotc.reads.module_check import ModuleCheck, check_module
from aotc.reads.sources import is_installed, source_digests
from aotc.reads.syntax import syntax_digest
from aotc.records import Artifact, File, ModuleGuard
from aotc.runtime.libraries.library_folder import FilesInFolder
from aotc.runtime.load import bind_artifact

SOURCE = """
from torch import nn

class Model(nn.Module):
    def __init__(self, heads=4, scale=1.0, **extra):
        super().__init__()
        self.heads, self.scale = heads, scale
        self.inner = nn.Dropout(0.1)
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x):
        return x
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of Python code that a test may change and import anew."""
    (tmp_path / "models_under_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("models_under_test")
    del sys.modules["models_under_test"]


def built_from(module: nn.Module, with_file: bool = True) -> tuple[Artifact, Any]:
    """An artifact of this module, and the function that reads the file of its attributes."""
    attributes = module_attributes(module)
    file = File("attributes.json", sha256_json(attributes), 1, "", 0) if with_file else None
    guard = ModuleGuard(
        type(module).__qualname__,
        module.training,
        source_digests(module),
        sha256_json(attributes),
        file,
        training_differs=training_differs(module),
    )
    return make_artifact([tensor("x", 1)], module=guard), lambda file: canonical_json(attributes)


def found(built: nn.Module, here: nn.Module, ignore: tuple[Any, ...] = (), with_file: bool = True) -> list[Issue]:
    artifact, read = built_from(built, with_file)
    try:
        check_module(artifact, here, ignore, read)
    except BindError as error:
        return list(error.issues)
    return []


def test_a_module_that_is_made_the_same_way_is_accepted(models: Any) -> None:
    assert found(models.Model().eval(), models.Model().eval()) == []


def test_another_class(models: Any) -> None:
    issues = found(models.Model().eval(), nn.Identity().eval(), ("attributes", "source"))
    assert [(issue.expected, issue.actual) for issue in issues] == [("Model", "Identity")]


def test_another_training_flag_of_any_submodule(models: Any) -> None:
    built, here = models.Model().eval(), models.Model().eval()
    here.inner.train()
    (issue,) = found(built, here)
    assert (issue.expected, issue.actual) == ("False", "True")
    assert "`inner`" in issue.message


@pytest.mark.parametrize("training", [True, False])
def test_a_submodule_that_was_built_in_the_other_mode(models: Any, training: bool) -> None:
    """As a frozen batch norm of a model that is trained is."""
    built, here = models.Model().train(training), models.Model().train(training)
    built.inner.train(not training)
    (issue,) = found(built, here)
    assert (issue.expected, issue.actual) == (str(not training), str(training))
    assert "in 1 of its modules, first `inner`" in issue.message
    assert issue.hint == f"call module.get_submodule('inner').{'eval' if training else 'train'}() before the load"
    here.inner.train(not training)
    assert found(built, here) == []
    (issue,) = found(built, here.train(not training))
    assert issue.hint == f"call module.{'train' if training else 'eval'}() before the load"


@pytest.mark.parametrize(
    ("built", "here"),
    [
        ({"heads": 4}, {"heads": 8}),
        ({"scale": 1.0}, {"scale": 0.5}),
        ({"flag": True}, {"flag": False}),
        ({"flag": True}, {"flag": 1}),
        ({"scale": 1}, {"scale": 1.0}),
        ({"scale": float("inf")}, {"scale": float("nan")}),
        ({"name": "relu"}, {"name": "gelu"}),
        ({"sizes": [1, 2]}, {"sizes": [1, 3]}),
        ({"config": {"eps": 1e-5}}, {"config": {"eps": 1e-6}}),
        ({"kind": torch.float32}, {"kind": torch.float16}),
        ({"act": torch.relu}, {"act": torch.tanh}),
        ({"act": nn.functional.gelu}, {"act": nn.functional.silu}),
        ({"act": functools.partial(torch.clamp, min=0.0)}, {"act": functools.partial(torch.clamp, min=1.0)}),
        ({"norm": nn.LayerNorm}, {"norm": nn.Identity}),
        ({"options": SimpleNamespace(eps=1e-5)}, {"options": SimpleNamespace(eps=1e-6)}),
        ({"extra": None}, {}),
    ],
)
def test_a_python_attribute_of_another_value_or_type_with_both_values(models: Any, built: Any, here: Any) -> None:
    (issue,) = found(models.Model(**built).eval(), models.Model(**here).eval())
    assert issue.where.partition(".")[0] == next(iter(built))
    assert issue.expected != issue.actual
    assert "rebuild" in issue.hint


def test_what_forward_sets_before_it_reads_it_and_what_calls_leave_behind_is_not_compared(models: Any) -> None:
    artifact, read = built_from(models.Model(weight=None, mask=None, scale="auto").eval())
    (variant,) = artifact.variants
    set_by_both = {"assigned": ("weight", "inner.p"), "left": {"mask": sha256_json([1, 0]), "scale": sha256_json(2.0)}}
    variants = [msgspec.structs.replace(variant, **set_by_both) for _ in range(2)]
    here = models.Model(weight=5, mask=[1, 0], scale=2.0).eval()
    here.inner.p = 0.5
    check_module(msgspec.structs.replace(artifact, variants=tuple(variants)), here, (), read)

    def refused(*variants: Any) -> set[str]:
        with pytest.raises(BindError) as caught:
            check_module(msgspec.structs.replace(artifact, variants=variants), here, (), read)
        return {issue.where for issue in caught.value.issues}

    assert refused(variants[0], variant) == {"weight", "inner.p"}, "another variant's code may read them"
    here.mask, here.scale = [1, 1], "other"
    assert refused(*variants) == {"mask", "scale"}


def test_parameters_and_modules_in_a_list_may_be_live_and_hold_one_another(models: Any) -> None:
    def made(value: float) -> nn.Module:
        module = models.Model().eval()
        module.weight = nn.Parameter(torch.full((2,), value))
        module.weights, module.inner.parent = [module.weight], [module]
        return module  # type: ignore[no-any-return]

    assert found(made(1.0), made(2.0)) == []


def test_an_attribute_of_a_submodule_is_named_by_its_path(models: Any) -> None:
    here = models.Model().eval()
    here.inner.p = 0.5
    (issue,) = found(models.Model().eval(), here)
    assert (issue.where, issue.expected, issue.actual) == ("inner.p", "0.1", "0.5")


def test_a_submodule_whose_forward_was_replaced(models: Any) -> None:
    here = models.Model().eval()
    here.inner.forward = MethodType(lambda self, x: 100 * x, here.inner)
    (issue,) = found(models.Model().eval(), here)
    assert issue.where == "inner.forward"
    assert issue.expected == "absent" and "test_module_checks" in issue.actual
    assert found(here, here) == []


def test_of_a_configuration_the_member_is_named(models: Any) -> None:
    built, here = (
        {"sizes": list(range(50)), "eps": eps, "inner": {"act": act}} for eps, act in ((1.0, "a"), (2.0, "b"))
    )
    issues = found(models.Model(config=built).eval(), models.Model(config=here).eval())
    assert [(issue.where, issue.expected, issue.actual) for issue in issues] == [
        ("config.eps", "1.0", "2.0"),
        ("config.inner.act", "'a'", "'b'"),
    ]


def test_a_difference_far_behind_in_a_long_value_is_one(models: Any) -> None:
    built, here = ([*range(50), last] for last in (0, 1))
    (issue,) = found(models.Model(sizes=built).eval(), models.Model(sizes=here).eval())
    assert issue.where == "sizes"


# -- where the weights came from --------------------------------------------------------------------------------------


def of_library(models: Any, **origins: Any) -> nn.Module:
    """A module of a class of transformers', with its configuration."""
    module: nn.Module = type("Library", (models.Model,), {"__module__": "transformers.library"})().eval()
    config = type(
        "Config", (), {"__module__": "transformers.library", "__annotations__": {"dtype": Any}, "dtype": None}
    )
    module.config = dataclasses.dataclass(config)(origins.pop("dtype", None))  # type: ignore[operator]
    module.config.use_cache = origins.pop("use_cache", True)
    for name, value in origins.items():
        setattr(module, name, value)
    return module


def origin_issues(models: Any, read: tuple[str, ...], **origins: Any) -> list[str]:
    artifact, read_file = built_from(of_library(models))
    variants = [msgspec.structs.replace(variant, origins=read) for variant in artifact.variants]
    try:
        check_module(
            msgspec.structs.replace(artifact, variants=tuple(variants)), of_library(models, **origins), (), read_file
        )
    except BindError as error:
        return [issue.where for issue in error.issues]
    return []


def test_where_the_weights_came_from_matters_only_where_the_capture_read_it(models: Any) -> None:
    here = {"dtype": "float32", "name_or_path": "a/path"}
    assert origin_issues(models, (), **here) == []
    assert origin_issues(models, ("dtype",), **here) == ["origin config.dtype"]
    assert origin_issues(models, ("dtype", "name_or_path"), **here) == ["origin config.dtype", "origin name_or_path"]
    assert origin_issues(models, (), **here, heads=8) == ["heads"]


def test_whether_a_configuration_asks_for_a_cache_matters_only_where_the_capture_read_it(models: Any) -> None:
    assert origin_issues(models, (), use_cache=False) == []
    (issue,) = origin_issues(models, ("use_cache",), use_cache=False)
    assert issue == "origin config.use_cache"


def test_attributes_that_differ_are_refused_also_where_the_record_does_not_say_which(models: Any) -> None:
    (issue,) = found(models.Model(heads=4).eval(), models.Model(heads=8).eval(), with_file=False)
    assert "attributes" in issue.message


def test_a_changed_source_file(models: Any, tmp_path: Path) -> None:
    artifact, read = built_from(models.Model().eval())
    (tmp_path / "models_under_test.py").write_text(SOURCE.replace("return x", "return x + 1"))
    with pytest.raises(BindError, match="source of class Model changed") as caught:
        check_module(artifact, models.Model().eval(), (), read)
    assert caught.value.hint == 'where the difference cannot matter: aotc.load(…, ignore=["source"])'


def test_a_class_of_a_python_module_that_cannot_be_found_is_told(models: Any, tmp_path: Path) -> None:
    """As a program has it that executes a file by itself: the class is there, and its source is not known."""
    artifact, read = built_from(models.Model().eval())
    spec: Any = importlib.util.spec_from_file_location("elsewhere", tmp_path / "models_under_test.py")
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    with pytest.raises(BindError, match="class Model is of a Python module `elsewhere` whose source file is not") as no:
        check_module(artifact, other.Model().eval(), (), read)
    assert any("sys.modules" in issue.hint for issue in no.value.issues)


@pytest.mark.parametrize("known", [True, False], ids=["built from these bytes", "from others"])
def test_code_whose_comments_layout_and_docstrings_changed_is_the_same(
    models: Any, tmp_path: Path, known: bool
) -> None:
    trees: dict[str, str] = {}
    module = models.Model().eval()
    artifact, read = built_from(module)
    source_digests(module, trees)
    guard = msgspec.structs.replace(artifact.module, trees=trees if known else {})
    artifact = msgspec.structs.replace(artifact, module=guard)
    text = SOURCE.replace("        return x", '        """The input."""\n        return (x)  # as it is')
    (tmp_path / "models_under_test.py").write_text(text)
    check_module(artifact, models.Model().eval(), (), read)
    (tmp_path / "models_under_test.py").write_text(text.replace("(x)", "(x, x)"))
    with pytest.raises(BindError, match="source of class Model changed"):
        check_module(artifact, models.Model().eval(), (), read)


def _tree_of(file: Path) -> str:
    return syntax_digest(file.read_bytes())


class Helped:
    """A class whose file imports another one, with the artifact that was built of it."""

    def __init__(self, folder: Path, models: Any) -> None:
        self.file = folder / "helper_under_test.py"
        self.file.write_text("SCALE = 2.0\n")
        self.helper = importlib.import_module("helper_under_test")
        self.module = models.Model().eval()
        artifact, self.read = built_from(self.module)
        imports = {name: _tree_of(folder / f"{name}.py") for name in ("helper_under_test", "models_under_test")}
        guard = msgspec.structs.replace(artifact.module, imports=imports)
        self.artifact = msgspec.structs.replace(artifact, module=guard)

    def issues(self, *ignore: ModuleCheck) -> list[Issue]:
        try:
            check_module(self.artifact, self.module, ignore, self.read)
        except BindError as error:
            return list(error.issues)
        return []


@pytest.fixture
def helped(models: Any, tmp_path: Path) -> Iterator[Helped]:
    yield Helped(tmp_path, models)
    sys.modules.pop("helper_under_test", None)


def test_a_changed_file_that_the_class_s_file_imports(helped: Helped) -> None:
    assert helped.issues() == []
    helped.file.write_text("SCALE = 3.0\n")
    (issue,) = helped.issues()
    assert "`helper_under_test`" in issue.message
    assert (issue.expected, issue.actual) == (
        helped.artifact.module.imports["helper_under_test"],
        _tree_of(helped.file),
    )
    assert issue.hint == "rebuild the model"
    assert helped.issues("source") == []


def test_a_changed_file_that_would_be_imported_later(helped: Helped) -> None:
    """By the forward that compiled code replaces, so it never is."""
    del sys.modules["helper_under_test"]
    assert helped.issues() == []
    helped.file.write_text("SCALE = 3.0\n")
    assert len(helped.issues()) == 1 and "helper_under_test" not in sys.modules
    helped.file.unlink()
    assert helped.issues() == []


def test_a_class_of_torch_s_or_of_a_package_s_by_the_same_name_changes_nothing(helped: Helped) -> None:
    """The class's own file is what says whether the other names mean what they meant."""
    torchs = type("Model", (nn.Identity,), {"__module__": "torch.nn.modules.linear"})
    helped.module.inner = torchs().eval()
    helped.file.write_text("SCALE = 3.0\n")
    issues = [issue for issue in helped.issues("attributes") if "helper_under_test" in issue.message]
    assert len(issues) == 1


def test_where_the_class_goes_by_another_name_other_names_mean_nothing(helped: Helped, tmp_path: Path) -> None:
    helped.file.write_text("nothing = of_ours = None\n")
    (tmp_path / "renamed_under_test.py").write_text(SOURCE)
    helped.module = importlib.import_module("renamed_under_test").Model().eval()
    assert helped.issues() == []


def test_files_that_were_built_from_their_folder_may_be_installed_here(
    helped: Helped, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for made in (models, helped.helper):
        file = installed / Path(made.__file__).name
        file.write_bytes(Path(made.__file__).read_bytes())
        monkeypatch.setattr(made, "__file__", str(file))
        monkeypatch.setattr(made, "__version__", "1.0", raising=False)
    assert source_digests(helped.module) == {"Model": "models_under_test 1.0"}
    assert helped.issues() == []
    (installed / "models_under_test.py").write_text(SOURCE + "changed = 1")
    (installed / "helper_under_test.py").write_text("SCALE = 3.0\n")
    assert [issue.message.partition(" changed")[0] for issue in helped.issues()] == [
        "the source of class Model",
        "the source of `helper_under_test`, which the module's code imports,",
    ]


def test_what_pip_install_target_put_into_a_folder_is_installed(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a build digests every file of the library, as does each load."""
    folder = tmp_path / "dependencies"
    (folder / "library-1.0.dist-info").mkdir(parents=True)
    (folder / "library-1.0.dist-info" / "RECORD").write_text("models_under_test.py,sha256=abc,12\n../bin/library,,\n")
    monkeypatch.syspath_prepend(folder)
    file = folder / "models_under_test.py"
    file.write_bytes(Path(models.__file__).read_bytes())
    monkeypatch.setattr(models, "__file__", str(file))
    monkeypatch.setattr(models, "__version__", "1.0", raising=False)
    assert source_digests(models.Model()) == {"Model": "models_under_test 1.0"}
    assert not is_installed(folder / "own.py")


def test_a_class_that_the_build_did_not_see(models: Any) -> None:
    class Other(nn.Module):
        pass

    built, here = models.Model().eval(), models.Model().eval()
    here.inner = Other().eval()
    issues = found(built, here, ("attributes",))
    assert any("Other" in issue.message for issue in issues)


def test_everything_at_once(models: Any) -> None:
    here = models.Model(scale=0.5)
    training, scale = found(models.Model().eval(), here)
    assert "training=False" in training.message and scale.where == "scale"


def test_of_another_class_nothing_else_is_told(models: Any) -> None:
    class Else(nn.Module):
        pass

    (issue,) = found(models.Model().eval(), Else())
    assert (issue.expected, issue.actual) == ("Model", Else.__qualname__)


@pytest.mark.parametrize("check", ["class", "training", "source", "attributes"])
def test_each_check_can_be_left_out_and_only_that_one(models: Any, tmp_path: Path, check: Any) -> None:
    artifact, read = built_from(models.Model().eval())
    breaks = {
        "class": lambda m: setattr(type(m), "__qualname__", "Renamed"),
        "training": lambda m: m.train(),
        "source": lambda m: (tmp_path / "models_under_test.py").write_text(SOURCE + "changed = 1"),
        "attributes": lambda m: setattr(m, "heads", 9),
    }
    here = models.Model().eval()
    breaks[check](here)
    ignore = (check, "source", "attributes") if check == "class" else (check,)
    with pytest.raises(BindError):
        check_module(artifact, here, tuple(set(breaks) - set(ignore)), read)
    check_module(artifact, here, ignore, read)


# -- bind_artifact -----------------------------------------------------------------------------------------------------


def read_nothing(file: File) -> bytes:
    raise AssertionError("no file is read")


def test_an_artifact_without_variants_is_an_error_at_load_and_nothing_runs_eager_in_silence() -> None:
    with pytest.raises(CorruptError, match="holds no variant"):
        bind_files(
            make_artifact([tensor("x", 1)], []),
            lambda variant: FilesInFolder(Path("nowhere"), variant.library),
            nn.Identity().eval(),
            CPU,
            on_miss="eager",
            read_file=read_nothing,
        )


def test_the_module_is_checked_before_any_library_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_fake(files: FilesInFolder, device: torch.device, concurrency: int) -> FakeLibrary:
        opened.append(files.library)
        return FakeLibrary(lambda x: x)

    monkeypatch.setitem(bind_artifact.__globals__, "open_library", open_fake)
    module = nn.Identity().eval()
    artifact, read = built_from(module)
    compiled = bind_files(
        artifact, lambda variant: FilesInFolder(Path("folder"), variant.library), module, CPU, read_file=read
    )
    assert opened == ["library.so"]
    x = torch.ones(1)
    assert compiled(x) is x
    with pytest.raises(BindError):
        bind_files(
            artifact,
            lambda variant: FilesInFolder(Path("folder"), variant.library),
            nn.ReLU().eval(),
            CPU,
            read_file=read,
        )
    assert len(opened) == 1


def test_a_library_that_cannot_be_opened_is_a_library_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"no library")
    with pytest.raises(LibraryError, match=r"library\.so cannot be opened") as caught:
        bind_files(
            make_artifact([tensor("x", 1)]),
            lambda variant: FilesInFolder(tmp_path, variant.library),
            None,
            CPU,
            read_file=read_nothing,
        )
    assert caught.value.hint


def test_of_another_class_the_child_of_the_built_one_is_named_and_nothing_is_offered_to_ignore(models: Any) -> None:
    artifact, read = built_from(models.Model().eval())
    parent = nn.ModuleDict({"classifier": models.Model()}).eval()
    for module, hint in ((parent, "child `classifier`, a Model"), (nn.Linear(2, 2).eval(), "pass a Model")):
        with pytest.raises(BindError) as caught:
            check_module(artifact, module, (), read)
        (issue,) = caught.value.issues
        assert hint in issue.hint and caught.value.hint == ""
