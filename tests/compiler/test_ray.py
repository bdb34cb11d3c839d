"""Units on a Ray cluster, a real one: several nodes on this machine, of which one is killed while it compiles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import run_here
from processes import ROOT, ZOO, finish, processes_that_name, run_aotc, start, wait_until_none_names

from aotc.compiler.executors.local import memory_of
from aotc.compiler.executors.ray.requests import Ask, ask_for, parse_ask, units_at_a_time
from aotc.compiler.messages import Unit
from aotc.compiler.planning.key import unit_key
from aotc.errors import BuildError
from aotc.machine.native_target import native_target
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest
from aotc.records import Bucket
from aotc.store.layout.store import Store

SMALL = {"object_store_memory": 80 << 20}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
}


def unit(target: str, state_bytes: int = 0, bucket: Bucket | None = None) -> Unit:
    spec = read_manifest(ZOO / "manifest.yaml", ["linear"]).models["linear"]
    bucket = bucket or {"batch": 2}
    return Unit(spec, bucket, parse_target(target), {}, unit_key({"b": str(bucket)}), state_bytes=state_bytes)


# -- what a unit asks for ---------------------------------------------------------------------------------------------

CPU_NODE = {"CPU": 4.0, "memory": float(16 << 30)}
GPU_NODE = {"CPU": 16.0, "memory": float(128 << 30), "GPU": 1.0, "accelerator_type:H200": 1.0}


def test_a_gpu_unit_asks_for_a_share_of_a_gpu_of_its_architecture() -> None:
    ask = ask_for(unit("cuda:sm_90"), {}, [CPU_NODE, GPU_NODE])
    assert ask.accelerator_type == "H200"
    assert 0 < ask.num_gpus < 1
    assert ask.fits(GPU_NODE) and not ask.fits(CPU_NODE)
    assert not ask_for(unit("cuda:sm_80"), {}, [GPU_NODE]).accelerator_type


def test_a_resource_that_nodes_name_after_the_target_is_asked_for() -> None:
    amx = {**CPU_NODE, "cpu:amx": 2.0}
    ask = ask_for(unit("cpu:amx"), {}, [CPU_NODE, amx])
    assert ask.fits(amx) and not ask.fits(CPU_NODE)
    assert units_at_a_time([ask] * 8, [CPU_NODE, amx]) == 2


def test_memory_follows_the_weights_and_what_earlier_builds_took() -> None:
    small, large = (ask_for(unit("cpu:amx", size), {}, []).memory for size in (0, 4 << 30))
    assert large > small + (4 << 30)
    assert ask_for(unit("cpu:amx"), {}, [], used=10 << 30).memory >= 10 << 30
    forked = memory_of(unit("cpu:amx"))  # without what they are forked from
    assert small >= forked + (425 << 20)


def test_what_is_given_for_a_target_or_its_device_comes_first() -> None:
    given = dict(map(parse_ask, ["cuda=num_gpus:1,memory:8GiB", "cuda:sm_90=fast:2,num_cpus:3"]))
    ask = ask_for(unit("cuda:sm_90"), given, [GPU_NODE])
    expected = Ask(3, 1, 8 << 30, "H200", {"fast": 2})
    assert ask == replace(expected, memory=ask.memory)
    assert ask.memory == 8 << 30
    assert ask_for(unit("cpu:amx"), given, []).num_gpus == 0
    assert parse_ask("cpu:amx=cpu:amx:1")[1].resources == {"cpu:amx": 1}


@pytest.mark.parametrize(
    "text", ["cuda", "=num_gpus:1", "cuda=num_gpus", "cuda=num_gpus:many", "cuda=:3", "cuda=memory:x"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises((BuildError, ValueError, RuntimeError), match=r"cannot be read|not a size"):
        parse_ask(text)


# -- a cluster --------------------------------------------------------------------------------------------------------


class Nodes:
    """A head without cores, and nodes that each take one unit of this machine's target at a time."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL}
        )

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **resources: float) -> Any:
        return self.cluster.add_node(num_cpus=1, resources=resources, **SMALL)

    def kill(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("AOTC_CACHE_DIR", str(tmp_path_factory.mktemp("of-the-nodes")))
        started = Nodes()
        yield started
        started.cluster.shutdown()


def start_build(
    manifest: Path, store: Path | str, nodes: Nodes, *more: object, **changes: str
) -> subprocess.Popen[str]:
    return start(
        *("-m", "aotc", "build", manifest, "--store", store, "--executor", "ray", "--address", nodes.address, *more),
        cwd=manifest.parent,
        PYTHONPATH=str(ROOT),
        **QUIET,
        **changes,
    )


def units_of(store: Store) -> list[dict[str, Any]]:
    """The records, in the order in which the units were done."""
    records = [json.loads(path.read_bytes()) for path in (store.path / ".aotc" / "units").glob("*.json")]
    return sorted(records, key=lambda record: str(record["created"]))


def importing_processes(variable: str) -> dict[int, int]:
    """The processes that import for others and were not forked from one that does, with `variable` (NAME=VALUE), and
    the process that started each."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = b"aotc.compiler.workers.fork_server" in (folder / "cmdline").read_bytes()
            if named and variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return {process: parent for process, parent in parents.items() if parent not in parents}


def test_a_cluster_without_a_node_for_a_target_says_what_it_has(nodes: Nodes, manifest: Path, tmp_path: Path) -> None:
    text = manifest.read_text().replace("linear:", "linear:\n    targets: [cuda:sm_90]", 1)
    manifest.write_text(text)
    ran = finish(start_build(manifest, tmp_path / "store", nodes))
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "error: the cluster has no node for cuda:sm_90" in ran.stderr
    assert "cuda:sm_90 asks for CPU 1, GPU 0.125, memory" in ran.stderr
    assert "a node has memory" in ran.stderr
    assert "--resources='{\"cuda:sm_90\": 4}'" in ran.stderr


def test_a_unit_whose_node_is_killed_is_compiled_on_another_one(nodes: Nodes, manifest: Path, tmp_path: Path) -> None:
    target = native_target()
    first = nodes.add(**{target: 1})
    trace = tmp_path / "trace.json"
    build = start_build(manifest, tmp_path / "store", nodes, "--trace", trace)
    assert build.stderr is not None
    for line in build.stderr:
        if line.endswith(": compile\n"):
            break
    nodes.kill(first)  # one unit is being compiled there, the other one waits for its turn
    second = nodes.add(**{target: 1})
    ran = finish(build)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stderr.splitlines()
    assert sum(line.endswith(": compile") for line in lines) == 2, lines  # one of the two anew
    assert sum(": built in " in line for line in lines) == 2
    store = Store.open(tmp_path / "store")
    assert [str(entry) for entry in store.tags()] == ["linear:latest"]
    assert run_aotc("fsck", "--store", store.path).returncode == 0
    for record in units_of(store):
        assert record["stages"]["compile"]["memory"] > 50 << 20
        assert record["seconds"] < 300
    units = {event["args"]["unit"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert len(units) == 2
    nodes.kill(second)


def test_ctrl_c_ends_every_process_on_the_nodes(nodes: Nodes, manifest: Path, tmp_path: Path) -> None:
    node = nodes.add(**{native_target(): 1})
    build = start_build(manifest, tmp_path / "store", nodes)
    assert build.stderr is not None
    for line in build.stderr:
        if line.endswith(": compile\n"):
            break
    of_the_nodes = f"AOTC_CACHE_DIR={os.environ['AOTC_CACHE_DIR']}"  # other tests may compile at the same time
    assert processes_that_name("aotc.compiler.workers.compile_worker", of_the_nodes)
    build.send_signal(signal.SIGINT)
    began = time.monotonic()
    ran = finish(build)
    assert ran.returncode == 128 + signal.SIGINT
    assert "Traceback" not in ran.stderr, ran.stderr
    assert time.monotonic() - began < 20
    assert wait_until_none_names("aotc.compiler.workers.compile_worker", 10, of_the_nodes) == []
    assert Store.open(tmp_path / "store").tags() == []
    nodes.kill(node)


def test_nodes_store_what_they_compile_in_a_store_at_a_url(nodes: Nodes, manifest: Path, tmp_path: Path) -> None:
    node = nodes.add(**{native_target(): 1})
    url, own = f"file://{tmp_path / 'shared'}", {"AOTC_CACHE_DIR": str(tmp_path / "cache")}
    of_the_nodes = f"AOTC_CACHE_DIR={os.environ['AOTC_CACHE_DIR']}"
    build, importers = start_build(manifest, url, nodes, "--json", **own), dict[int, int]()
    while build.poll() is None:
        importers |= importing_processes(of_the_nodes)
        time.sleep(0.1)
    ran = finish(build)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [one["status"] for one in json.loads(ran.stdout)["units"]] == ["built", "built"]
    of_each_process = Counter(importers.values())  # Ray may give the units to one process of the node, or to two
    assert of_each_process and set(of_each_process.values()) == {1}, "what a process imports is for all its units"
    shared = Store.open(tmp_path / "shared")
    assert [str(entry) for entry in shared.tags()] == ["linear:latest"]
    fresh = {**own, "AOTC_CACHE_DIR": str(tmp_path / "another-host")}
    again = finish(start_build(manifest, url, nodes, "--json", **fresh))
    assert [one["status"] for one in json.loads(again.stdout)["units"]] == ["cached", "cached"]
    assert wait_until_none_names("aotc.compiler.workers.fork_server", 10, of_the_nodes) == []
    nodes.kill(node)


def test_ray_that_is_not_installed_is_named(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = run_here("build", manifest, "--store", tmp_path / "store", "--executor", "ray", cwd=manifest.parent)
    assert ran.returncode == 2
    assert "needs Ray, which cannot be imported: " in ran.stderr
    assert "pip install 'aotc[ray]'" in ran.stderr
