"""Modules that take long to make are made once for a whole build, and kept for the processes of their units."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import pytest
import torch
import yaml
from processes import processes_that_name, run_aotc, run_python, start, wait_until_none_names
from torch import nn

import aotc
from aotc.compiler.capture.analysis.custom_operators import Registrations
from aotc.compiler.planning import plan
from aotc.compiler.planning.plan import InspectedModels
from aotc.compiler.workers import fork_server, unit_servers
from aotc.compiler.workers.module_holder import MadeModules, hold, make_modules
from aotc.compiler.workers.process_group import Processes
from aotc.compiler.workers.unit_servers import ForkServers, Holder
from aotc.errors import ManifestError
from aotc.machine.processes import child_environment
from aotc.manifest import Manifest, read_manifest
from aotc.models.factory import build_module, made_before
from aotc.records import OperatorNeed
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.opening import open_readable
from aotc.store.reference import parse_reference

# -- builds -----------------------------------------------------------------------------------------------------------

SLOW_TO_MAKE = """
import os, time
import torch
from torch import nn

def by_several_threads():
    return torch.rand(2000, 2000) @ torch.rand(2000, 2000)

@torch.library.custom_op("slow_to_make::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    by_several_threads()
    return x * 2

@double.register_fake
def _(x):
    return torch.empty_like(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("offset", torch.rand(8), persistent=False)

    def forward(self, x):
        return torch.ops.slow_to_make.double(self.linear(x)) + self.offset

def make(calls, seconds):
    with open(calls, "a") as file:
        print(os.getpid(), file=file)
    time.sleep(seconds)
    by_several_threads()
    return Model()
"""
SECONDS = {"slow": plan.WORTH + 0.1, "fast": 0}
BUCKETS = {"slow": [{"n": 2}, {"n": 3}], "fast": [{"n": 2}]}


class Built(NamedTuple):
    """The folder of the model's code, of the store, and of what its factory has noted; and what the build said."""

    folder: Path
    report: dict[str, Any]

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def calls(self, model: str) -> list[str]:
        """The processes in which the factory was called."""
        return (self.folder / f"{model}-calls").read_text().split()


@pytest.fixture(scope="session")
def built(shared_folder: Path) -> Built:
    """One model twice: `slow` takes long to make, `fast` does not. Once for all processes of pytest-xdist."""
    built = Built(shared_folder / "made-once", {})
    report = built.folder / "report.json"
    with filelock.FileLock(shared_folder / "made-once.lock"):
        if not report.exists():
            built.temporary.mkdir(parents=True)
            (built.folder / "slow_to_make.py").write_text(SLOW_TO_MAKE)
            models = {
                name: {
                    "factory": "slow_to_make.py:make",
                    "kwargs": {"calls": str(built.folder / f"{name}-calls"), "seconds": seconds},
                    "inputs": {"x": {"shape": ["n", 8]}},
                    "buckets": BUCKETS[name],
                    "mode": "default",
                }
                for name, seconds in SECONDS.items()
            }
            manifest = built.folder / "manifest.yaml"
            manifest.write_text(yaml.safe_dump({"version": 1, "models": models}, sort_keys=False))
            command = ("build", manifest, "--store", built.store, "--jobs", "2", "--json")
            ran = run_aotc(*command, TMPDIR=str(built.temporary), OMP_NUM_THREADS="2")
            assert ran.returncode == 0, ran.stdout + ran.stderr
            report.write_text(ran.stdout)
    return built._replace(report=json.loads(report.read_text()))


def test_what_takes_long_to_make_is_made_once(built: Built) -> None:
    assert [unit["status"] for unit in built.report["units"] if unit["model"] == "slow"] == ["built"] * 2
    assert built.calls("slow") == built.calls("fast")[:1], "in the build's own process, which made both"


def test_what_is_made_fast_is_made_in_each_process_of_its_units(built: Built) -> None:
    assert [unit["status"] for unit in built.report["units"] if unit["model"] == "fast"] == ["built"]
    assert len(set(built.calls("fast"))) == len(built.calls("fast")) == 3, "planning, worker and smoke run"


def test_no_process_of_the_build_is_left(built: Built) -> None:
    assert wait_until_none_names("python", 10, f"TMPDIR={built.temporary}") == []
    assert list(built.temporary.glob("aotc-build-*")) == []


@pytest.mark.parametrize("model", SECONDS)
def test_operators_that_the_kept_registered_are_named_like_those_of_a_fresh_process(built: Built, model: str) -> None:
    store = open_readable(str(built.store))
    (entry,) = read_bundle(store, parse_reference(model)).artifacts
    needed = [variant.operators for variant in read_artifact(store, entry.digest).variants]
    assert needed == [(OperatorNeed("slow_to_make::double", "slow_to_make"),)] * len(BUCKETS[model])


def test_what_was_compiled_of_a_kept_module_computes_what_eager_does(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(built.folder))
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    models = importlib.import_module("slow_to_make")
    torch.manual_seed(0)
    module = models.make(tmp_path / "calls", 0).eval()
    attached = aotc.load("slow", module, store=built.store)
    built_in = aotc.load("slow", weights=module.state_dict(), store=built.store)  # the buffer is the artifact's
    for rows in (2, 3):
        x = torch.rand(rows, 8)
        with torch.no_grad():
            expected = module(x)
            torch.testing.assert_close(attached(x), expected)
            torch.testing.assert_close(built_in(x), expected)


# -- making ----------------------------------------------------------------------------------------------------------

FACTORIES = """
import os, signal, threading
import torch
from torch import nn

def plain(calls):
    with open(calls, "a") as file:
        print("main" if threading.current_thread() is threading.main_thread() else "other", file=file)
    return nn.ReLU()

def handles_signals(calls):
    relu = plain(calls)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return relu

def without_gradients(calls):
    torch.set_grad_enabled(False)
    return plain(calls)

def on_meta(calls):
    torch.set_default_device("meta")
    return plain(calls)

def in_bfloat16(calls):
    torch.autocast("cpu").__enter__()
    return plain(calls)

def flushing(calls):
    torch.set_flush_denormal(True)
    return plain(calls)

def by_more_threads(calls):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return plain(calls)

def leaves_a_thread(calls):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return plain(calls)

def in_shared_memory(calls):
    plain(calls)
    return nn.Linear(2, 2).share_memory()

def sets_a_variable(calls):
    os.environ["SET_BY_A_FACTORY"] = "yes"
    return plain(calls)

def raises(calls):
    plain(calls)
    raise ValueError("no good")

def fails_in_a_thread(calls):
    plain(calls)
    raise RuntimeError("a thread of the loader died")
"""


class Made(NamedTuple):
    """A manifest of one model, and where its factory notes in which thread it is called."""

    manifest: Manifest
    log: Path

    def threads(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What factories may set in the main thread is set back."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    handler, threads = signal.getsignal(signal.SIGUSR1), torch.get_num_threads()
    with torch.autocast("cpu", enabled=False):
        yield
    signal.signal(signal.SIGUSR1, handler)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
    sys.modules.pop("factories_of_threads", None)


def model_of(factory: str, folder: Path) -> Made:
    (folder / "factories_of_threads.py").write_text(FACTORIES)
    reference, log = f"factories_of_threads.py:{factory}", folder / "threads"
    model = {"factory": reference, "kwargs": {"calls": str(log)}, "inputs": {"input": {"shape": [2]}}, "buckets": [{}]}
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": {"model": model}}))
    return Made(read_manifest(path), log)


@pytest.mark.parametrize(("worth", "long"), [(0.0, ("model",)), (100.0, ())])
def test_what_took_long_may_be_kept(
    restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: float, long: tuple[str, ...]
) -> None:
    monkeypatch.setattr(plan, "WORTH", worth)
    model = model_of("plain", tmp_path)
    made = make_modules(model.manifest)
    assert made.long == long == (*made.inspected.slow,) and made.inspected.facts.keys() == {"model"}
    assert model.threads() == ["main"]


def test_a_factory_whose_error_speaks_of_threads_is_called_once(restored: None, tmp_path: Path) -> None:
    model = model_of("fails_in_a_thread", tmp_path)
    with pytest.raises(ManifestError, match="thread"):
        make_modules(model.manifest)
    assert model.threads() == ["main"]


def test_a_factory_may_handle_signals(restored: None, tmp_path: Path) -> None:
    model = model_of("handles_signals", tmp_path)
    assert make_modules(model.manifest).inspected.facts.keys() == {"model"}
    assert model.threads() == ["main"] and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


@pytest.mark.parametrize("factory", ["without_gradients", "on_meta", "in_bfloat16", "flushing"])
def test_what_sets_something_for_its_thread_is_not_kept(
    restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    monkeypatch.setattr(plan, "WORTH", 0.0)
    model = model_of(factory, tmp_path)
    made = make_modules(model.manifest)
    assert made.long == () and isinstance(made.inspected.slow["model"], nn.ReLU)
    assert model.threads() == ["main"]
    assert {
        "without_gradients": not torch.is_grad_enabled(),
        "on_meta": torch.get_default_device() == torch.device("meta"),
        "in_bfloat16": torch.is_autocast_enabled("cpu"),
        "flushing": (torch.tensor(5e-324, dtype=torch.float64, device="cpu") * 1).item() == 0,
    }[factory], "it holds for what comes after it"


@pytest.mark.parametrize("factory", ["by_more_threads", "leaves_a_thread", "in_shared_memory"])
def test_what_sets_something_for_its_process_is_made_once_more_in_those_of_its_units(
    restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    monkeypatch.setattr(plan, "WORTH", 0.0)
    model = model_of(factory, tmp_path)
    assert make_modules(model.manifest).long == () and model.threads() == ["main"]


def test_variables_that_a_factory_sets_stay(restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_A_FACTORY", "no")
    monkeypatch.delenv(fork_server.ASK_NVML, raising=False)
    make_modules(model_of("sets_a_variable", tmp_path).manifest)
    assert os.environ["SET_BY_A_FACTORY"] == "yes" and fork_server.ASK_NVML not in os.environ


COMPUTES = """
import torch

def make():
    print("begun", flush=True)
    while True:
        torch.rand(1000, 1000) @ torch.rand(1000, 1000)
"""


def test_a_build_is_interrupted_while_a_factory_computes(tmp_path: Path) -> None:
    (tmp_path / "computes.py").write_text(COMPUTES)
    model = {"factory": "computes.py:make", "inputs": {"input": {"shape": [2]}}, "buckets": [{}]}
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"model": model}}))
    command = ("-m", "aotc", "build", tmp_path / "manifest.yaml", "--store", tmp_path / "store")
    with start(*command) as build:
        assert build.stderr is not None
        while build.stderr.readline() != "begun\n":
            assert build.poll() is None
        build.send_signal(signal.SIGINT)
        assert build.wait(30) == 128 + signal.SIGINT


def test_a_factory_that_raises_is_called_once(restored: None, tmp_path: Path) -> None:
    model = model_of("raises", tmp_path)
    with pytest.raises(ManifestError, match="ValueError: no good"):
        make_modules(model.manifest)
    assert model.threads() == ["main"]


def test_the_first_to_ask_gets_what_was_made_before(
    restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("plain", tmp_path)
    kept = nn.ReLU()
    monkeypatch.setitem(made_before, "model", kept)
    spec = model.manifest.models["model"]
    assert build_module(spec, tmp_path) is kept and not model.log.exists()
    assert build_module(spec, tmp_path) is not kept and model.threads() == ["main"]


# -- keeping ---------------------------------------------------------------------------------------------------------

SERVED = """
import json, os, sys, time

factory = sys.modules.get("aotc.models.factory")
operators = sys.modules.get("aotc.compiler.capture.analysis.custom_operators")
kept = {name: module.weight.tolist() for name, module in factory.made_before.items()} if factory else {}
before = operators and operators.Registrations.before
said = [os.getppid(), kept, sorted(before.loaded) if before else []]
os.write(1, json.dumps(said).encode() + b"\\n")  # not by sys.stdout, which pytest has taken for itself
time.sleep(float(sys.argv[1]))
"""
MODULES = ("served", "served_too")
KEPT = {"kept": [[0.5, 0.25]]}
LOADED = ["acme::op"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """In which the modules can be imported that are served instead of a unit's."""
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text(SERVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(unit_servers, "_PRELOADED", dict.fromkeys(MODULES, ()))
    own = child_environment()
    return {**own, "PYTHONPATH": f"{tmp_path}{os.pathsep}{own['PYTHONPATH']}"}


def made() -> MadeModules:
    kept = nn.Linear(2, 1)
    kept.load_state_dict({"weight": torch.tensor(KEPT["kept"]), "bias": torch.zeros(1)})
    registrations = Registrations()
    registrations.loaded = {name: OperatorNeed(name, "acme") for name in LOADED}
    return MadeModules(InspectedModels({}, {"kept": kept, "quick": nn.Linear(2, 1)}), ("kept",), registrations)


@pytest.fixture
def servers(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServers]:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # another test may have done that
    monkeypatch.setattr(fork_server, "_cuda_is_spoilt", lambda: False)
    servers = ForkServers(dict.fromkeys(MODULES, ()), ())
    servers.holder = hold(made())
    yield servers
    servers.close()


def asked(servers: ForkServers, module: str, environment: dict[str, str], log: Path, model: str = "kept") -> list[Any]:
    """The server that a process of the module was forked from, and what it has of made modules and operators."""
    with log.open("ab") as errors:
        process = servers.server(module, environment, model).start(["0"], environment, errors)
    with process.stdout:
        said: list[Any] = json.loads(process.stdout.read())
    assert process.wait() == 0
    return said


def killed(holder: Holder | None) -> None:
    assert holder is not None
    os.kill(holder._pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder._pid, os.WEXITED | os.WNOWAIT)


def test_the_processes_of_both_modules_have_what_is_kept(
    servers: ForkServers, environment: dict[str, str], tmp_path: Path
) -> None:
    ran = [asked(servers, module, environment, tmp_path / "log") for module in (*MODULES, *MODULES)]
    assert [said[1:] for said in ran] == [[KEPT, LOADED]] * 4
    parents = [said[0] for said in ran]
    assert parents[:2] == parents[2:] and len({*parents, os.getpid()}) == 3
    assert not made_before and Registrations.before is None, "in this process as before"


def test_those_of_other_models_have_not(servers: ForkServers, environment: dict[str, str], tmp_path: Path) -> None:
    of_kept = [asked(servers, module, environment, tmp_path / "log")[0] for module in MODULES]
    for module in MODULES:
        parent, *has = asked(servers, module, environment, tmp_path / "log", model="quick")
        assert has == [{}, []] and parent not in of_kept


@pytest.mark.parametrize("module", MODULES)
def test_once_the_holder_was_killed_its_units_have_the_servers_of_others(
    servers: ForkServers, environment: dict[str, str], tmp_path: Path, module: str
) -> None:
    assert asked(servers, module, environment, tmp_path / "log")[1] == KEPT
    killed(servers.holder)
    with pytest.raises(ChildProcessError, match=f"the process that starts {module} has died"):
        asked(servers, module, environment, tmp_path / "log")
    assert [asked(servers, name, environment, tmp_path / "log")[1] for name in MODULES] == [{}, {}]


def test_a_unit_s_process_is_started_where_the_holder_was_killed(
    servers: ForkServers, environment: dict[str, str], tmp_path: Path
) -> None:
    killed(servers.holder)
    processes = Processes(servers=servers)
    with processes.start("served", "0", environment, tmp_path / "log", "kept") as process:
        assert json.loads(process.stdout.read())[1:] == [{}, []]
        assert process.wait() == 0
    processes.end_all()


def test_closing_ends_the_holder_and_what_it_has_started(
    servers: ForkServers, environment: dict[str, str], tmp_path: Path
) -> None:
    with (tmp_path / "log").open("ab") as errors:
        process = servers.server("served", environment, "kept").start(["60"], environment, errors)
    assert process.stdout.readline()
    servers.close()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert servers.holder is not None
    with pytest.raises(ProcessLookupError):
        os.kill(servers.holder._pid, 0)
    with pytest.raises(ChildProcessError, match="the build has ended"):
        asked(servers, "served", environment, tmp_path / "log")


MULTIPLIES = "import torch\ntorch.rand(700, 700) @ torch.rand(700, 700)\n"
FACTORY = "import torch\ndef make():\n    torch.rand(700, 700) @ torch.rand(700, 700)\n    return torch.nn.ReLU()\n"


def test_the_kept_s_processes_compute_with_several_threads_as_its_factory_did(tmp_path: Path) -> None:
    """Again and again: a fork must not find what the factory's threads do half done."""
    (tmp_path / "multiplies.py").write_text(MULTIPLIES)
    (tmp_path / "makes.py").write_text(FACTORY)
    model = {"factory": "makes.py:make", "inputs": {"input": {"shape": [2]}}, "buckets": [{}]}
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"model": model}}))
    code = f"""
import os, select, sys
from aotc.compiler.planning import plan
from aotc.compiler.workers import module_holder, unit_servers
from aotc.manifest import read_manifest
manifest = read_manifest({str(tmp_path / "manifest.yaml")!r})
unit_servers._PRELOADED = {{"multiplies": ()}}
plan.WORTH = 0
for _ in range(20):
    holder = module_holder.hold(module_holder.make_modules(manifest))
    process = holder.servers["multiplies"].start([], os.environ, sys.stderr.buffer)
    assert select.select([process.stdout], [], [], 20)[0], "it hangs"
    assert process.wait() == 0
    holder.close()
"""
    run_python(code, OMP_NUM_THREADS="2")


def test_a_build_that_is_killed_leaves_no_holder_and_nothing_that_it_started(tmp_path: Path) -> None:
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text(SERVED)
    code = f"""
import os, sys, time
from aotc.compiler.workers import unit_servers
sys.path.insert(0, {str(tmp_path)!r})
unit_servers._PRELOADED = dict.fromkeys({MODULES!r}, ())
holder = unit_servers.Holder(["kept"])
for module in {MODULES!r}:
    process = holder.servers[module].start(["60"], os.environ, sys.stderr.buffer)
    process.stdout.readline()
print("begun", flush=True)
time.sleep(60)
"""
    variable = f"TMPDIR={tmp_path}"
    with start("-c", code, TMPDIR=str(tmp_path)) as build:
        assert build.stdout is not None
        assert build.stdout.readline() == "begun\n"
        assert len(processes_that_name("python", variable)) == 5, "itself, two servers, and what each of them started"
        build.kill()
    assert wait_until_none_names("python", 10, variable) == []


def test_nothing_is_kept_where_cuda_is_initialised(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert hold(made()) is None


def test_nothing_is_kept_where_torch_s_kernels_were_chosen(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert hold(made()) is None


def test_nothing_is_kept_where_nothing_took_long(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert hold(made()._replace(long=())) is None


def test_nothing_is_kept_where_the_system_refuses_a_process(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(os, "fork", refused)
    before = [*Path("/proc/self/fd").iterdir()]
    assert hold(made()) is None
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before) and not made_before
