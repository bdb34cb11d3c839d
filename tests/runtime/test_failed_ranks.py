"""What the other ranks are told of a load that fails on one of them, through the store of their process group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from aotc.errors import AotcError, BindError, GroupError, Issue, StoreError
from aotc.runtime.parallel.ranks import Ranks


def ranks_of_one_group(count: int) -> list[Ranks]:
    """As after `Ranks(group, 5)` in each process."""
    store = dist.HashStore()
    found = []
    for rank in range(count):
        ranks = Ranks.__new__(Ranks)
        ranks.group, ranks.store, ranks.rank, ranks.size, ranks.timeout = object(), store, rank, count, 5.0
        found.append(ranks)
    return found


def error_on_rank_0(*failed: AotcError) -> GroupError:
    first, *others = ranks_of_one_group(1 + len(failed))
    for ranks, error in zip(others, failed, strict=True):
        ranks.fail(error)
    with pytest.raises(GroupError) as caught:
        first.agree("bound", "")
    return caught.value


def test_the_place_and_both_values_of_a_finding_reach_the_other_ranks_and_are_shown_once() -> None:
    difference = Issue("is 16, built with 8", "down.in_features", "8", "16", "split it over 2 ranks")
    error = error_on_rank_0(BindError("the module is not the one that was built", issues=(difference,)))
    assert error.issues == (
        Issue("is 16, built with 8", "rank 1: down.in_features", "8", "16", "split it over 2 ranks"),
    )
    assert str(error).count("the module is not the one") == 1 == str(error).count("is 16, built with 8")
    assert error.ranks == (1,)


def test_an_error_without_findings_is_shown_once_with_its_hint() -> None:
    error = error_on_rank_0(StoreError("no space is left", hint="free some"))
    assert str(error) == (
        "the load failed on rank 1: no space is left\n  hint: nothing was loaded on any rank; free some"
    )


def test_equal_errors_of_ranks_are_one_and_others_are_listed() -> None:
    error = error_on_rank_0(StoreError("no space is left"), StoreError("no space is left"), StoreError("no such file"))
    assert error.message == "the load failed on rank 1, 2: no space is left"
    assert error.issues == (Issue("no such file", "rank 3"),) and error.ranks == (1, 2, 3)


def test_a_load_that_fails_before_the_dim_of_a_mesh_is_known_is_told_along_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four ranks as 2 × 2, that one fails whose coordinates are (1, 0)."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    stores = {name: dist.HashStore() for name in ("data 0", "data 1", "tensor 0", "tensor 1")}
    ranks = {place: Ranks(mesh_at(*place, stores), 5) for place in ((0, 0), (1, 0), (1, 1))}
    ranks[1, 0].fail(StoreError("no such tag"))
    for place, dim in (((0, 0), "data"), ((1, 1), "tensor")):
        other = ranks[place]
        other._use(other._given.get_group(dim))
        other.store = other._of_dims[dim][1]
        with pytest.raises(GroupError, match=r"failed on rank [01]: no such tag"):
            other.agree("record", "")


def mesh_at(data: int, tensor: int, stores: dict[str, dist.HashStore]) -> SimpleNamespace:
    """The device mesh of one of four ranks, as far as a load looks at it."""

    def group(rank: int, store: dist.HashStore) -> SimpleNamespace:
        return SimpleNamespace(rank=lambda: rank, size=lambda: 2, get_group_store=lambda: store)

    groups = {"data": group(data, stores[f"data {tensor}"]), "tensor": group(tensor, stores[f"tensor {data}"])}
    return SimpleNamespace(ndim=2, mesh_dim_names=tuple(groups), get_group=groups.__getitem__)
