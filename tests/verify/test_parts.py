"""Which windows there are, where a file was changed, and how numbers are compared: without a run;
under a second.
"""

from __future__ import annotations

import json
import math
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from in_one import in_one
from stated import numbers_in
from surefoot.checkpoint import Checkpoint
from surefoot.checkpoint.manifest import Manifest
from surefoot.tools.replay.replay import pace_s
from surefoot.tools.verify.compare import numbers, rescale, tensor, tensors
from surefoot.tools.verify.files import Files, StoredStep
from surefoot.tools.verify.metrics_log import Log, Noted, read
from surefoot.tools.verify.records import rates
from surefoot.tools.verify.rerun import cost_steps, gaps, plan_windows
from surefoot.tools.verify.text import record_facts
from surefoot.tools.verify.verdict import Kind, Problem, Verdict, Window
from written_runs import state_json

# --- windows --------------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("windows", [1, 2, 5, 99])
@pytest.mark.parametrize("steps", [1, 7, 20, 1000])
@pytest.mark.parametrize(
    "starts", [[0], [0, 50, 60, 70], [0, *range(10, 200, 10)], [0, 3, 4, 5, 190, 195]]
)
def test_windows_begin_at_checkpoints_end_where_something_is_compared_and_do_not_overlap(
    starts: list[int], steps: int, windows: int, seed: int | None
) -> None:
    points = sorted({*range(5, 201, 5), *starts})
    found = plan_windows(starts, points, steps=steps, windows=windows, seed=seed)
    assert 1 <= len(found) <= windows
    assert all(
        window.start in starts and window.stop in points and window.steps > 0 for window in found
    )
    assert all(first.stop <= second.start for first, second in pairwise(found))
    assert sum(window.steps for window in [*found, *gaps(found, end=200)]) == 200
    if seed is None and windows > 1:
        assert found[0].start == 0
    if seed is None and max(starts) + steps >= 200:
        assert found[-1].stop == 200, "the end is among them where it can be reached"


def test_windows_that_are_drawn_are_the_same_for_the_same_seed() -> None:
    starts = list(range(0, 1000, 10))
    drawn = [
        plan_windows(starts, [*starts, 1000], steps=10, windows=3, seed=seed) for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_windows_without_a_seed_are_the_nearest_to_even_distances() -> None:
    starts = list(range(0, 300, 10))
    found = plan_windows(starts, [*starts, 300], steps=10, windows=15)
    # 15 of 30: the eighth, number 14.5, lies midway between two, and the even one counts
    chosen = [0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29]
    assert [window.start // 10 for window in found] == chosen


def test_a_window_that_has_no_point_within_its_steps_goes_on_to_the_next_one() -> None:
    assert plan_windows([0], [500, 1000], steps=100, windows=5) == [Window(0, 500)]


def test_a_gap_before_every_checkpoint_cannot_be_closed() -> None:
    assert cost_steps(Window(0, 5), [5, 10]) is None


def test_the_pace_of_a_run_is_its_time_over_all_of_its_steps() -> None:
    took = {"kind": "train", "training_s": 1.5, "data_wait_s": 0.5}
    assert (
        pace_s([took | {"step": 4}, took | {"step": 12}, {"kind": "train", "step": 16}]) == 4 / 16
    )
    assert pace_s([]) is None


# --- what is said of checkpoints ------------------------------------------------------------------


def checkpoint(step: int, log: Log | None, *, scored: str = "a") -> StoredStep:
    """One whose clock can be compared where it has noted the records."""
    noted = None if log is None else (0, sha256(b"").hexdigest())
    state = state_json() | {"splits": {"val": {"sha256": scored}}}
    return StoredStep(Path(f"step-{step}"), Manifest(step, {}, noted), Checkpoint(step, {}, state))


def test_every_checkpoint_but_that_of_step_0_has_a_clock_to_compare() -> None:
    log = records_of({"kind": "train", "step": 1})
    files = Files(Path("a"), {step: checkpoint(step, log) for step in (0, 1, 2)}, log, [], [], [])
    assert numbers_in(record_facts(files)) == []  # of every one
    files.checkpoints[1] = checkpoint(1, None)
    assert numbers_in(record_facts(files)) == [1, 2]


# --- where metrics.jsonl was changed --------------------------------------------------------------

LINES = [
    json.dumps({"kind": "train", "step": step, "loss": 1.5}).encode() + b"\n"
    for step in range(1, 9)
]


def noted(lines: list[bytes], *counts: int) -> list[Noted]:
    parts = [(count, b"".join(lines[:count])) for count in counts]
    return [Noted(count, len(part), sha256(part).hexdigest()) for count, part in parts]


@in_one
@pytest.mark.parametrize(
    ("changed", "where"),
    [
        (0, [2, 2, 1, 2, 2, 1, 2]),  # seen at, before; lines from, to; records, steps from, to
        (2, [3, 2, 3, 3, 3]),  # seen at; between; line, step
        (5, [7, 3, 7, 4, 7, 4, 4, 7]),
    ],
)
@pytest.mark.parametrize("loss", ["2.5", "3", "2." + 90 * "0" + "1"])
def test_a_changed_line_is_found_between_two_checkpoints(
    changed: int, where: list[int], loss: str
) -> None:
    """Also where it became longer or shorter."""
    now = [*LINES]
    now[changed] = now[changed].replace(b"1.5", loss.encode())
    (problem,) = read(b"".join(now), noted(LINES, 2, 3, 7)).problems
    assert problem.kind == "damaged"
    assert numbers_in(problem.text) == where


def test_what_was_changed_before_a_run_went_on_is_told_apart() -> None:
    now = [LINES[0].replace(b"1.5", b"2.5"), *LINES[1:]]
    (problem,) = read(b"".join(now), [*noted(LINES, 2, 3), *noted(now, 7)]).problems
    assert numbers_in(problem.text)[-1] == 7


def test_only_what_a_kill_leaves_is_a_line_without_a_record() -> None:
    cut = LINES[3][:9] + b"\n"
    resumed = json.dumps({"kind": "resume", "step": 2}).encode() + b"\n"
    assert read(b"".join([*LINES[:3], cut, resumed, *LINES[2:]]), []).problems == ()
    assert read(b"".join([*LINES[:3], cut[:-1]]), []).problems == ()
    (problem,) = read(b"".join([*LINES[:3], cut, *LINES[4:]]), []).problems
    assert (problem.kind, numbers_in(problem.text)) == ("inconsistent", [4])


def records_of(*records: dict[str, object]) -> Log:
    return read(b"".join(json.dumps(record).encode() + b"\n" for record in records), [])


def test_a_rate_that_an_evaluation_lowered_holds_for_the_steps_after_it() -> None:
    """The step that was evaluated was made before, also where its record stands after the
    scores.
    """
    lowered = {"kind": "eval", "step": 5, "lr_factor": 0.5}
    at, after = ({"kind": "train", "step": step, "lr": rate} for step, rate in ((5, 4.0), (6, 2.5)))
    assert list(rates(records_of(lowered, at, after), lambda index, factor: factor * index)) == []
    assert list(rates(records_of(at, lowered, after), lambda index, factor: factor * index)) == []
    for wrong in (at | {"lr": 2.0}, after | {"lr": 5.0}):
        (problem,) = rates(records_of(lowered, wrong), lambda index, factor: factor * index)
        assert problem.step == wrong["step"]


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_are_compared_to_the_last_bit_and_nan_is_nan() -> None:
    known = {"loss", "grad_norm", "skipped", "targets"}
    record = {"loss": 0.1, "grad_norm": math.nan, "skipped": 0, "targets": 8.0}
    same = {"loss": 0.1, "grad_norm": math.nan, "skipped": 0, "targets": 8, "loss_max": 3.0}
    assert numbers(record, same, known=known, exact=True) == []
    (found,) = numbers(record, same | {"loss": math.nextafter(0.1, 1)}, known=known, exact=True)
    assert (found.where, found.saved, found.computed) == ("loss", "0.1", "0.10000000000000002")
    (absent,) = numbers({"loss": 0.1}, {"loss": 0.1, "grad_norm": 2.0}, known=known, exact=True)
    assert (absent.where, absent.saved) == ("grad_norm", "absent")


def test_elsewhere_counts_must_agree_and_thresholds_need_not() -> None:
    record = {"loss": 1.0, "clip_fraction": 0.5, "skipped": 0}
    (loss,) = numbers(
        record, {"loss": 1.01, "clip_fraction": 0.6, "skipped": 0}, known=set(record), exact=False
    )
    assert loss.relative == pytest.approx(0.01, rel=0.02)
    (skipped,) = numbers(
        record, {"loss": 1.0, "clip_fraction": 0.6, "skipped": 1}, known=set(record), exact=False
    )
    assert skipped.relative == math.inf


@pytest.mark.parametrize("name", ["targets", "skipped"])
@pytest.mark.parametrize(("saved", "computed"), [(100_000, 100_001), (100_000.0, 100_001.0)])
def test_elsewhere_one_target_more_in_100_000_is_no_rounding(
    name: str, saved: float, computed: float
) -> None:
    (difference,) = numbers({name: saved}, {name: computed}, known={name}, exact=False)
    assert difference.relative == math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_of_a_tensor_is_a_difference(dtype: torch.dtype) -> None:
    saved = torch.linspace(-2, 1, 12, dtype=dtype).reshape(3, 4)
    computed = saved.clone()
    computed[2, 1] = (
        torch.nextafter(computed[2, 1], computed[2, 1] * 0)
        if dtype != torch.float16
        else computed[2, 1] * 0.5
    )
    assert tensor("w", saved, saved.clone()) is None
    found = tensor("w", saved, computed)
    assert found is not None
    assert (found.where, found.more) == ("w[2, 1]", "1 of 12 values")
    assert 0 < found.relative < 0.5


def test_zeros_of_other_sign_nan_integers_and_shapes_are_told_apart() -> None:
    zero = tensor("w", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert zero is not None
    assert (zero.relative, zero.saved, zero.computed) == (0.0, "0.0", "-0.0")
    assert tensor("w", torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    lost = tensor("w", torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]))
    assert lost is not None
    assert (lost.where, lost.relative) == ("w[1]", math.inf)
    counted = tensor("n", torch.tensor(3), torch.tensor(4))
    assert counted is not None
    assert (counted.where, counted.relative) == ("n", math.inf)
    shape = tensor("w", torch.zeros(2, 3), torch.zeros(3, 2))
    assert shape is not None
    assert (shape.saved, shape.computed) == ("float32 [2, 3]", "float32 [3, 2]")


def test_to_rounding_an_entry_that_only_rounding_drives_is_judged_with_all_others() -> None:
    """Its gradient was a billionth of the others', so its optimizer took it anywhere; the others
    must be where they were.
    """
    weights = torch.full((100,), 1.0)
    average = torch.cat([torch.full((1,), 1e-9), torch.full((99,), 1.0)])
    states = {"w/exp_avg": average, "w/step": torch.tensor(3.0)}
    saved = Checkpoint(3, {"model": {"w": weights, "mean": torch.ones(4)}, "optimizer": states})

    def apart(place: int, by: float, name: str = "w") -> list[float]:
        held = {"w": weights.clone(), "mean": torch.ones(4)}
        held[name][place] += by
        computed = Checkpoint(3, {"model": held, "optimizer": states})
        found = tensors(saved, computed, exact=False)
        return [each.relative for each in rescale(saved, computed, found, buffers={"mean"})]

    assert apart(0, 0.05) == pytest.approx([0.0, 0.005], rel=1e-4)
    assert apart(7, 0.05) == pytest.approx([0.05, 0.005], rel=1e-4)
    assert apart(2, 0.05, "mean") == pytest.approx([0.025], rel=1e-4)


def test_another_drawing_is_told_from_a_changed_entry() -> None:
    saved = torch.randn(50, generator=torch.Generator().manual_seed(0))
    changed = saved.clone()
    changed[3] += 1
    drawn = torch.randn(50, generator=torch.Generator().manual_seed(1))
    one, all_of_them = tensor("w", saved, changed), tensor("w", saved, drawn)
    assert one is not None
    assert all_of_them is not None
    assert (one.differing, all_of_them.differing) == (0.02, 1.0)


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ([], 0),
        (["differs"], 8),
        (["data", "differs"], 3),
        (["differs", "inconsistent"], 4),
        (["data", "damaged"], 4),
    ],
)
def test_of_several_problems_the_worst_is_the_exit_status(kinds: list[Kind], status: int) -> None:
    assert Verdict("a", [], [], [Problem(kind, "...") for kind in kinds]).exit_status == status
