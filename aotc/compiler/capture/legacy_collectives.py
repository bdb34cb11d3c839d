"""Collectives of `torch.distributed` that cannot be captured: which one it is, and what to call in its place.

torch.export rewrites the most common ones to functional collectives: `all_reduce`, `all_gather`,
`all_gather_into_tensor`, `reduce_scatter_tensor`, `all_to_all_single`. Others end in errors of many kinds, or in
operators that take a process group as an object, which no library can hold.
"""

from __future__ import annotations

import re
import traceback
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import fx

from aotc.compiler.explain_failure import line_named, model_line
from aotc.errors import BuildError
from aotc.models.fake_ranks import PARALLEL

_SUM, _GATHER = 'all_reduce(tensor, "sum", group)', "all_gather_tensor(tensor, dim, group)"
_SCATTER = 'reduce_scatter_tensor(tensor, "sum", dim, group)'
_EXCHANGE = "all_to_all_single(tensor, received_sizes, sent_sizes, group)"
_BROADCAST = "broadcast(tensor, source, group)"

_FUNCTIONAL = MappingProxyType(
    {
        "all_reduce": _SUM,
        "all_reduce_coalesced": _SUM,
        "reduce": f"{_SUM}, which every rank gets",
        "all_gather": _GATHER,
        "all_gather_coalesced": _GATHER,
        "all_gather_into_tensor": _GATHER,
        "all_gather_single": _GATHER,
        "gather": f"{_GATHER}, which every rank gets",
        "reduce_scatter": _SCATTER,
        "reduce_scatter_tensor": _SCATTER,
        "reduce_scatter_single": _SCATTER,
        "all_to_all": _EXCHANGE,
        "all_to_all_single": _EXCHANGE,
        "broadcast": _BROADCAST,
        "scatter": f"{_BROADCAST}, of which each rank takes its part",
    }
)
"""By the functions of `torch.distributed` and of `torch.distributed.nn.functional`: the functional collective."""

_TO_ONE_RANK = (
    "a library has no transfer from one rank to another: use an all_to_all_single of "
    "torch.distributed._functional_collectives with sizes of 0, or compile the parts around it, by `regions`"
)
_OBJECTS = "exchange objects before the call, and give forward what they decide, as inputs or as attributes"
_OTHERS = MappingProxyType(
    {
        **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv"), _TO_ONE_RANK),
        **dict.fromkeys(("barrier", "monitored_barrier"), "leave it out: each collective waits for all ranks"),
        **dict.fromkeys(
            (
                *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
                *("send_object_list", "recv_object_list"),
            ),
            _OBJECTS,
        ),
    }
)

_OPERATORS = MappingProxyType(
    {
        "allreduce_": "all_reduce",
        "allreduce_coalesced_": "all_reduce_coalesced",
        "allgather_": "all_gather",
        "_allgather_base_": "all_gather_into_tensor",
        "allgather_coalesced_": "all_gather_coalesced",
        "allgather_into_tensor_coalesced_": "all_gather_coalesced",
        "reduce_scatter_": "reduce_scatter",
        "_reduce_scatter_base_": "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor",
        "alltoall_": "all_to_all",
        "alltoall_base_": "all_to_all_single",
        "broadcast_": "broadcast",
        "reduce_": "reduce",
        "gather_": "gather",
        "scatter_": "scatter",
        "send": "send",
        "recv_": "recv",
        "recv_any_source_": "recv",
        "barrier": "barrier",
        "monitored_barrier_": "monitored_barrier",
    }
)
"""Of torch's operators on process groups (`c10d::…`): the functions that call them."""

_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/nn/functional.py")
_IN_GRAPH = re.compile(r"Node\.meta (?P<name>\w+?)(_\d+)? has invalid val field .*ScriptObject", re.DOTALL)


def collective_error(error: Exception) -> BuildError | None:
    """The error for a collective in which torch.export has failed, if it has."""
    if found := _IN_GRAPH.search(str(error)):
        operator = next((name for name in _OPERATORS if name.rstrip("_") == found["name"].rstrip("_")), "")
        return _refused(_OPERATORS[operator], "", "") if operator else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.endswith(_FILES) and (frame.name in _FUNCTIONAL or frame.name in _OTHERS):
            if not dist.is_initialized():
                return BuildError(
                    f"the model calls torch.distributed.{frame.name}, and was not built for ranks",
                    hint=PARALLEL,
                    stage="export",
                    source=model_line(error),
                )
            first = (str(error).strip().splitlines() or [""])[0]
            module = "torch.distributed.nn.functional." if frame.filename.endswith(_FILES[1]) else ""
            return _refused(f"{module}{frame.name}", f"{type(error).__name__}: {first[:300]}", model_line(error))
    return None


def check_collectives(graph: fx.GraphModule) -> None:
    """Raises BuildError for a collective that was captured with its process group as an object."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            target: Any = node.target
            if node.op == "call_function" and getattr(target, "namespace", "") == "c10d":
                name = target._schema.name.partition("::")[2]
                raise _refused(_OPERATORS.get(name, name), "", line_named(node.meta.get("stack_trace") or ""))


def _refused(name: str, why: str, source: str) -> BuildError:
    plain = name.rpartition(".")[2]
    full = name if name != plain else f"torch.distributed.{name}"
    functional = _FUNCTIONAL.get(plain)
    hint = f"call torch.distributed._functional_collectives.{functional}" if functional else _OTHERS.get(plain, "")
    return BuildError(
        f"the model calls {full}, which cannot be captured{f': {why}' if why else ''}",
        hint=hint,
        stage="export",
        source=source,
    )
