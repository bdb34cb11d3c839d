"""The ranks of a load: one process group, of which every member loads the same artifact."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from aotc.errors import AotcError, BindError, GroupError, Issue
from aotc.records import Artifact, Parallel

if TYPE_CHECKING:
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint

_C = cast("Any", torch._C)._distributed_c10d

_named: dict[str, weakref.ref[Any]] = {}
"""The process groups that compiled code finds, by the names in it."""

STEPS = ("record", "bound", "loaded")
"""The steps at which ranks wait for each other: before any loads, before any runs a collective, at the end."""

LONGEST_TEXT = 2000
"""Characters of a text that a rank tells the others of its failed load."""
MOST_ISSUES = 20


def process_group(group: Any, dim: str = "") -> Any:
    """The ProcessGroup, or that of a DeviceMesh's dim. Raises BindError."""
    if isinstance(group, dist.ProcessGroup):
        return group
    names = getattr(group, "mesh_dim_names", None)
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim == 1:
            return group.get_group()
        if dim and dim in (names or ()):
            return group.get_group(dim)
        raise BindError(
            f"the device mesh has the dims {', '.join(names or ()) or group.ndim}, and the code is for the dim `{dim}`",
            hint="give the process group: aotc.Ranks(mesh.get_group(DIM))",
        )
    raise BindError(
        f"ranks.group is {group!r:.100}; expected a ProcessGroup or a DeviceMesh",
        hint="call torch.distributed.init_process_group first, and give aotc.Ranks(torch.distributed.group.WORLD)",
    )


class RanksOfLoad:
    """The ranks of one load.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        size: the number of ranks.
        timeout: seconds that this rank waits for the others, in a load and in a call.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        """Raises BindError for what is not a process group."""
        if not dist.is_initialized():
            raise BindError(
                "a group was given, and torch.distributed is not initialised in this process",
                hint="call torch.distributed.init_process_group before aotc.load",
            )
        self._given = group
        self.timeout = timeout
        self.group: Any = None
        self.parallel: Parallel | None = None
        self._of_dims: dict[str, tuple[int, Any]] = {}
        """Of a mesh of several dims: this process's rank along each, and the store. The artifact names one of them."""
        if isinstance(group, dist.ProcessGroup) or getattr(group, "ndim", 1) == 1:
            self._use(process_group(group))
        else:
            for dim in getattr(group, "mesh_dim_names", None) or ():
                along = process_group(group, dim)
                self._of_dims[dim] = along.rank(), self._store_of(along)

    def _use(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    @functools.cached_property
    def store(self) -> Any:
        """The part of the group's store that is this load's."""
        return self._store_of(self.group)

    def _store_of(self, group: Any) -> Any:
        """The part of a group's store that is this load's: ranks that load one after another have the same number.

        It is counted in the store, since torchrun's outlives a group, and the next group has its name.
        """
        ours = PrefixStore("aotc", group.get_group_store())
        try:
            return PrefixStore(str(ours.add(f"loads/{group.rank()}", 1)), ours)
        except RuntimeError as error:
            raise self._not_heard_of([], error) from error

    # -- a load -------------------------------------------------------------------------------------------------------

    def join(self, artifact: Artifact, digest: str, device: torch.device) -> Artifact:
        """Take part in the load of this artifact, once all ranks say that they load the same. Gives this rank's.

        Raises BindError where the group does not fit the artifact, GroupError where another rank loads another
        artifact, has failed, or is not heard of.
        """
        parallel = artifact.parallel
        if parallel is None:
            raise BindError(
                f"`{artifact.model}` was not built for ranks, and a group was given",
                hint="leave `ranks` out; or build it with `parallel: {tensor: N}` in the manifest",
            )
        if self.group is None:
            self._use(process_group(self._given, parallel.dim))
            self.store = self._of_dims[parallel.dim][1]
        if self.size != parallel.size:
            raise BindError(
                f"the group has {self.size} ranks, and `{artifact.model}` was built for {parallel.size}",
                hint=f"start {parallel.size} processes, or build it with `parallel: {{{parallel.dim}: {self.size}}}`",
                expected=str(parallel.size),
                actual=str(self.size),
            )
        self._check_backend(device)
        self.parallel = parallel
        said = f"{artifact.model} {artifact.target} {digest}"
        for rank, other in enumerate(self.agree("record", said)):
            if other != said:
                raise GroupError(
                    f"rank {rank} loads {other}, rank {self.rank} loads {said}",
                    hint="load by a digest or by one fixed tag, from one store",
                    expected=said,
                    actual=other,
                )
        if self._backend(device) == "gloo":  # an abort of it does not end a collective that waits
            self.group._get_backend(device)._set_default_timeout(datetime.timedelta(seconds=self.timeout))
        self._name()
        return artifact.of_rank(self.rank)

    def _check_backend(self, device: torch.device) -> None:
        """Raises BindError for a group without collectives of tensors on the device."""
        backend = self._backend(device)
        if backend in ("", "fake"):
            here = backend or dist.get_backend(self.group)
            needs = "nccl" if device.type == "cuda" else "gloo"
            raise BindError(
                f"the group's backend {here} runs no collectives of tensors on {device.type}",
                hint=f"torch.distributed.init_process_group('{needs}')",
                expected=needs,
                actual=here,
            )

    def _backend(self, device: torch.device) -> str:
        try:
            return str(self.group._get_backend(device).name())
        except RuntimeError:
            return ""

    def is_capturable(self, device: torch.device) -> bool:
        """Whether collectives of tensors on the device can be recorded into a CUDA graph."""
        return self._backend(device) == "nccl"

    def _name(self) -> None:
        """Let compiled code find the group. Raises BindError where code that is loaded uses another one."""
        assert self.parallel is not None
        name = self.parallel.group_name
        known = _named[name]() if name in _named else None
        if known is self.group:
            return
        if known is not None and known in dist.distributed_c10d._world.pg_map:
            raise BindError(
                f"another process group is in use for the mesh dim `{self.parallel.dim}` in this process",
                hint="load all models of one mesh dim with one group",
            )
        if name in _named:
            _C._unregister_process_group(name)
        _C._register_process_group(name, self.group)
        _named[name] = weakref.ref(self.group)

    def part_of(self, checkpoint: Checkpoint, artifact: Artifact) -> Checkpoint:
        """This rank's part of a checkpoint of the whole model, as far as its tensors are split as DTensors."""
        if all(spec.subclass is None for spec in artifact.state):
            return checkpoint
        from aotc.runtime.parallel.slices import Sliced

        return Sliced(checkpoint, artifact.state, self.rank, self.size)

    def agree(self, step: str, said: str) -> list[str]:
        """What each rank says at a step, once all have said it. Raises GroupError for one that has failed, or that says
        nothing in time."""
        self._say(step, {"said": said})
        keys = [f"{step}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, datetime.timedelta(seconds=self.timeout))
        except (RuntimeError, dist.DistError) as error:
            raise self._not_heard_of(keys, error) from error
        answers = [json.loads(self.store.get(key)) for key in keys]
        if failed := {rank: answer for rank, answer in enumerate(answers) if "error" in answer}:
            raise _failed(failed)
        return [answer["said"] for answer in answers]

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one's load has failed. Those that wait for it raise GroupError."""
        if isinstance(error, GroupError) and getattr(error, "ranks", None):
            return  # the others wait for the same rank as this one did
        answer: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:LONGEST_TEXT]}
        if isinstance(error, AotcError):
            issues = [{name: text[:LONGEST_TEXT] for name, text in _facts(one)} for one in error.issues[:MOST_ISSUES]]
            answer = {"error": error.message[:LONGEST_TEXT], "hint": error.hint[:LONGEST_TEXT], "issues": issues}
        try:
            told = self._of_dims.values() if self.group is None else [(self.rank, self.store)]
            for (rank, store), step in itertools.product(told, STEPS):
                if not store.check([f"{step}/{rank}"]):
                    store.set(f"{step}/{rank}", json.dumps(answer))
        except (RuntimeError, dist.DistError):
            return  # the store is gone, and the others find that out

    def _say(self, step: str, answer: dict[str, Any]) -> None:
        try:
            self.store.set(f"{step}/{self.rank}", json.dumps(answer))
        except (RuntimeError, dist.DistError) as error:
            raise self._not_heard_of([], error) from error

    def _not_heard_of(self, keys: list[str], error: Exception) -> GroupError:
        try:
            silent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except (RuntimeError, dist.DistError):
            silent = []
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not silent:
            return GroupError(
                f"the store of the process group cannot be reached: {words}",
                hint="its process (mostly that of rank 0) has ended: see its log",
            )
        names = ", ".join(map(str, silent))
        return GroupError(
            f"rank {names} of {self.size} has not loaded the model within {self.timeout:g} s",
            hint="every rank of the group must call aotc.load with that group: see that rank's log; a slow one needs a "
            "longer `ranks.timeout`",
            ranks=tuple(silent),
        )


def _facts(issue: Issue) -> list[tuple[str, str]]:
    return [(name, getattr(issue, name)) for name in issue.__struct_fields__ if getattr(issue, name)]


def _failed(failed: dict[int, dict[str, Any]]) -> GroupError:
    """Of the ranks whose load failed: what each says once, and each finding with its place and both values."""
    first = next(iter(failed.values()))
    alike = [str(rank) for rank, answer in failed.items() if answer["error"] == first["error"]]
    issues = []
    for rank, answer in failed.items():
        found = [Issue(**one) for one in answer.get("issues", ())]
        if not found and answer["error"] != first["error"]:
            found = [Issue(answer["error"], hint=answer.get("hint", ""))]
        for one in found:
            where = f"rank {rank}: {one.where}" if one.where else f"rank {rank}"
            issues.append(Issue(one.message, where, one.expected, one.actual, one.hint))
    about = f"; {first['hint']}" if first.get("hint") else ""
    return GroupError(
        f"the load failed on rank {', '.join(alike)}: {first['error']}",
        hint=f"nothing was loaded on any rank{about}",
        issues=tuple(issues),
        ranks=tuple(failed),
    )


def forget(group: Any) -> None:
    """The group is about to be destroyed: compiled code finds it no longer."""
    for name, known in list(_named.items()):
        if group is None or known() is group:
            del _named[name]
            _C._unregister_process_group(name)
