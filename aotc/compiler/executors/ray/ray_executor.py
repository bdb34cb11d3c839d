"""Units on a Ray cluster: each is a task with the resource request of its target.

Ray ships the code (`runtime_env`), schedules, tries again when a node dies, and carries results and progress.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import aotc
from aotc.compiler.autotune.shared_picks import Answers
from aotc.compiler.executors.ray.node import node_variables
from aotc.compiler.executors.ray.requests import Ask, RayOptions, ask_for, node_lines, node_resources, units_at_a_time
from aotc.compiler.executors.ray.task import run
from aotc.compiler.messages import FinishedUnit, NodeAnswer, NodeProgress, NodeRequest, OnProgress, Task, Unit
from aotc.compiler.workers.unit_process import work_folder
from aotc.errors import BuildError, Issue
from aotc.store.remote.staging import Staging

MOST = 1000
"""Units that are submitted to Ray at a time, each watched by a thread; Ray queues those that no node can take yet."""

RETRIES = 3
"""How often a unit is tried again, after its node or its process died."""

_OUR_VARIABLES = ("AOTC_REMOTE_", "AOTC_SINGLE_WRITER")

SLICE = 0.5  # seconds between a waiting thread's checks whether the build was ended
GRACE = 5.0  # seconds for cancelled tasks to end their processes


class RayExecutor:
    """Compiles on a cluster. Connects, and checks that the cluster has a node for each unit's target.

    With `share`, units take the picks of finished ones. With `staging`, nodes store their units at its URL, else
    results come back. `used`: bytes of memory by unit name; `exclude`: a folder that is not shipped.

    Raises BuildError where Ray is not installed, the cluster cannot be reached, or it has no node for a target.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        folder: Path,
        options: RayOptions,
        *,
        share: bool = True,
        staging: Staging | None = None,
        exclude: Path | None = None,
        used: Mapping[str, int] | None = None,
    ) -> None:
        self._ray = _import_ray()
        self._staging = staging
        root = _working_folder(units, folder)
        self._folder = os.path.relpath(folder, root)
        self._connect(units, root, options, exclude)
        try:
            nodes = [node_resources(node) for node in self._ray.nodes() if node["Alive"]]
            self._asks = {
                unit.key: ask_for(unit, options.asks, nodes, (used or {}).get(unit.name, 0)) for unit in units
            }
            if not options.wait:
                _check_cluster(units, self._asks, nodes)
            self.slots = max(1, min(len(units), MOST))
            self.parallel = max(1, min(len(units), units_at_a_time(list(self._asks.values()), nodes)))
            self._ended = False
            self._lock = threading.Lock()
            self._running: set[Any] = set()
            self._listeners: dict[str, OnProgress] = {}
            self._queue = self._open_queue()
            self._measured = self._open_measured() if share else None
        except BaseException:
            self._ray.shutdown()
            raise
        self._listening = threading.Thread(target=self._listen, name="aotc ray progress", daemon=True)
        self._listening.start()

    # -- the cluster --------------------------------------------------------------------------------------------------

    def _connect(self, units: Sequence[Unit], root: Path, options: RayOptions, exclude: Path | None) -> None:
        address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
        environment = _runtime_env(units, root, options, exclude)
        try:
            self._ray.init(address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises many kinds: no cluster, another version, a folder that is too large
            raise BuildError(
                f"no connection to the Ray cluster at {address}: {_first_line(error)}",
                hint="start one with `ray start --head`, or name it with --address or RAY_ADDRESS; the shipped folder "
                f"is {root}: leave large files out of it with .gitignore",
            ) from error

    def _open_queue(self) -> Any:
        """The queue for progress, on the head node, without which no unit can run."""
        from ray.util.queue import Queue

        return Queue(actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}})

    def _open_measured(self) -> Any:
        on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
        return self._ray.remote(Answers).options(**on_head).remote()

    def _listen(self) -> None:
        from ray.util.queue import Empty

        while not self._ended:
            try:
                told: NodeProgress = self._queue.get(timeout=SLICE)
            except Empty:
                continue
            except Exception:
                return  # the queue's node is gone; units continue without progress
            listener = self._listeners.get(told.key)
            if listener is not None:
                listener(told.progress)

    @property
    def _url(self) -> str | None:
        return None if self._staging is None else self._staging.url

    # -- the executor -------------------------------------------------------------------------------------------------

    @contextmanager
    def compile(self, task: Task, on_progress: OnProgress) -> Iterator[FinishedUnit]:
        answer = self._answer(task, on_progress)
        task.log.write_bytes(answer.log)
        if answer.error is not None:
            raise answer.error.with_fields(unit=task.unit.name, log=str(task.log))
        compiled = answer.compiled
        assert compiled is not None
        if compiled.stored is not None:
            self._fetch(task.unit)  # this host publishes the bundle
            yield compiled
            return
        assert compiled.costs is not None
        # Move the begin to this host's clock, and leave out the wait for a node.
        compiled.costs.began = time.time() - (answer.ended - compiled.costs.began)
        with work_folder() as work:
            for name, data in answer.files.items():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                (work / name).write_bytes(data)
            yield replace(compiled, folder=work)

    def _fetch(self, unit: Unit) -> None:
        if self._staging is None or not self._staging.fetch([unit.key]):
            raise BuildError(
                f"the node has stored {unit.key}, but it is not complete in the store",
                hint="another program deletes from that store, or the nodes and this host use different stores",
                unit=unit.name,
                stage="store",
                source="",
            )

    def raise_if_ended(self) -> None:
        if self._ended:
            raise KeyboardInterrupt

    def end(self) -> None:
        with self._lock:
            self._ended = True
            running = list(self._running)
        for force in (False, True):
            for reference in running:
                with suppress(Exception):
                    self._ray.cancel(reference, force=force)
            if running:
                with suppress(Exception):
                    _, running = self._ray.wait(running, num_returns=len(running), timeout=GRACE, fetch_local=False)

    def close(self) -> None:
        self.end()
        with suppress(Exception):
            self._queue.shutdown(force=True)
        self._ray.shutdown()

    def _answer(self, task: Task, on_progress: OnProgress) -> NodeAnswer:
        unit, ask = task.unit, self._asks[task.unit.key]
        variables = node_variables(ask.num_cpus)
        request = pickle.dumps(NodeRequest(unit, self._folder, task.settings, self._url, variables))
        options = {**ask.options(), "max_retries": RETRIES, "name": unit.name}
        with self._lock:
            self.raise_if_ended()
            self._listeners[unit.key] = on_progress
            reference = self._ray.remote(run).options(**options).remote(request, variables, self._queue, self._measured)
            self._running.add(reference)
        try:
            while not self._ray.wait([reference], timeout=SLICE)[0]:
                self.raise_if_ended()
            self.raise_if_ended()
            answer: NodeAnswer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self.raise_if_ended()
            raise _lost(unit, error) from error
        finally:
            with self._lock:
                self._running.discard(reference)
                self._listeners.pop(unit.key, None)
        return answer


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise BuildError(
            f"`--executor ray` needs Ray, which cannot be imported: {error}", hint="pip install 'aotc[ray]'"
        ) from error
    return ray


def _lost(unit: Unit, error: Exception) -> BuildError:
    return BuildError(
        f"the cluster could not compile the unit: {type(error).__name__}: {_first_line(error)}",
        hint=f"a unit is tried {RETRIES + 1} times if nodes die; see `ray list tasks` and the nodes' logs",
        unit=unit.name,
        stage="cluster",
        source="",
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)[
        :500
    ]


# -- the shipped files ------------------------------------------------------------------------------------------------


def _in_a_job() -> bool:
    """Whether `ray job submit` started this process: Ray has then shipped the working folder already."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def _working_folder(units: Sequence[Unit], folder: Path) -> Path:
    """The folder to ship: the manifest's, or the current folder if model code comes from there.

    Raises BuildError where neither contains both.
    """
    here = Path.cwd().resolve()
    folder = folder.resolve()
    if not _in_a_job() and (folder == here or not _comes_from(units, here, folder)):
        return folder
    if folder.is_relative_to(here):
        return here
    raise BuildError(
        f"model code comes from {here}, and the manifest lies in {folder}: a cluster gets one folder",
        hint="run `aotc build` from a folder that holds both, or put the code beside the manifest",
    )


def _comes_from(units: Sequence[Unit], here: Path, folder: Path) -> bool:
    """Whether code of a model lies below `here` and not below the manifest's folder."""
    names = {name for unit in units for name in unit.factors.get("sources", {})}
    files = [Path(file).resolve() for name in names if (file := getattr(sys.modules.get(name), "__file__", None))]
    for factory in {unit.spec.factory.partition(":")[0] for unit in units}:
        if factory.endswith(".py") and not (folder / factory).is_file():
            files.append((here / factory).resolve())
    installed = tuple(Path(place).resolve() for place in sys.path if "site-packages" in place)
    ours = (file for file in files if not any(file.is_relative_to(place) for place in installed))
    return any(file.is_relative_to(here) and not file.is_relative_to(folder) for file in ours)


def _runtime_env(units: Sequence[Unit], root: Path, options: RayOptions, exclude: Path | None) -> dict[str, Any]:
    """Ray's runtime_env for each node: the folder, this aotc, the variables in the units' keys, and aotc's limits; no
    credentials, which a cluster shows to its users."""
    variables = {name: value for unit in units for name, value in unit.factors.get("variables", {}).items()}
    variables |= {name: value for name, value in os.environ.items() if name.startswith(_OUR_VARIABLES)}
    given = dict(options.runtime_env)
    environment: dict[str, Any] = {"env_vars": {**variables, **given.pop("env_vars", {})}}
    if not _in_a_job():
        excluded = ["**/__pycache__", ".git", *given.pop("excludes", [])]
        if exclude is not None and exclude.resolve().is_relative_to(root):
            excluded.append(f"/{exclude.resolve().relative_to(root)}")
        environment |= {"working_dir": str(root), "excludes": excluded}
        environment["py_modules"] = [str(Path(aotc.__file__).parent), *given.pop("py_modules", [])]
    return {**environment, **given}


def read_runtime_env(path: Path) -> dict[str, Any]:
    """Read a mapping in YAML or JSON. Raises BuildError."""
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BuildError(f"{path} cannot be read: {_first_line(error)}", hint="write YAML or JSON") from error
    if not isinstance(read, dict) or "working_dir" in read:
        raise BuildError(
            f"{path} holds {'`working_dir`' if isinstance(read, dict) else 'no mapping'}",
            hint="write fields of Ray's runtime_env, like `pip: [transformers]`; aotc ships the working folder itself",
        )
    return read


def _check_cluster(units: Sequence[Unit], asks: Mapping[str, Ask], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises BuildError for targets whose resource request no node can satisfy."""
    hopeless = {unit.target.name: asks[unit.key] for unit in units if not any(asks[unit.key].fits(n) for n in nodes)}
    if not hopeless:
        return
    target = next(iter(hopeless))
    raise BuildError(
        f"the cluster has no node for {', '.join(hopeless)}",
        hint=f"start such a node (`ray start --address=… --resources='{{\"{target}\": 4}}'` starts one for {target}), "
        "ask for less with --ask, or --wait-for-nodes if one will come",
        issues=(
            *(Issue(f"{name} asks for {ask}") for name, ask in hopeless.items()),
            *(Issue(f"a node has {line}") for line in node_lines(nodes)),
        ),
    )
