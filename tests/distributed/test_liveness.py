"""Which rank is lost, judging by what all of them say: no process dies here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stated import numbers_in
from surefoot.distributed.liveness import Beat, LostRank, RankWatch, Stall

FIRST = Beat(0, "here", 10, stage="running", step=6)
SECOND = Beat(1, "there", 11, stage="running", step=6)


def judged(*rounds: tuple[Beat, Beat], hurried: bool = False) -> tuple[int, LostRank] | None:
    """After how many seconds which rank is named, where two say one thing after the other each
    second and stay with the last.
    """
    watch = RankWatch(silent_s=20, grace_s=5)
    for second in range(60):
        told = rounds[min(second, len(rounds) - 1)]
        beats = {beat.rank: beat for beat in told}
        beats = {
            rank: replace(beat, number=second if beat.number >= 0 else -1)
            for rank, beat in beats.items()
        }
        lost = watch.lost_rank(beats, elapsed_s=1, hurried=hurried)
        if lost is not None:
            return second, lost
    return None


def test_ranks_that_all_speak_are_never_named() -> None:
    assert judged((FIRST, SECOND)) is None


def test_one_that_is_silent_for_twenty_seconds_is_named_with_host_and_step() -> None:
    found = judged((FIRST, SECOND), (FIRST, replace(SECOND, number=-1, doing="training")))
    assert found is not None
    second, lost = found
    assert lost.rank == 1
    assert 20 <= second <= 23
    assert lost.text.startswith("rank 1 (there, process 11) ")
    assert numbers_in(lost.text) == [1, 11, 20, 6]  # silent for these seconds, since this step


@pytest.mark.parametrize("place", ["left", "gone"])
def test_one_that_said_goodbye_may_be_silent_when_no_other_runs(place: str) -> None:
    assert (
        judged((replace(FIRST, stage="leaving"), replace(SECOND, stage=place, number=-1))) is None
    )


def test_one_that_vanishes_while_others_run_is_named() -> None:
    found = judged((FIRST, replace(SECOND, stage="gone", number=-1)))
    assert found is not None
    assert found[1].rank == 1
    assert numbers_in(found[1].text)[-1] == 6


def test_an_error_is_named_after_a_moment_in_which_all_may_meet_it() -> None:
    failed = replace(SECOND, stage="failed", error="DataError: sample 7 is broken")
    found = judged((FIRST, failed))
    assert found is not None
    assert 5 <= found[0] <= 7
    assert found[1].text.startswith("rank 1 (there, process 11) ")
    assert found[1].text.endswith(": DataError: sample 7 is broken")
    assert numbers_in(found[1].text)[2] == 6


def test_the_rest_of_an_error_is_told_and_what_holds_its_traceback() -> None:
    error = "DataError: sample 7 is broken\n  to see it alone: dataset[7]"
    _, rest, traceback = replace(SECOND, error=error, run_dir="runs/a").failure.splitlines()
    assert rest == "  to see it alone: dataset[7]"
    assert traceback.endswith(" runs/a/crash")


def test_a_lost_rank_was_last_heard_of_at_the_largest_step_that_is_known() -> None:
    lost = SECOND.lost("was killed")
    assert lost.text.startswith("rank 1 (there, process 11) was killed, ")
    assert lost.text.endswith(" 6, starting")
    assert lost.beside(replace(FIRST, step=9, doing="training")).text.endswith(" 9, training")
    assert lost.beside(replace(FIRST, step=5)) == lost
    failed = LostRank(1, replace(SECOND, error="ValueError").failure)
    assert failed.beside(replace(FIRST, step=9)) == failed, "it knows itself where it failed"


def test_an_error_is_named_at_once_where_a_connection_broke() -> None:
    found = judged((FIRST, replace(SECOND, stage="failed", error="DataError")), hurried=True)
    assert found is not None
    assert found[0] == 0


def test_one_that_left_its_loop_while_others_go_on_is_named() -> None:
    found = judged((replace(FIRST, step=7), replace(SECOND, stage="leaving")))
    assert found is not None
    assert found[0] <= 7
    assert found[1].rank == 1
    assert numbers_in(found[1].text)[-2:] == [6, 7]  # it left, and others wait


def test_one_that_leaves_its_loop_first_after_the_last_step_is_not_named() -> None:
    assert judged((FIRST, replace(SECOND, stage="leaving"))) is None


def test_a_suspicion_that_passes_begins_anew() -> None:
    ahead = (replace(FIRST, step=7), replace(SECOND, stage="leaving"))
    assert judged(*[ahead] * 4, (FIRST, SECOND)) is None


@pytest.mark.parametrize("place", ["building", "running", "leaving"])
def test_one_whose_process_has_ended_is_named_at_once_where_others_may_wait_for_it(
    place: str,
) -> None:
    watch = RankWatch(silent_s=20, grace_s=5)
    lost = watch.lost_rank({0: FIRST, 1: replace(SECOND, stage=place)}, elapsed_s=0, dead={1})
    assert lost is not None
    assert lost.rank == 1
    assert numbers_in(lost.text) == [1, 11, 6]


@pytest.mark.parametrize("place", ["left", "gone", "failed"])
def test_one_that_said_before_why_it_ends_is_not_named_for_its_closed_connection(
    place: str,
) -> None:
    watch = RankWatch(silent_s=20, grace_s=5)
    beats = {0: replace(FIRST, stage="leaving"), 1: replace(SECOND, stage=place, error="DataError")}
    assert watch.lost_rank(beats, elapsed_s=0, dead={1}) is None


def test_one_that_vanished_is_named_at_once_where_a_connection_broke() -> None:
    found = judged((FIRST, replace(SECOND, stage="gone", number=-1)), hurried=True)
    assert found is not None
    assert found[0] == 0


def at_places(**phases: Any) -> dict[int, Beat]:
    """Beats of running ranks, by the phase of each (`of_0`, `of_1`, ...)."""
    beats = [
        Beat(rank, "node", 40 + rank, stage="running", step=3, phase=phase)
        for rank, phase in enumerate(phases.values())
    ]
    return {beat.rank: beat for beat in beats}


def test_ranks_that_wait_at_different_places_are_named_once_after_a_minute() -> None:
    stall = Stall(after_s=60.0)
    beats = at_places(of_0="sample_fn", of_1="loss", of_2="loss")
    said = [stall.notice(beats, elapsed_s=2.0) for _ in range(100)]
    (notice,) = filter(None, said)
    assert said.index(notice) == 30  # the first beats begin the minute
    assert numbers_in(notice.partition("rank 0 ")[2])[:3] == [1, 2, 3]  # ranks 1 to 2, step 3
    assert "rank 0 is in sample_fn, " in notice


def test_ranks_at_one_place_or_of_which_one_goes_on_or_ends_are_not_named() -> None:
    together = at_places(of_0="evaluation", of_1="evaluation")
    ends = at_places(of_0="body", of_1="step")
    ends[1].stage = "leaving"
    for beats in (together, ends):
        stall = Stall(after_s=60.0)
        assert not any(stall.notice(beats, elapsed_s=2.0) for _ in range(100))
    stall = Stall(after_s=60.0)
    for number in range(100):
        beats = at_places(of_0="evaluation", of_1="step")
        beats[0].entered = number // 10  # a batch in 20 s
        assert stall.notice(beats, elapsed_s=2.0) is None


def test_a_second_stall_is_named_too() -> None:
    stall = Stall(after_s=60.0)
    said: list[str] = []
    for phase in ("data", "saving"):
        beats = at_places(of_0=phase, of_1="step")
        said += filter(None, [stall.notice(beats, elapsed_s=2.0) for _ in range(40)])
    first, second = said
    assert first != second
    assert all("rank 0 " in notice for notice in said)
