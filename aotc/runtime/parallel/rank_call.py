"""A call of one rank's compiled code."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.call_table.dispatch import Plan
from aotc.errors import AotcError, BindError, GroupError, LibraryError
from aotc.machine.cuda_capture import is_captured
from aotc.reads.tensors import dtype_name
from aotc.runtime.call import CompiledCall
from aotc.runtime.compiled_regions import CompiledRegions, RegionForward
from aotc.runtime.parallel.graph_release import released_with
from aotc.runtime.parallel.ranks import RanksOfLoad
from aotc.runtime.parallel.watching import Watch

if TYPE_CHECKING:
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint

_OF_COLLECTIVES = re.compile(r"gloo|nccl|process ?group|connection (closed|reset)|peer|all_?reduce", re.IGNORECASE)


class _InRanks(CompiledCall):
    """A call in which all ranks take part.

    On a GPU it returns when its results are there: a rank that is gone can only then be an error, and not a result that
    was never computed.

    Raises GroupError, beside what the call itself raises, where another rank fails in the same call or is gone.
    """

    def __init__(self, *args: Any, ranks: RanksOfLoad, **kwargs: Any) -> None:
        ranks.agree("bound", "")  # a capture runs the code, which waits for all ranks
        self._ranks, self._waiting = ranks, Watch(ranks)
        with self._waiting:
            super().__init__(*args, **kwargs)
        released_with(ranks.group, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_watched(super().__call__, args, kwargs)

    def run_watched(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)` as a call in which all ranks take part, or within one that this thread makes."""
        thread = self._waiting.of_thread
        if thread.is_inside:
            return run(*args, **kwargs)
        try:
            with self._waiting:
                return self._to_its_end(run, args, kwargs)
        except GroupError:
            self.release()  # the abort of a communicator waits for its graphs
            raise
        finally:
            thread.is_inside = False  # also where Ctrl-C has ended the watch's __enter__ or __exit__

    def _to_its_end(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            result = run(*args, **kwargs)
            if self.device.type == "cuda" and not is_captured(self.device):
                torch.cuda.current_stream(self.device).synchronize()
        except (LibraryError, RuntimeError) as error:
            raise self._told(error) from error
        return result

    def _told(self, error: Exception) -> Exception:
        words = error.message if isinstance(error, LibraryError) else str(error)
        ours = isinstance(error, AotcError) and not isinstance(error, LibraryError)  # about the call, not a collective
        if ours or not _OF_COLLECTIVES.search(words):
            return error
        if self._waiting.failure is not None:
            return self._waiting.failure
        failure = GroupError(
            f"a collective of rank {self._ranks.rank} failed: {words.splitlines()[0][:500]}",
            hint="another rank has ended or has aborted the group: see its log, and start the processes again",
        )
        self._waiting.failure = failure
        return failure

    def release(self) -> None:
        """Let go of graphs, which hold collectives; no call can run after that."""
        self._waiting.failure = self._waiting.failure or GroupError(
            f"the process group of {self!r} was destroyed", hint="call aotc.load again with a new group"
        )
        for call in self.parts():
            call._attached = []

    def _part_of(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.module is not None and any(spec.subclass is not None for spec in self.artifact.state):
            raise BindError(
                "the tensors within DTensors of a module cannot be replaced",
                hint="load the weights into the module: compiled code uses its tensors where they lie",
            )
        return self._ranks.part_of(checkpoint, self.artifact)


class ParallelCall(_InRanks):
    """A model that is compiled whole."""

    def agree(self, leaves: list[Any]) -> None:
        self._waiting.agree(_form(leaves), leaves)

    def _plan(self, leaves: list[Any]) -> Plan | None:
        plan = super()._plan(leaves)
        if plan is not None:  # else a miss, which the other ranks are told of
            self.agree(leaves)
        return plan


class ParallelRegions(_InRanks, CompiledRegions):
    """A model by regions: the collectives may be in these, or in the rest.

    A call of the module itself is watched as one of this object: its `forward` is a `WatchedForward` while a region is
    attached.
    """

    def attach(self, names: Collection[str] | None = None) -> None:
        super().attach(names)
        if not isinstance(vars(self.module).get("forward"), WatchedForward):
            vars(self.module)["forward"] = WatchedForward(self.module, self)

    def _to_its_end(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        self._waiting.agree(_form(leaves), leaves)
        return super()._to_its_end(run, args, kwargs)

    def detach(self, names: Collection[str] | None = None) -> None:
        super().detach(names)
        forward = vars(self.module).get("forward")
        if not self._attached_names and isinstance(forward, WatchedForward):
            forward.put_back()


def _form(leaves: Sequence[Any]) -> str:
    return ", ".join(
        f"{dtype_name(leaf.dtype)}{list(leaf.shape)}" if isinstance(leaf, Tensor) else f"{leaf!r:.40}"
        for leaf in leaves
    )


class WatchedForward(RegionForward):
    """The forward of a model of which regions are compiled: the module's own, watched."""

    def __init__(self, module: nn.Module, model: ParallelRegions) -> None:
        super().__init__(module)
        self._before = vars(module).get("forward")  # as another library has set it
        self.__wrapped__ = module.forward
        self._run_watched = model.run_watched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_watched(self.__wrapped__, args, kwargs)

    def put_back(self) -> None:
        del vars(self.instance)["forward"]
        if self._before is not None:
            vars(self.instance)["forward"] = self._before
