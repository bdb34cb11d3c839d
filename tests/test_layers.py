"""The layers: which part may import which, what an import costs, and the names that aotc promises."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest
from processes import ROOT, run_python

import aotc

PACKAGE = ROOT / "aotc"
COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy")

RECORDS = {
    *{
        "aotc.advisories",
        "aotc.amounts",
        "aotc.errors",
        "aotc.digest",
        "aotc.garbage",
        "aotc.machine.locks",
        "aotc.records",
        "aotc.provenance",
        "aotc.tensors.formats",
        "aotc.tensors.strides",
        "aotc.verification",
    },
    *{"aotc.expressions", "msgspec"},
}
TENSORS = {"aotc.tensors", "aotc.tensors.strides", "torch"}
TARGETS = {"aotc.machine.targets", "aotc.machine.gpus"}
HOST = {
    *TARGETS,
    *(f"aotc.machine.{name}" for name in ("compatibility", "cpp_compiler", "elf", "forks", "hwcap", "this_host")),
}
MACHINE = {
    *RECORDS,
    *HOST,
    *TENSORS,
    *{"aotc.machine", "aotc.reads", "aotc.tensors.constants", "aotc.tensors.strided_views"},
    *{"filelock", "safetensors"},
}
MANIFEST = {*RECORDS, *TARGETS, "aotc.manifest", "yaml", "safetensors"}
MODELS = {*MACHINE, *MANIFEST, "aotc.models"}
STORE = {
    *RECORDS,
    "aotc.picks",
    "aotc.store",
    "zstandard",
    "requests",
    "urllib3",
    "cryptography",
    "nacl",
    "obstore",
    "huggingface_hub",
    "httpx2",
}
LOADING = {*RECORDS, *HOST, *STORE, "aotc.call_table", "aotc.checkpoints", "aotc.selection"}
"""What both loaders stand on: without torch."""
RUNTIME = {*MACHINE, *LOADING, "aotc.early", "aotc.runtime"}
COMPILING = {"sympy", "torchgen", "triton"}
MESSAGES = "aotc.compiler.messages"
VERDICTS = "aotc.verify.verdicts"
ADVISE, BENCH, BISECTION, CACHES, RECORDING, REMEMBERING = (
    f"aotc.tools.{name}" for name in ("advise", "bench", "bisection", "caches", "recording", "remembering")
)
BUILDING = f"{REMEMBERING}.building.build_process"
PAGE = "aotc.tools.html_page"
READING = {"elftools", "markupsafe", "pygments", "rich"}

MAY_IMPORT: dict[str, set[str]] = {
    "aotc.advisories": RECORDS,
    "aotc.amounts": {"aotc.errors"},
    "aotc.errors": {"msgspec"},
    "aotc.digest": {"msgspec"},
    "aotc.garbage": set(),
    "aotc.call_table": {*RECORDS, "aotc.call_table"},
    "aotc.checkpoints": {*RECORDS, "aotc.store", "aotc.checkpoints"},
    "aotc.core": set(),
    "aotc.early": set(),
    "aotc.machine.locks": set(),
    "aotc.log": set(),
    "aotc.expressions": RECORDS,
    "aotc.records": RECORDS,
    "aotc.tensors.formats": set(),
    "aotc.tensors.strides": set(),
    "aotc.selection": {*RECORDS, *TARGETS, "aotc.store"},
    "aotc.picks": RECORDS,
    "aotc.provenance": RECORDS,
    "aotc.shim": RECORDS,
    "aotc.torch_missing": {"aotc.errors", "aotc.store"},
    "aotc.verification": RECORDS,
    "aotc.tensors": TENSORS,
    "aotc.reads": MACHINE,
    "aotc.adapters": {*MACHINE, "aotc.adapters"},
    "aotc.tensors.constants": MACHINE,
    "aotc.tensors.strided_views": {*MACHINE, "aotc.call_table"},
    "aotc.machine": {*RECORDS, *HOST, "aotc.machine", "torch", "filelock"},
    "aotc.machine.compatibility": {*RECORDS, *HOST},
    "aotc.machine.cpp_compiler": set(),
    "aotc.machine.elf": set(),
    "aotc.machine.forks": set(),
    "aotc.machine.hwcap": set(),
    "aotc.machine.this_host": {"aotc.errors", "aotc.machine.hwcap"},
    "aotc.machine.targets": {"msgspec"},
    "aotc.machine.gpus": {*RECORDS, "aotc.machine.targets"},
    "aotc.manifest": MANIFEST,
    "aotc.models": MODELS,
    "aotc.store": STORE,
    "aotc.runtime": {*RUNTIME, "aotc.standalone"},
    "aotc.standalone": {*LOADING, "aotc.core", "aotc.shim", "aotc.standalone"},
    "aotc.optim": {"torch"},
    "aotc.compiler": {
        *{
            *MODELS,
            *STORE,
            *COMPILING,
            "aotc",
            "aotc.adapters",
            "aotc.picks",
            "aotc.shim",
            "aotc.standalone",
            "aotc.compiler",
            "ray",
        },
        MESSAGES,
    },
    MESSAGES: {*RECORDS, *TARGETS, "aotc.manifest", "aotc.picks", "aotc.store"},
    "aotc.compiler.smoke": {*MODELS, *RUNTIME, "aotc.picks", "aotc.compiler.smoke", MESSAGES},
    "aotc.pt2": RUNTIME,
    "aotc.testing": {*STORE, "pytest"},
    "aotc.telemetry": {*RUNTIME, "aotc", "aotc.telemetry", "prometheus_client", "opentelemetry"},
    "aotc.verify": {
        *MODELS,
        *RUNTIME,
        "aotc",
        "aotc.optim",
        "aotc.picks",
        "aotc.standalone",
        "aotc.verify",
        VERDICTS,
    },
    VERDICTS: RECORDS,
    "aotc.tools": set(),
    PAGE: {"aotc.amounts", "jinja2", "markupsafe"},
    RECORDING: {*MODELS, "aotc.adapters", RECORDING},
    REMEMBERING: {*MODELS, *RUNTIME, "aotc", "aotc.adapters", "aotc.log", RECORDING, REMEMBERING, BUILDING},
    BUILDING: {
        *RECORDS,
        MESSAGES,
        *HOST,
        "aotc.machine",
        "aotc.manifest",
        "aotc.models",
        "aotc.store",
        "aotc.compiler",
        RECORDING,
        REMEMBERING,
    },
    ADVISE: {*RECORDS, "numpy", "PIL", "aotc.manifest", ADVISE, PAGE},
    CACHES: {*RUNTIME, CACHES, "aotc_watching"},  # which lies in the folder that is put on PYTHONPATH
    "aotc.integrations": {*RUNTIME, CACHES, "aotc.compiler", "aotc.integrations", "vllm"},
    BENCH: {*MODELS, *RUNTIME, "aotc", "aotc.verify", ADVISE, BENCH, PAGE, "onnxruntime", "openvino"},
    "aotc.tools.gate": {*MODELS, *RUNTIME, "aotc.verify", VERDICTS, ADVISE, BENCH, "aotc.tools.gate"},
    BISECTION: {*MODELS, *RUNTIME, "aotc.compiler", MESSAGES, "aotc.verify", VERDICTS, BISECTION},
    "aotc.tools.audit": {*STORE, "aotc.tools.audit"},
    "aotc.tools.doctor": {*MODELS, *RUNTIME, "aotc", "aotc.compiler", "aotc.standalone", CACHES, "aotc.tools.doctor"},
    "aotc.tools.inspection": {*STORE, *READING, "aotc.picks", "aotc.tools.inspection", PAGE, VERDICTS},
}
"""For each part of aotc: the parts and the packages that it may import beside the standard library."""

SERVED = ("aotc.runtime", "aotc.standalone", "aotc.store", "aotc.telemetry")

TOP = {"aotc", "aotc.cli", "aotc.__main__"}
"""The parts that may import anything, lazily."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, also within functions; `from aotc import x` counts as `aotc.x`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            parts = [f"aotc.{alias.name}" for alias in node.names]
            found += parts if node.module == "aotc" else [str(node.module)]
    return tuple(found)


def part_of(name: str) -> str:
    """The row of the table: `aotc.store` for `aotc.store.layout.blobs`, `torch` for `torch.utils`."""
    pieces = name.split(".")
    if pieces[0] != "aotc":
        return pieces[0]
    rows = (".".join(pieces[:count]) for count in range(len(pieces), 2, -1))
    return next((row for row in rows if row in MAY_IMPORT), ".".join(pieces[:2]))


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_part_of_aotc_has_a_row() -> None:
    assert {part_of(name) for name in MODULES} == MAY_IMPORT.keys() | TOP


def wrong(modules: Iterable[str], look: Callable[[Path], Collection[str]]) -> dict[str, Collection[str]]:
    """The modules in whose file `look` finds something, each with that."""
    return {name: found for name in modules if (found := look(MODULES[name]))}


def test_a_module_imports_only_what_its_layer_may() -> None:
    for part, may in MAY_IMPORT.items():
        known = may | sys.stdlib_module_names
        modules = [name for name in MODULES if part_of(name) == part]
        assert not wrong(modules, lambda path, known=known: {*map(part_of, imports(path))} - known), part


COMPILER = (
    "scoped",
    "messages",
    "toolchain",
    "explain_failure",
    *("capture.lifting.mutations", "capture.ranges.range_solver"),  # which the patches use
    "patches",
    "autotune",
    "capture",
    "cross_compile",
    "codegen",
    "training",
    "wrong_code",
    *("planning.key", "planning.model_sources", "planning.plan"),
    *("planning.cache_lookup", "planning.estimate", "build_report"),
    *("publish", "rank_kinds", "unit"),
    "smoke",
    "workers",
    *("executors", "planning", "request"),
    *("pipeline", "rebuild_check", "mistakes"),
    "value_trials",
    "fix_buckets",
)
"""The parts of the compiler, the lowest first: each imports those before it and none behind it."""


def test_the_parts_of_the_compiler_import_only_what_lies_below() -> None:
    def floor(name: str) -> int:
        inside = f"{name.removeprefix('aotc.compiler.')}."
        return COMPILER.index(max((part for part in COMPILER if inside.startswith(f"{part}.")), key=len))

    def above(own: str) -> list[str]:
        inside = [name for name in imports(MODULES[own]) if name.startswith("aotc.compiler.")]
        return [name for name in inside if floor(name) > floor(own)]

    modules = [name for name in MODULES if name.startswith("aotc.compiler.")]
    assert {name: found for name in modules if (found := above(name))} == {}
    assert {floor(name) for name in modules} == {*range(len(COMPILER))}


def test_nothing_that_a_service_runs_imports_a_compiler() -> None:
    served = [name for name in MODULES if part_of(name) in SERVED]
    assert not wrong(served, lambda path: [x for x in imports(path) if x.startswith((*COMPILERS, "aotc.compiler"))])


def test_the_modules_of_the_store_import_one_another_in_one_direction() -> None:
    """Also within functions. A circle raises CycleError."""
    within = {name: path for name, path in MODULES.items() if name.startswith("aotc.store.")}
    graphlib.TopologicalSorter({name: {*imports(path)} & {*within} for name, path in within.items()}).prepare()


def test_a_patch_is_imported_by_nothing_but_the_registry() -> None:
    """So that a patch is dropped by removing its file. What else needs a part of it takes that from `shared`."""
    room = "aotc.compiler.patches"
    patches = {name for name, path in MODULES.items() if path.parent == PACKAGE / "compiler" / "patches"}
    assert len(patches) > 50
    found = wrong(MODULES, lambda path: [name for name in imports(path) if name in patches])
    assert found == {f"{room}.machinery.registry": [room]}


def test_torch_is_changed_by_patches_and_for_the_time_of_a_step_alone() -> None:
    """A build replaces what torch has by `aotc.compiler.scoped`, which puts it back, or in a patch; and nothing else of
    aotc does. The plug-in of vLLM replaces functions of vLLM."""
    replacing = wrong(MODULES, lambda path: {*imports(path)} & {"unittest", "unittest.mock"})
    others = ("aotc.compiler.patches.", "aotc.integrations.vllm.")
    assert [name for name in replacing if not name.startswith(others)] == ["aotc.compiler.scoped"]
    found = wrong([name for name in MODULES if not name.startswith(others)], assigned_to_imported)
    assert {name for names in found.values() for name in names} == {
        "dist.all_to_all_single",  # `aotc.models.fake_ranks`: of the fake ranks of a build, in its own processes
        "nn.Module.__call__",  # `aotc.tools.recording.record`: while a model's calls are recorded
    }


def assigned_to_imported(path: Path) -> set[str]:
    """Attributes of what a file imports to which it assigns; not settings (`config.…`, the environment)."""
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(alias.asname or alias.name).partition(".")[0] for node in found for alias in node.names}
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    texts = {ast.unparse(node) for node in stores} - {"os.environ"}
    return {text for text in texts if text.split(".")[0] in names and "(" not in text and "config." not in text}


def test_only_commands_and_plug_ins_import_tools() -> None:
    """And `aotc` itself, lazily, for `aotc.record` and `aotc.compile`."""
    above = ("aotc.tools", "aotc.cli", "aotc.integrations")
    core = [name for name in MODULES if not name.startswith(above) and name != "aotc"]
    assert not wrong(core, lambda path: [name for name in imports(path) if name.startswith("aotc.tools")])


def test_nothing_imports_a_plug_in() -> None:
    others = [name for name in MODULES if part_of(name) != "aotc.integrations"]
    assert not wrong(others, lambda path: [name for name in imports(path) if name.startswith("aotc.integrations")])


def test_what_the_loader_stands_on_imports_no_compiler() -> None:
    below = [name for name in MODULES if part_of(name) in MAY_IMPORT["aotc.runtime"]]
    assert not [other for name in below for other in imports(MODULES[name]) if other.startswith(COMPILERS)]


def test_the_command_line_imports_the_rest_only_when_a_command_needs_it() -> None:
    def at_import(path: Path) -> set[str]:
        found = {str(node.module) for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)}
        ours = {part_of(other) for other in found if other.startswith("aotc")}
        return ours - {"aotc.amounts", "aotc.errors", "aotc.cli"}

    assert not wrong([name for name in MODULES if part_of(name) == "aotc.cli"], at_import)


def test_only_the_command_line_prints() -> None:
    """Workers write messages to the process that started them; nobody else prints."""

    def prints(path: Path) -> set[str]:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = {call.id for call in calls if isinstance(call, ast.Name)} & {"print"}
        called = {call.attr for call in calls if isinstance(call, ast.Attribute)} & {"echo"}
        return named | called | {*map(part_of, imports(path))} & {"click"}

    assert not wrong([name for name in MODULES if part_of(name) != "aotc.cli"], prints)


@functools.cache
def imported_by(statement: str) -> set[str]:
    return set(run_python(f"import sys\n{statement}\nprint(*sys.modules)").split())


@pytest.mark.parametrize("name", ["aotc", "aotc.early"])
def test_importing_aotc_imports_no_torch(name: str) -> None:
    assert not {"torch", "yaml", "rich", "click", "zstandard"} & imported_by(f"import {name}")


def test_the_standalone_loader_imports_neither_torch_nor_the_other_loader() -> None:
    names = imported_by("import aotc.standalone, aotc.standalone.loading, aotc.store.signing.trust")
    with_torch = ("torch", "numpy", "aotc.runtime", "aotc.tensors.")
    assert not {
        name for name in names - {"aotc.tensors.formats", "aotc.tensors.strides"} if name.startswith(with_torch)
    }


def test_advice_imports_neither_torch_nor_yaml() -> None:
    assert not {"torch", "yaml", "jinja2"} & imported_by("import aotc.tools.advise")


def test_the_store_imports_neither_torch_nor_yaml() -> None:
    assert not {"torch", "yaml"} & imported_by(
        "import aotc.store.opening, aotc.store.layout.units, aotc.store.layout.publishing"
    )


@pytest.mark.parametrize("command", ["ls --help", "schema"])
def test_commands_that_need_neither_torch_nor_rich_do_not_import_them(command: str) -> None:
    run = f"from aotc.cli import main\ntry: main({command.split()!r})\nexcept SystemExit: pass"
    assert not {"torch", "rich"} & imported_by(run)


def test_the_loader_imports_no_compiler_and_no_manifest() -> None:
    names = imported_by("import aotc; aotc.load")
    banned = (
        *COMPILERS,
        "aotc.compiler",
        "aotc.telemetry",
        "aotc.manifest",
        "aotc.verify",
        "aotc.cli",
        "yaml",
        "rich",
    )
    assert not [name for name in names if any(name == other or name.startswith(f"{other}.") for other in banned)]


def test_importing_the_loader_costs_milliseconds_beyond_torch() -> None:
    """The limit leaves room for a busy machine; a compiler's import takes ten times as long."""
    times = run_python(
        "import time, torch\nbegan = time.process_time(); import aotc; aotc.load; print(time.process_time() - began)"
    )
    assert float(times) < 0.4


def test_the_public_surface() -> None:
    assert aotc.__all__ == [
        "AdvisoryError",
        "AotcError",
        "BindError",
        "BuildError",
        "Compiled",
        "CorruptError",
        "EnvironmentMismatchError",
        "ForkError",
        "GradientError",
        "Graphs",
        "GroupError",
        "Issue",
        "LibraryError",
        "ManifestError",
        "MemoryLimitError",
        "MissError",
        "NotFoundError",
        "OperatorError",
        "Ranks",
        "ReferenceFormatError",
        "RemoteError",
        "SchemaVersionError",
        "SignatureError",
        "StoreError",
        "TorchMissingError",
        "TraceError",
        "TrainingStep",
        "Trust",
        "UnverifiedError",
        "VerifyError",
        "__version__",
        "adapters",
        "attach",
        "compile",
        "fetch",
        "load",
        "optim",
        "prepare",
        "record",
        "telemetry",
    ]
    assert dir(aotc) == aotc.__all__
    assert all(hasattr(aotc, name) for name in aotc.__all__)


def test_every_error_is_one_of_aotc_s() -> None:
    errors = [getattr(aotc, name) for name in aotc.__all__ if name.endswith("Error")]
    assert all(issubclass(error, aotc.AotcError) for error in errors)


ROOMS = (
    *(
        ".",
        "autotune",
        "codegen",
        "planning",
        "patches/machinery",
        "patches/shared",
        "publish",
        "smoke",
        "toolchain",
        "training",
    ),
    *("workers", "wrong_code"),
    *("capture", "capture/analysis", "capture/checks", "capture/lifting", "capture/ranges", "capture/regions"),
)


@pytest.mark.parametrize(
    "room",
    [
        *(PACKAGE / name for name in ("models", "telemetry", "runtime/conversions", "tools", "integrations/vllm")),
        *(PACKAGE / "tools" / name for name in ("caches", "recording", "remembering")),
        *(PACKAGE / "compiler" / name for name in ROOMS),
    ],
    ids=lambda room: room.name,
)
def test_a_room_tells_a_reader_of_each_of_its_modules(room: Path) -> None:
    told = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    modules = {path.stem for path in room.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {module for module in modules - {"__init__"} if f"`{module}" not in told} == set()
