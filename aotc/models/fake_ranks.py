"""Ranks of a parallel model without other processes: a process group of torch's `fake` backend.

A build needs one process and one GPU, or none: functional collectives are captured as operators that name a group, and
what runs in a build runs with collectives of one process (an all-reduce gives its input). Where a process group exists
already, as in the processes of `aotc verify`, the factory gets that one.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from aotc.errors import ManifestError
from aotc.records import Parallel

_C = cast("Any", torch._C)._distributed_c10d

ARGUMENTS = ("group", "mesh", "rank", "world_size")
"""Parameters of a factory that are given where it has them and the manifest's `kwargs` do not: the process group, the
device mesh, this process's rank, and the number of ranks."""

FAKE = "fake"

NO_GROUP = "process group has not been initialized"
"""In torch's error for a collective in a process without a group."""
PARALLEL = (
    "write `parallel: {tensor: N}` into the model's entry, for the code of one of N ranks: processes that build are "
    "then ranks of a group"
)


def parallel_of(form: Mapping[str, int]) -> Parallel | None:
    """The manifest's `parallel` as a record."""
    return next((Parallel(dim, size) for dim, size in form.items()), None)


def become_rank(parallel: Parallel, rank: int = 0) -> None:
    """Let this process be that rank, unless a process group of real ranks exists.

    Raises ManifestError where such a group has another size.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        size = dist.get_world_size()
        if dist.get_backend() != FAKE:
            if size != parallel.size:
                raise ManifestError(
                    f"`parallel` has {parallel.size} ranks, and the process group of this process has {size}",
                    hint="start as many processes as the manifest has ranks, or leave the process group out",
                )
            return
        if (size, dist.get_rank()) == (parallel.size, rank):
            _name_group(parallel)
            return
        leave_group()
    dist.init_process_group(FAKE, rank=rank, world_size=parallel.size, store=FakeStore())
    _exchange_by_sizes()
    _scatter_own_parts()
    _name_group(parallel)


def leave_group() -> None:
    """End this process's group of fake ranks, if it has one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_backend() == FAKE:
        for name in _named:
            _C._unregister_process_group(name)
        _named.clear()
        dist.destroy_process_group()


@functools.cache
def _exchange_by_sizes() -> None:
    """Let `torch.distributed.all_to_all_single` without sizes give what it gives with equal ones, as in captured code:
    a fake group gives the rank's part for each rank with sizes, and the whole input without."""
    import torch.distributed as dist

    exchange: Callable[..., Any] = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if dist.is_initialized() and dist.get_backend() == FAKE:
            size = dist.get_world_size(group)
            output_split_sizes = output_split_sizes or [output.shape[0] // size] * size
            input_split_sizes = input_split_sizes or [input.shape[0] // size] * size
        return exchange(output, input, output_split_sizes, input_split_sizes, group, async_op)

    dist.all_to_all_single = all_to_all_single


@functools.cache
def _scatter_own_parts() -> None:
    """Let a rank's shard of a DTensor be cut from what this process has: a fake group leaves the shards of ranks other
    than the first unwritten, and weights would be whatever the memory holds."""
    from torch.distributed.tensor import placement_types

    module = cast("Any", placement_types)
    scatter = module.mesh_scatter

    @functools.wraps(scatter)
    def mesh_scatter(
        output: torch.Tensor, scatter_list: list[torch.Tensor], mesh: Any, mesh_dim: int = 0, *rest: Any, **named: Any
    ) -> Any:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_backend() != FAKE:
            return scatter(output, scatter_list, mesh, mesh_dim, *rest, **named)
        output.copy_(scatter_list[mesh.get_local_rank(mesh_dim)])
        return None

    module.mesh_scatter = mesh_scatter


@contextmanager
def group_left() -> Iterator[None]:
    """End a group of fake ranks that was begun within."""
    try:
        yield
    finally:
        leave_group()


_named: set[str] = set()
"""The names by which compiled code finds the fake group, where it runs in a build."""


def _name_group(parallel: Parallel) -> None:
    if parallel.group_name not in _named:
        _C._register_process_group(parallel.group_name, torch.distributed.group.WORLD)
        _named.add(parallel.group_name)


_mesh_device = ["cpu"]


def make_meshes_on(device: str) -> None:
    """Let meshes of fake ranks be of devices of this type, from now on: DTensors are moved to those of their mesh."""
    _mesh_device.append(device)


def rank_arguments(factory: Callable[..., Any], parallel: Parallel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `ARGUMENTS` that the factory has as parameters, and that `kwargs` lack."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    device = "cuda" if dist.get_backend() == "nccl" else _mesh_device[-1]
    values: dict[str, Callable[[], Any]] = {
        "group": lambda: dist.group.WORLD,
        "mesh": lambda: init_device_mesh(device, (parallel.size,), mesh_dim_names=(parallel.dim,)),
        "rank": dist.get_rank,
        "world_size": dist.get_world_size,
    }
    return {name: make() for name, make in values.items() if name in parameters and name not in kwargs}


@contextmanager
def variables_of_rank() -> Iterator[None]:
    """Set the variables that torchrun would set, for a factory that reads them; those of a real group are there
    already. What else the factory sets stays.

    A process that builds has one GPU at most, which is device 0.
    """
    import torch.distributed as dist

    values = {}
    if dist.get_backend() == FAKE:
        values = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def makes_unsharded(factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the factory has such parameters, and all of them have defaults: without them it makes the whole model."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    own = [parameters[name] for name in ARGUMENTS if name in parameters and name not in kwargs]
    return bool(own) and all(parameter.default is not inspect.Parameter.empty for parameter in own)
