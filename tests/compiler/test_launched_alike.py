"""How all kinds of ranks of one unit are launched."""

from __future__ import annotations

from aotc.compiler.workers.unit_process import _launched_alike
from aotc.provenance import Smoked
from aotc.records import LaunchPick

GRAPHS = LaunchPick(graph=True, sizes=({"seq": 5},))


def test_kinds_that_agree_keep_their_launch() -> None:
    assert _launched_alike([Smoked(GRAPHS)]).launch == GRAPHS
    assert _launched_alike([Smoked(GRAPHS), Smoked(GRAPHS)]).launch == GRAPHS
    assert _launched_alike([Smoked(), Smoked()]).launch is None


def test_a_kind_without_graphs_takes_them_from_all() -> None:
    """A graph with a collective needs the other ranks to launch the same graph."""
    launch = _launched_alike([Smoked(GRAPHS), Smoked(LaunchPick(graph=False))]).launch
    assert launch is not None and not launch.graph and launch.sizes == ()
