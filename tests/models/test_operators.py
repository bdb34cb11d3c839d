"""Operators of the user's own: built, verified, named in the record, and asked for at load."""

from __future__ import annotations

import importlib
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
from built_models import OPERATORS, Built
from processes import run_aotc, run_python

from aotc.compiler.capture.analysis.custom_operators import Registrations
from aotc.errors import CorruptError
from aotc.records import Artifact, OperatorNeed
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.check_record import check_record
from aotc.store.opening import open_readable
from aotc.store.reference import parse_reference

# A module with the model's tensors and none of its code: nothing here registers an operator.
BARE = """
    import os, sys
    sys.path.insert(0, sys.argv[2])
    import torch, aotc

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

    def load(**more):
        torch.manual_seed(0)
        return aotc.load("uses", Bare().eval(), store=sys.argv[1], ignore=["class", "source", "attributes"], **more)

    def compilers():
        return sorted({"torch._dynamo", "torch._inductor", "triton", "sympy"} & sys.modules.keys())
"""


def in_process(code: str, built: Built) -> str:
    """What the code prints in a fresh process that can import the operators' modules, and has not."""
    return run_python(dedent(BARE) + dedent(code), built.store, OPERATORS, **built.variables)


def artifact_of(built: Built) -> Artifact:
    store = open_readable(str(built.store))
    (entry,) = read_bundle(store, parse_reference("uses")).artifacts
    return read_artifact(store, entry.digest)


def test_the_record_names_each_operator_and_who_registers_it(operators: Built) -> None:
    (variant,) = artifact_of(operators).variants
    assert set(variant.operators) == {
        OperatorNeed("acme::fill", "acme_python"),
        OperatorNeed("acme::scale", "acme_python"),
        OperatorNeed("acme_cpp::twice", "acme_cpp", "libacme_ops.so"),
        OperatorNeed("acme_low::add_one", "acme_python"),
    }


def test_an_extension_module_owns_the_operators_that_it_registers_whatever_others_contain(
    operators: Built, tmp_path: Path
) -> None:
    """Its own code is left out: the library registers as it is loaded. Another one has the names among its bytes."""
    shutil.copy(operators.variables["ACME_OPS"], tmp_path / f"acme_extension{EXTENSION_SUFFIXES[0]}")
    (tmp_path / "names.so").write_bytes(b"acme_cpp twice")
    code = """
        import ctypes, sys
        from importlib.machinery import ExtensionFileLoader
        from types import ModuleType
        from aotc.compiler.capture.analysis.custom_operators import Registrations

        def create_module(loader, spec):
            ctypes.CDLL(loader.path)
            return ModuleType(spec.name)

        ExtensionFileLoader.create_module = create_module
        ExtensionFileLoader.exec_module = lambda *_: None
        sys.modules["names"] = ModuleType("names")
        sys.modules["names"].__file__ = sys.argv[1] + "/names.so"
        sys.path.insert(0, sys.argv[1])
        registrations = Registrations()
        with registrations.watched():
            import acme_extension
        print(registrations._need("acme_cpp::twice").module)
    """
    assert run_python(dedent(code), tmp_path).split() == ["acme_extension"]


def test_they_verify(operators: Built) -> None:
    manifest = OPERATORS / "manifest.yaml"
    ran = run_aotc("verify", manifest, "--model", "uses", "--store", operators.store, **operators.variables)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[1].split()[-1] == "ok"


def test_what_is_missing_is_named_with_its_module(operators: Built) -> None:
    shown = in_process(
        """
        try:
            load()
        except aotc.OperatorError as error:
            print(error)
        """,
        operators,
    )
    assert "acme::scale: registered by module `acme_python`" in shown
    assert "acme_cpp::twice: registered by module `acme_cpp`, with the shared library libacme_ops.so" in shown
    assert "aotc.load(…, allow_imports=['acme_cpp', 'acme_python'])" in shown


@pytest.mark.parametrize("allowed", ["True", "['acme_cpp', 'acme_python']"])
def test_load_imports_what_it_is_allowed_to_and_no_compiler(operators: Built, allowed: str) -> None:
    shown = in_process(
        f"""
        compiled = load(allow_imports={allowed})
        x = torch.randn(4, 8)
        with torch.no_grad():
            actual = compiled(x)
        print(compilers())
        y = compiled.module.linear(x)
        expected = (y * 2.5).relu() + 2 * y + (y + 1).sin() + 3 * y
        print(torch.allclose(actual, expected, atol=1e-5))
        """,
        operators,
    )
    assert shown.split("\n")[:2] == ["[]", "True"]


def test_threads_that_wait_for_the_library_let_go_of_the_gil(operators: Built) -> None:
    """Which an operator inside it needs to go on, as one that waits for anything does."""
    shown = in_process(
        """
        import faulthandler, threading
        faulthandler.dump_traceback_later(60, exit=True)
        compiled = load(allow_imports=True)
        sys.modules["acme_python"].PAUSE = 0.002
        x = torch.randn(4, 8)

        def call():
            with torch.no_grad():
                for _ in range(10):
                    compiled(x)

        threads = [threading.Thread(target=call) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(compiled.stats().calls)
        """,
        operators,
    )
    assert shown.split() == ["640"]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_as_many_calls_run_at_once_as_concurrency_says(operators: Built, concurrency: int) -> None:
    """Each waits in an operator until so many are there, and then for one more, which must not come."""
    shown = in_process(
        f"""
        import threading
        compiled = load(allow_imports=True, concurrency={concurrency})
        x, inside, most = torch.randn(4, 8), 0, 0
        lock, enough, too_many = threading.Lock(), threading.Event(), threading.Event()

        class Counting:
            def sleep(self, seconds):
                global inside, most
                with lock:
                    inside += 1
                    most = max(most, inside)
                    if inside == {concurrency}:
                        enough.set()
                    elif inside > {concurrency}:
                        too_many.set()
                enough.wait(60)
                too_many.wait(0.5)
                with lock:
                    inside -= 1

        def call():
            with torch.no_grad():
                compiled(x)

        sys.modules["acme_python"].time = Counting()
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(most, compiled.stats().calls)
        """,
        operators,
    )
    assert shown.split() == [str(concurrency), "3"]


@pytest.mark.parametrize(("concurrency", "within"), [(1, "LibraryError"), (2, "True")])
def test_a_call_within_a_call_takes_another_model_and_does_not_wait_for_its_own(
    operators: Built, concurrency: int, within: str
) -> None:
    """By an operator of Python's, or a handler of a signal that comes while one runs."""
    shown = in_process(
        f"""
        import faulthandler
        faulthandler.dump_traceback_later(60, exit=True)
        compiled = load(allow_imports=True, concurrency={concurrency})
        x, results = torch.randn(4, 8), []
        with torch.no_grad():
            expected = compiled(x)

        class Calling:
            def sleep(self, seconds):
                sys.modules["acme_python"].time = Quiet()
                try:
                    results.append(torch.equal(compiled(x), expected))
                except aotc.LibraryError as error:
                    results.append(type(error).__name__)

        class Quiet:
            def sleep(self, seconds):
                pass

        for _ in range(2):
            sys.modules["acme_python"].time = Calling()
            with torch.no_grad():
                print(torch.equal(compiled(x), expected))
        print(*results)
        """,
        operators,
    )
    assert shown.split() == ["True", "True", within, within]


def test_a_forked_child_opens_the_library_that_threads_were_in(operators: Built) -> None:
    shown = in_process(
        """
        import signal, threading
        compiled = load(allow_imports=True)
        x, inside, leave = torch.randn(4, 8), threading.Event(), threading.Event()
        with torch.no_grad():
            expected = compiled(x)

        class Waiting:
            def sleep(self, seconds):
                if threading.current_thread() is not threading.main_thread():
                    inside.set()
                    leave.wait()

        def call():
            with torch.no_grad():
                return torch.equal(compiled(x), expected)

        sys.modules["acme_python"].time = Waiting()
        thread = threading.Thread(target=call)
        thread.start()
        inside.wait()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os._exit(0 if call() and call() else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        leave.set()
        thread.join()
        print(call())
        """,
        operators,
    )
    assert shown.split() == ["0", "True"]


def test_a_module_that_is_not_allowed_is_not_imported(operators: Built) -> None:
    shown = in_process(
        """
        try:
            load(allow_imports=["acme_python"])
        except aotc.OperatorError as error:
            print(*[issue.where for issue in error.issues], "acme_python" in sys.modules, "acme_cpp" in sys.modules)
        """,
        operators,
    )
    assert shown.split() == ["acme_cpp::twice", "True", "False"]


def test_a_module_that_cannot_be_imported_says_why(operators: Built) -> None:
    shown = in_process(
        """
        os.environ["ACME_OPS"] = "/nowhere/libacme_ops.so"
        try:
            load(allow_imports=True)
        except aotc.OperatorError as error:
            print(error)
        """,
        operators,
    )
    assert "which cannot be imported here: OSError: Could not load this library: /nowhere/libacme_ops.so" in shown


def test_an_operator_runs_under_a_compiler_that_comes_later(operators: Built) -> None:
    """What keeps Dynamo out of a service must not change what torch.compile does in a process that uses it."""
    shown = in_process(
        """
        compiled = load(allow_imports=True)
        x = torch.randn(4, 8)
        with torch.no_grad():
            before = compiled(x)
            import torch._dynamo
            print(torch.equal(before, compiled(x)))
            graph = torch.compile(lambda x: torch.ops.acme.scale(x, 2.0) + 1, backend="eager", fullgraph=True)
            print(torch.equal(graph(x), x * 2.0 + 1))
        """,
        operators,
    )
    assert shown.split() == ["True", "True"]


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (
            "python-without-fake",
            ('@torch.library.register_fake("acme::without_fake")', "def _(x, factor):", "return torch.empty_like(x)"),
        ),
        (
            "cpp-without-fake",
            ('@torch.library.register_fake("acme_cpp::without_fake")', "def _(x):", "return torch.empty_like(x)"),
        ),
    ],
)
def test_an_operator_without_a_fake_kernel_fails_with_the_lines_that_fix_it(
    operators: Built, model: str, lines: tuple[str, ...]
) -> None:
    unit = operators.unit(model)
    assert unit["status"] == "failed"
    assert "acme_models.py" in unit["source"]
    assert [line.strip() for line in unit["error"].splitlines()[-3:]] == list(lines)


@pytest.mark.parametrize(
    "module", ["torch._dynamo", "triton", "aotc.compiler.workers.compile_worker", "os; import x", ""]
)
def test_a_record_cannot_have_a_compiler_imported(operators: Built, module: str) -> None:
    artifact = artifact_of(operators)
    variant = msgspec.structs.replace(artifact.variants[0], operators=(OperatorNeed("acme::scale", module),))
    with pytest.raises(CorruptError, match="not a module of a user"):
        check_record(msgspec.structs.replace(artifact, variants=(variant,)))


def test_an_operator_of_library_define_belongs_to_the_module_that_defines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch notes its own line for it, and not the caller's."""
    (tmp_path / "defines_twice.py").write_text(
        'import torch\ntorch.library.define("aotc_tests::twice", "(Tensor x) -> Tensor")\n'
        '@torch.library.impl("aotc_tests::twice", "cpu")\ndef twice(x):\n    return 2 * x\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registrations = Registrations()
    with registrations.watched():
        importlib.import_module("defines_twice")
    monkeypatch.delitem(sys.modules, "defines_twice")
    (tmp_path / "model.json").write_text('{"nodes": [{"node": {"target": "aotc_tests::twice.default"}}]}')
    assert registrations.needed(tmp_path / "model.json") == (OperatorNeed("aotc_tests::twice", "defines_twice"),)
