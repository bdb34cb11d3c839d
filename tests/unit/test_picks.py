"""Picks as data: questions and answers, pins, the file that is committed beside a manifest."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from aotc.compiler.autotune import inductor_hooks
from aotc.compiler.autotune.algorithm_selection import failed_among
from aotc.compiler.autotune.inductor_hooks import padding_hooks
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.autotune.picks_file import pins_for, read_picks_file
from aotc.compiler.messages import NO_PINS, Pins
from aotc.errors import BuildError, CorruptError, ManifestError, SchemaVersionError
from aotc.picks import Candidate, Pick, PickFile, UnitPicks, decode_picks, launch_pick, pinned_launch
from aotc.records import LaunchPick
from aotc.tools.inspection.artifact_picks import changes, exported

FAST, SLOW = Candidate("triton_mm", {"BLOCK_M": 64}, ms=0.1), Candidate("mm", ms=0.15)
BROKEN = Candidate("triton_mm", {"BLOCK_M": 128})


def operator(*candidates: Candidate, chosen: int = 0, size: int = 8) -> Pick:
    return Pick("operator", "mm", candidates, chosen, inputs=(f"float32[{size}, 4] stride [4, 1]",))


def unit(*picks: Pick, model: str = "m", rows: int = 8, target: str = "cuda:sm_90", torch: str = "2.13.0") -> UnitPicks:
    return UnitPicks(model, {"rows": rows}, target, torch, "H200", picks)


QUESTION = operator()


def test_a_pick_file_leaves_out_the_spread_of_a_time() -> None:
    """It decides nothing, and a file that is committed should change with the decisions alone."""
    measured = operator(Candidate("mm", {}, 0.1, median_ms=0.12, calls=40), SLOW)
    pinned = operator(Candidate("mm", {}, 0.1))
    assert exported([unit(measured)]) == exported([unit(pinned)])


def test_candidates_are_kept_fastest_first_and_failed_ones_last() -> None:
    picker = Picker()
    picker.keep(QUESTION, [BROKEN, SLOW, FAST], FAST)
    (pick,) = picker.picks
    assert pick.candidates == (FAST, SLOW, BROKEN)
    assert (pick.winner, pick.runner_up) == (FAST, SLOW)
    assert pick.margin == pytest.approx(0.5)
    assert picker.tuned == [pick]


class Choice:
    def __init__(self, failed: bool = False) -> None:
        self.failed = failed


def test_candidates_that_could_not_be_compiled_or_run_are_counted() -> None:
    compiled, broken, too_large, unscreened = Choice(), Choice(failed=True), Choice(), Choice()
    assert failed_among([compiled, broken, too_large, unscreened], {compiled: 0.1, too_large: math.inf}) == 2


def test_a_question_that_is_asked_again_is_one_pick_used_twice() -> None:
    picker = Picker()
    for _ in range(2):
        picker.keep(QUESTION, [SLOW, FAST], FAST)
    assert [pick.uses for pick in picker.picks] == [2]


def test_a_pin_answers_if_its_winner_is_among_the_candidates() -> None:
    pin = operator(Candidate("mm", ms=0.15))
    picker = Picker([pin])
    assert picker.pin_for(QUESTION, [FAST, Candidate("mm")]) == pin
    picker.take(pin)
    assert (picker.pinned, picker.tuned, picker.stale()) == (1, [], ())


def test_a_pinned_candidate_that_is_gone_is_reported_with_both_sides() -> None:
    picker = Picker([operator(Candidate("cutlass_mm", {"TILE": 3}))])
    assert picker.pin_for(QUESTION, [FAST, SLOW]) is None
    picker.keep(QUESTION, [FAST, SLOW], FAST)
    (issue,) = picker.stale()
    assert issue.expected == "cutlass_mm TILE=3"
    assert issue.actual == "triton_mm BLOCK_M=64, mm"


def test_a_pin_that_answers_nothing_is_stale_but_a_seed_is_not() -> None:
    unused = operator(FAST, size=99)
    assert len(Picker([unused]).stale()) == 1
    assert Picker([], [unused]).stale() == ()


def test_an_own_pin_goes_before_a_seed() -> None:
    assert Picker([operator(SLOW)], [operator(FAST)]).pin_for(QUESTION) == operator(SLOW)


def test_a_locked_build_measures_nothing_and_lists_all_that_is_missing_and_stale() -> None:
    picker = Picker([operator(FAST, size=99)], locked=True)
    assert picker.must_not_measure(QUESTION)
    assert picker.must_not_measure(operator(size=16))
    with pytest.raises(BuildError, match="3 picks are missing or stale") as caught:
        picker.raise_if_locked_out()
    assert "float32[16, 4]" in str(caught.value) and "asks no such question" in str(caught.value)


def test_a_locked_build_pads_nothing_that_is_not_pinned_and_makes_no_operands_to_measure() -> None:
    picker = Picker(locked=True)
    ((_, name, ask), *_) = padding_hooks(picker)
    assert name == "get_cached_should_pad"
    assert ask("a product of odd sizes") is False
    with pytest.raises(BuildError, match="nothing may be measured"):
        picker.raise_if_locked_out()


def test_a_torch_with_which_nothing_could_be_pinned_fails_the_unit_and_all_differences_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = {
        "select_algorithm:AlgorithmSelectorCache.gone": (),
        "select_algorithm:AlgorithmSelectorCache.do_autotuning": ("moon",),
    }
    monkeypatch.setattr(inductor_hooks, "_PARTS", parts)
    monkeypatch.setattr(inductor_hooks, "_unknown_parts", inductor_hooks._unknown_parts.__wrapped__)
    with pytest.raises(BuildError, match="neither recorded nor pinned") as caught, inductor_hooks.picking(Picker()):
        pytest.fail("Inductor would decide")
    gone, changed = caught.value.issues
    assert "AlgorithmSelectorCache.gone" in gone.message
    assert "do_autotuning has no parameter moon" in changed.message


def test_the_hooks_fit_this_torch() -> None:
    assert not inductor_hooks._unknown_parts()


# -- the file ---------------------------------------------------------------------------------------------------------


def test_an_exported_file_holds_winners_alone_in_an_order_that_does_not_depend_on_the_builds() -> None:
    one, two = unit(operator(FAST, SLOW), rows=8), unit(operator(FAST, SLOW, chosen=1), rows=16)
    data = exported([two, one])
    assert data == exported([one, two])
    file = decode_picks(data, "p.json")
    assert [(u.bucket["rows"], u.picks[0].candidates) for u in file.units] == [(16, (SLOW,)), (8, (FAST,))]


def test_a_units_own_picks_are_taken_whole() -> None:
    own, other = unit(operator(FAST)), unit(operator(SLOW), rows=16)
    assert pins_for(PickFile(1, (other, own)), "m", {"rows": 8}, "cuda:sm_90", "2.13.0") == Pins(own)


def test_a_unit_without_picks_is_seeded_by_its_target_and_torch_alone_and_never_with_fusions() -> None:
    fusion = Pick("fusion", "op1 + op2", (Candidate("fused"),))
    file = PickFile(
        1,
        (
            unit(operator(FAST), fusion, rows=16),
            unit(operator(SLOW), rows=32, target="cuda:sm_80"),
            unit(operator(BROKEN), rows=64, torch="2.11.0"),
        ),
    )
    assert pins_for(file, "m", {"rows": 8}, "cuda:sm_90", "2.13.0") == Pins(None, (operator(FAST),), "H200")


def test_other_pins_are_another_key() -> None:
    assert NO_PINS.digest() == "none"
    assert len({Pins(unit(operator(c))).digest() for c in (FAST, SLOW)} | {"none"}) == 3


def test_a_pick_file_that_cannot_be_used_says_why(tmp_path) -> None:
    with pytest.raises(ManifestError, match=r"gone\.json"):
        read_picks_file(tmp_path / "gone.json")
    with pytest.raises(CorruptError, match="not a pick file"):
        decode_picks(b"{", "p.json")
    with pytest.raises(SchemaVersionError) as caught:
        decode_picks(b'{"schema": 7, "units": []}', "p.json")
    assert (caught.value.found, caught.value.supported) == (7, 1)
    bad = json.loads(exported([unit(operator(FAST))]))
    bad["units"][0]["picks"][0]["chosen"] = 3
    with pytest.raises(CorruptError, match="candidate 3 of 1"):
        decode_picks(json.dumps(bad).encode(), "p.json")


def test_a_measured_launch_mode_is_a_pick_and_comes_back_as_it_was() -> None:
    launch = LaunchPick(graph=True, direct_ms=0.2, graph_ms=0.1, reason="measured")
    pick = launch_pick(launch)
    assert pick is not None and pick.winner.name == "graph"
    assert pinned_launch(unit(pick)) == launch
    assert launch_pick(LaunchPick(graph=False, reason="cuda_graphs: never")) is None
    assert pinned_launch(unit()) is None


# -- comparing --------------------------------------------------------------------------------------------------------


def test_changes_say_what_the_other_choice_cost_in_a_race_that_timed_both() -> None:
    first, second = unit(operator(FAST, SLOW)), unit(operator(Candidate("mm", ms=99.0)))
    (change,) = changes([first], [second])
    assert (change.first, change.second) == (FAST, Candidate("mm", ms=99.0))
    assert change.cost == pytest.approx(0.5)
    assert changes([first], [first]) == []


def test_a_question_that_one_build_did_not_ask_is_a_change() -> None:
    (change,) = changes([unit(operator(FAST))], [unit()])
    assert (change.first, change.second, change.cost) == (FAST, None, None)


def test_each_kind_of_ranks_has_picks_of_its_own() -> None:
    """Ranks of uneven shards ask other questions."""
    kinds = [msgspec.structs.replace(unit(operator(FAST, size=8 - rank)), ranks=(rank,)) for rank in range(2)]
    file = decode_picks(exported(kinds), "the file")
    pins = pins_for(file, "m", {"rows": 8}, "cuda:sm_90", "2.13.0")
    questions = [pins.of_rank(rank).picks[0].identity for rank in range(2)]
    assert questions == [kind.picks[0].identity for kind in kinds]
    assert pins.of_rank(2) is None
    assert pins.digest() != pins_for(PickFile(1, file.units[:1]), "m", {"rows": 8}, "cuda:sm_90", "2.13.0").digest()
    assert [change.unit for change in changes(kinds, [kinds[0]])] == ["m rows=8 cuda:sm_90 rank 1"]


def test_picks_of_all_ranks_are_those_of_each() -> None:
    pins = pins_for(PickFile(1, (unit(QUESTION),)), "m", {"rows": 8}, "cuda:sm_90", "2.13.0")
    assert pins.of_rank(0) == pins.of_rank(3) == pins.own
