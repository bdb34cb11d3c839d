"""`aotc.prepare`: a load in two halves equals one load, in this process and in those that it forks."""

from __future__ import annotations

import json
import pickle
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from doctoring import copy_store
from processes import ROOT, run_python
from safetensors.torch import save_file

import aotc
from aotc.garbage import no_collection
from aotc.runtime.prepare import Prepared
from aotc.store.layout.bundle import BundleEntry
from aotc.telemetry import startup_report

Load = Callable[..., aotc.Compiled]


@pytest.fixture
def in_halves() -> Load:
    """`aotc.load` by way of `aotc.prepare`."""
    of_load = {"device", "on_miss", "concurrency", "ignore", "graphs", "ranks"}

    def load(ref: str, module: Any = None, **options: Any) -> aotc.Compiled:
        second = {name: options.pop(name) for name in of_load & options.keys()}
        return aotc.prepare(ref, **options).load(module, **second)

    return load


@pytest.fixture
def weights(zoo: Any, tmp_path: Path) -> Path:
    save_file(zoo.Linear().state_dict(), tmp_path / "linear.safetensors")
    return tmp_path / "linear.safetensors"


def with_a_gpu_artifact(prepared: Prepared) -> None:
    """Let the bundle have one for a GPU, too."""
    bundle = prepared._found.bundle
    other = BundleEntry("sha256:" + 64 * "0", 1, "cuda:sm_90", bundle.model)
    prepared._found.bundle = msgspec.structs.replace(bundle, artifacts=(*bundle.artifacts, other))
    prepared._found.has = lambda entry: True


# -- the same as a load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["linear", "frozen"])
def test_a_module_gets_what_eager_computes(model: str, zoo_store: Path, zoo: Any) -> None:
    torch.manual_seed(0)
    module = zoo.Linear(64 if model == "frozen" else 8).eval()
    x = torch.randn(2, module.width)
    prepared = aotc.prepare(f"{zoo_store}#{model}")
    loaded = [prepared.load(None if model == "frozen" else module) for _ in range(2)]
    if model == "frozen":
        reference = aotc.load(f"{zoo_store}#{model}")
        assert all(torch.equal(compiled(x), reference(x)) for compiled in loaded)
    else:
        with torch.no_grad():
            assert all(torch.allclose(compiled(x), module(x), atol=1e-6) for compiled in loaded)
    assert loaded[0].stats().calls == loaded[1].stats().calls == 1


def test_regions_and_training_load_with_their_module(regions_store: Path, zoo: Any) -> None:
    import region_models

    module = region_models.Stack().eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = module(x)
    compiled = aotc.prepare(f"{regions_store}#stack").load(module)
    torch.testing.assert_close(compiled(x), expected)
    with pytest.raises(aotc.BindError, match="only regions are compiled, and no module was given"):
        aotc.prepare(f"{regions_store}#stack").load()


def test_a_model_that_is_trained_gets_eager_s_gradients(training_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "training"))
    import trained_models

    module = trained_models.padded().train()
    x, y = torch.randn(12, 8), torch.randint(4, (12,))
    expected = torch.autograd.grad(module(x, y)["loss"], list(module.parameters()))
    compiled = aotc.prepare(f"{training_store}#padded").load(module)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, y)["loss"], list(module.parameters())), expected)


WHOLE = {"linear.weight": torch.zeros(8, 8), "linear.bias": torch.zeros(8)}


@pytest.mark.parametrize(
    ("ref", "options"),
    [
        ("linear", {"module": "Pooled"}),
        ("linear", {}),
        ("linear", {"weights": "no-such-file.safetensors"}),
        ("linear", {"weights": {"linear.weight": torch.zeros(8, 8)}}),
        ("linear", {"module": "Linear", "weights": WHOLE}),
        ("linear", {"module": "Linear", "on_miss": "never"}),
        ("linear", {"module": "Linear", "concurrency": 0, "graphs": aotc.Graphs(capture="late")}),
        ("linear", {"module": "Linear", "device": "cuda"}),
        ("linear", {"weights": WHOLE, "device": "cuda:7"}),
        ("linear", {"module": "Linear", "target": "cpu:x86-64-v9"}),
        ("linear", {"module": "Linear", "trust": aotc.Trust(require_verified=True)}),
        ("linear", {"module": "Linear", "ranks": aotc.Ranks("all")}),
        ("frozen", {"weights": {"linear.weight": torch.zeros(64, 64)}}),
        ("linear:v9", {"module": "Linear"}),
        ("nothing", {"module": "Linear"}),
        ("linear", {"module": "Linear", "compat": "major"}),
        ("linear", {"module": "Linear", "store": "another"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_an_error_is_the_load_s_own(
    ref: str, options: dict[str, Any], in_halves: Load, zoo_store: Path, zoo: Any
) -> None:
    def error_of(load: Load) -> aotc.AotcError:
        module = getattr(zoo, options["module"])().eval() if "module" in options else None
        rest = {name: value for name, value in options.items() if name != "module"}
        with pytest.raises(aotc.AotcError) as caught:
            load(f"{zoo_store}#{ref}", module, **rest)
        return caught.value

    whole, halves = error_of(aotc.load), error_of(in_halves)
    assert (type(halves), str(halves), halves.issues) == (type(whole), str(whole), whole.issues)


def test_a_load_reads_no_store(zoo_store: Path, zoo: Any, tmp_path: Path) -> None:
    copied = copy_store(zoo_store, tmp_path).path
    module, x = zoo.Linear().eval(), torch.randn(2, 8)
    prepared = aotc.prepare(f"{copied}#linear")
    frozen = aotc.prepare(f"{copied}#frozen")
    expected = aotc.load(f"{zoo_store}#frozen")(torch.ones(2, 64))
    shutil.rmtree(copied)
    with torch.no_grad():
        torch.testing.assert_close(prepared.load(module)(x), module(x))
    torch.testing.assert_close(frozen.load()(torch.ones(2, 64)), expected)
    assert prepared.load(module).forward.loaded.digest == prepared.digest


def test_a_remote_bundle_is_fetched_by_the_first_half(zoo_store: Path, zoo: Any, tmp_path: Path) -> None:
    remote = copy_store(zoo_store, tmp_path).path
    prepared = aotc.prepare(f"file://{remote}#linear", cache=tmp_path / "cache")
    shutil.rmtree(remote)
    shutil.rmtree(tmp_path / "cache")
    module, x = zoo.Linear().eval(), torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(prepared.load(module)(x), module(x))


# -- weights ----------------------------------------------------------------------------------------------------------


def test_callables_share_weights_until_one_updates_its_own(zoo_store: Path, weights: Path) -> None:
    prepared, x = aotc.prepare(f"{zoo_store}#linear", weights=weights), torch.ones(2, 8)
    first, second = prepared.load(), prepared.load()
    before = second(x)
    first.update_weights({"linear.weight": torch.zeros(8, 8), "linear.bias": torch.full((8,), 3.0)})
    assert torch.equal(first(x), torch.full((2, 8), 3.0))
    assert torch.equal(second(x), before) and torch.equal(prepared.load()(x), before)
    shared, again = ([each.data_ptr() for each in one.forward._state.take()] for one in (second, prepared.load()))
    assert shared == again


def test_a_checkpoint_is_read_ahead(zoo_store: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr("aotc.early.read_ahead", asked.extend)
    aotc.prepare(f"{zoo_store}#linear", weights=weights)
    assert asked == [weights]


def test_each_callable_has_its_own_of_what_the_model_writes(zoo_store: Path, zoo: Any, tmp_path: Path) -> None:
    import shape_models

    state = shape_models.KeyValueCache().state_dict()
    save_file(state, tmp_path / "cache.safetensors")
    prepared = aotc.prepare(f"{zoo_store}#cache", weights=tmp_path / "cache.safetensors")
    first, second = prepared.load(), prepared.load()
    position = torch.tensor(0)
    written = first(torch.ones(1, 4), position)[2]
    assert written[0].abs().sum() > 0
    assert torch.equal(second(torch.ones(1, 4), torch.tensor(5))[2][0], torch.zeros(4))
    counts = [compiled.forward._state.take() for compiled in (first, second, prepared.load())]
    steps = [next(int(each) for each in tensors if each.dtype == torch.int64) for tensors in counts]
    assert steps == [1, 1, 0]


# -- what it is for ---------------------------------------------------------------------------------------------------


def test_another_kind_of_device_than_was_prepared_is_refused(
    zoo_store: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    prepared = aotc.prepare(f"{zoo_store}#linear", weights=weights)
    with_a_gpu_artifact(prepared)
    with pytest.raises(aotc.BindError, match="was prepared for cpu, and is to run on cuda") as caught:
        prepared.load(device="cuda:0")
    assert (caught.value.expected, caught.value.actual) == ("cpu", "cuda")
    assert caught.value.hint == 'aotc.prepare(…, device="cuda")'


def test_its_files_are_closed_with_it(zoo_store: Path, zoo: Any) -> None:
    prepared = aotc.prepare(f"{zoo_store}#linear")
    module = zoo.Linear().eval()
    prepared.load(module)(torch.zeros(2, 8))
    gone = weakref.ref(next(iter(prepared._found.files.values())))
    with no_collection():
        del prepared
        assert gone() is None


def test_it_is_named_by_its_reference_and_cannot_be_pickled(zoo_store: Path) -> None:
    prepared = aotc.prepare(f"{zoo_store}#linear")
    assert repr(prepared) == "<aotc.Prepared linear:latest for cpu>"
    with pytest.raises(TypeError, match="prepare in a module that the parent imports before it forks"):
        pickle.dumps(prepared)


def test_the_startup_report_has_the_parts_of_both_halves(zoo_store: Path, weights: Path) -> None:
    models = {
        "whole": aotc.load(f"{zoo_store}#linear", weights=weights),
        "halves": aotc.prepare(f"{zoo_store}#linear", weights=weights).load(),
    }
    report = startup_report(models)["models"]
    assert set(report["halves"]["prepare_ms"]) == {"record", "libraries", "weights"}
    assert set(report["halves"]["load_ms"]) == set(report["whole"]["load_ms"])
    assert report["whole"]["prepare_ms"] is None
    assert report["halves"]["forked"] is report["whole"]["forked"] is False


# -- forks ------------------------------------------------------------------------------------------------------------

PRELUDE = """
import gc, json, logging, os, signal, sys, threading, time, traceback
from pathlib import Path
import torch, aotc, models
from aotc.telemetry import startup_report

torch.set_num_threads(1)
store, weights = sys.argv[1:]

def child(action):
    '''What `action` gives in a forked child, by way of JSON.'''
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            os.write(writing, json.dumps(action()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    os.close(writing)
    with open(reading) as stream:
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code
    return json.loads(said)

def error(action):
    try:
        action()
    except aotc.AotcError as error:
        return [type(error).__name__, str(error)]

def tasks():
    return len(os.listdir("/proc/self/task"))

def held():
    '''KiB of memory that is not a file's, mappings, and open files: other processes change none of them.'''
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    memory = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return memory, Path("/proc/self/maps").read_text().count("\\n"), len(os.listdir("/proc/self/fd"))
"""


def said(store: Path, weights: Path, code: str) -> Any:
    return json.loads(run_python(PRELUDE + code, store, weights).splitlines()[-1])


def test_children_are_right_share_the_weights_and_cost_their_parent_nothing(zoo_store: Path, weights: Path) -> None:
    """Each calls; some update their weights, and some are killed."""
    code = """
os.fsync(os.open(weights, os.O_RDONLY))  # what is not on the disk yet counts as dirty, too
x = torch.randn(2, 8)
expected = aotc.load(f"{store}#linear", weights=weights)(x)
before = tasks()
prepared = aotc.prepare(f"{store}#linear", weights=weights)
ends = time.monotonic() + 30
while (threads := tasks() - before) and time.monotonic() < ends:
    time.sleep(0.01)  # Linux lists a thread that was joined for a moment

def dirty():
    '''KiB of the mapped checkpoint that are this process's own.'''
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(weights)
        elif inside and line.startswith("Private_Dirty:"):
            found += int(line.split()[1])
    return found

def serve(number):
    compiled = prepared.load()
    right = torch.equal(compiled(x), expected)
    if number % 3 == 1:
        zero = {name: torch.zeros_like(each) for name, each in models.Linear().state_dict().items()}
        compiled.update_weights(zero)
        right = right and not compiled(x).any()
    loaded = startup_report({"linear": compiled})["models"]["linear"]
    return [right, dirty(), loaded["forked"], sorted(loaded["prepare_ms"])]

def killed():
    pid = os.fork()
    if pid == 0:
        compiled = prepared.load()
        while True:
            compiled(x)
    time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

answers, parents = [], []
for number in range(24):
    answers.append(child(lambda: serve(number)))
    if number % 6 == 5:
        killed()
    parents.append(held())
alone = prepared.load()
print(json.dumps([answers, parents, threads, torch.equal(alone(x), expected)]))
"""
    answers, parents, threads, right = said(zoo_store, weights, code)
    assert answers == [[True, 0, True, ["libraries", "record", "weights"]]] * 24
    assert threads == 0 and right
    grown = [after - before for before, after in zip(parents[5], parents[-1], strict=True)]  # over 18 forks and more
    assert grown[0] < 512 and grown[1] < 10 and grown[2] == 0, parents


def test_what_a_child_cannot_use_is_named_and_random_numbers_differ(zoo_store: Path, weights: Path) -> None:
    code = """
logging.getLogger("aotc").setLevel(logging.WARNING)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("aotc").addHandler(handler)
prepared = aotc.prepare(f"{store}#linear", weights=weights)

torch.manual_seed(0)
numbers = [child(lambda: torch.rand(3).tolist()) for _ in range(2)]
def seeded():
    torch.manual_seed(7)
    prepared.load()
    return torch.rand(3).tolist()
seeds = [child(seeded), seeded()]

torch.cuda._is_in_bad_fork = lambda: True
cuda = child(lambda: error(lambda: prepared.load(device="cuda")))
here = error(lambda: prepared.load(device="cuda"))
fine = child(lambda: error(prepared.load))

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
world = torch.distributed.group.WORLD
group = child(lambda: error(lambda: prepared.load(ranks=aotc.Ranks(world))))
torch.distributed.destroy_process_group()

stop = threading.Event()
thread = threading.Thread(target=stop.wait, name="poller")
thread.start()
warned = child(lambda: (prepared.load(), prepared.load(), lines)[-1])
stop.set()
thread.join()
print(json.dumps([os.getpid(), numbers, seeds, cuda, here, fine, group, warned, lines]))
"""
    parent, numbers, seeds, cuda, here, fine, group, warned, lines = said(zoo_store, weights, code)
    assert numbers[0] != numbers[1]
    assert seeds[0] == seeds[1]
    assert cuda[0] == "ForkError" and "its context is the parent's" in cuda[1] and "PYTORCH_NVML" in cuda[1]
    assert here[0] != "ForkError" and fine is None
    assert group[0] == "ForkError" and "init_process_group in each child" in group[1] and str(parent) in group[1]
    assert len([line for line in warned if "had the threads poller when it forked" in line]) == 1
    assert lines == []


def test_code_that_fails_after_a_fork_raises_there_alone(zoo_store: Path, weights: Path) -> None:
    """Of a library that the parent has opened, and called, before."""
    code = """
prepared = aotc.prepare(f"{store}#tied", weights=models.Tied().state_dict())
ids = torch.tensor([1, 2, 3, 4])
opened = prepared.load()
expected = opened(ids)
def fails(compiled):
    try:
        compiled(torch.tensor([1, 2, 3, 99]))
    except aotc.LibraryError as failure:
        return ["index" in str(failure), torch.equal(compiled(ids), expected)]
print(json.dumps([child(lambda: fails(opened)), child(lambda: fails(prepared.load())), fails(opened)]))
"""
    assert said(zoo_store, weights, code) == [[True, True]] * 3
