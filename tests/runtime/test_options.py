"""Options of `aotc.load` that are in groups, and those that it does not have. No store is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotc


@pytest.mark.parametrize("function", [aotc.load, aotc.prepare, aotc.fetch])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"trusted_keys": ["a.pub"]}, "write trust=aotc.Trust(keys=['a.pub'])"),
        ({"require_verified": True, "allow_untested": True}, "aotc.Trust(require_verified=True, allow_untested=True)"),
        ({"signed_after": "2026-01-01"}, "write trust=aotc.Trust(signed_after='2026-01-01')"),
    ],
)
def test_an_option_by_its_old_name_is_refused_with_its_new_spelling(
    function: Callable[..., Any], old: dict[str, Any], new: str
) -> None:
    with pytest.raises(aotc.BindError) as caught:
        function("oci://localhost/model", **old)
    assert new in caught.value.hint
    assert isinstance(caught.value, TypeError)
    assert all(name in caught.value.message for name in old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"outputs": "view", "cuda_graphs": "always"}, "graphs=aotc.Graphs(use='always', outputs='view')"),
        ({"capture": "lazy", "group": 3}, "graphs=aotc.Graphs(capture='lazy'), ranks=aotc.Ranks(group=3)"),
        ({"group_timeout": 5, "group": 3}, "ranks=aotc.Ranks(group=3, timeout=5)"),
        ({"group_timeout": 5}, "ranks=aotc.Ranks(group=GROUP, timeout=5)"),
    ],
)
def test_a_function_without_the_option_names_the_one_that_has_it(old: dict[str, Any], new: str) -> None:
    calls: list[Any] = [aotc.load, aotc.prepare, aotc.fetch]
    hints = []
    for function in calls:
        with pytest.raises(aotc.BindError) as caught:
            function("oci://localhost/model", **old)
        hints.append(caught.value.hint)
    assert hints == [f"write {new}", f"give {new} to aotc.load", f"give {new} to aotc.load"]


def test_a_prepared_load_shows_the_new_spelling_too() -> None:
    prepared: Any = object.__new__(aotc.prepare.__globals__["Prepared"])
    with pytest.raises(aotc.BindError, match=r"aotc\.Prepared\.load has no option group") as caught:
        prepared.load(group=3)
    assert caught.value.hint == "write ranks=aotc.Ranks(group=3)"
    assert caught.value.expected == "module, device, on_miss, concurrency, ignore, graphs, ranks"
    with pytest.raises(aotc.BindError) as caught:
        prepared.load(trusted_keys="a.pub")
    assert caught.value.hint == "give trust=aotc.Trust(keys='a.pub') to aotc.prepare"


@pytest.mark.parametrize("function", [aotc.load, aotc.prepare, aotc.fetch])
def test_an_option_that_never_was_is_refused_with_the_nearest_name(function: Callable[..., Any]) -> None:
    with pytest.raises(aotc.BindError, match=f"aotc.{function.__name__} has no option trusts") as caught:
        function("model", trusts=None)
    assert caught.value.hint == "did you mean trust?"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"graphs": aotc.Graphs(use="allways")}, "graphs.use is 'allways', and may be 'picked' or 'always' or 'never'"),  # type: ignore[arg-type]
        ({"trust": "a.pub"}, "trust is 'a.pub', and may be an aotc.Trust"),
        ({"ranks": torch.nn.Identity()}, "ranks is a Identity, and may be an aotc.Ranks"),
    ],
)
def test_what_is_no_group_or_has_a_value_that_it_cannot_have_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(aotc.BindError) as caught:
        aotc.load("model", **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("function", [aotc.load, aotc.prepare, aotc.fetch])
def test_keys_in_the_place_of_trust_are_refused(function: Callable[..., Any]) -> None:
    name = "fetch" if function is aotc.fetch else "load"
    said = rf"(?s)aotc\.{name} was called .*trust is \['a.pub'\], and may be an aotc.Trust"
    with pytest.raises(aotc.BindError, match=said):
        function("oci://localhost/model", trust=["a.pub"])


def test_groups_are_compared_by_what_they_say() -> None:
    """So that a service may keep one as a constant."""
    assert aotc.Trust(keys="a.pub") == aotc.Trust(keys="a.pub") != aotc.Trust()
    with pytest.raises(AttributeError):
        aotc.Graphs().use = "never"  # type: ignore[misc]
