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
from surefoot.tools.verify.verdict import Difference, Kind, Problem, Verdict, Window
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
    planned = plan_windows(starts, points, steps=steps, windows=windows, seed=seed)

    assert 1 <= len(planned) <= windows
    for window in planned:
        assert window.start in starts
        assert window.stop in points
        assert window.steps > 0
    for earlier, later in pairwise(planned):
        assert earlier.stop <= later.start
    assert sum(window.steps for window in [*planned, *gaps(planned, end=200)]) == 200
    if seed is None and windows > 1:
        assert planned[0].start == 0
    if seed is None and max(starts) + steps >= 200:
        assert planned[-1].stop == 200, "the end is among them where it can be reached"


def test_windows_that_are_drawn_are_the_same_for_the_same_seed() -> None:
    starts = list(range(0, 1000, 10))

    def draw(seed: int) -> list[Window]:
        return plan_windows(starts, [*starts, 1000], steps=10, windows=3, seed=seed)

    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)


def test_windows_without_a_seed_are_the_nearest_to_even_distances() -> None:
    starts = list(range(0, 300, 10))
    planned = plan_windows(starts, [*starts, 300], steps=10, windows=15)
    # 15 of 30: the eighth, number 14.5, lies midway between two, and the even one counts
    nearest = [0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29]
    assert [window.start // 10 for window in planned] == nearest


def test_a_window_that_has_no_point_within_its_steps_goes_on_to_the_next_one() -> None:
    assert plan_windows([0], [500, 1000], steps=100, windows=5) == [Window(0, 500)]


def test_a_gap_before_every_checkpoint_cannot_be_closed() -> None:
    assert cost_steps(Window(0, 5), [5, 10]) is None


def test_the_pace_of_a_run_is_its_time_over_all_of_its_steps() -> None:
    records = [
        {"kind": "train", "step": 4, "training_s": 1.5, "data_wait_s": 0.5},
        {"kind": "train", "step": 12, "training_s": 1.5, "data_wait_s": 0.5},
        {"kind": "train", "step": 16},
    ]
    assert pace_s(records) == (2.0 + 2.0) / 16
    assert pace_s([]) is None


# --- what is said of checkpoints ------------------------------------------------------------------


def checkpoint(step: int, log: Log | None, *, scored: str = "a") -> StoredStep:
    """One whose clock can be compared where it has noted the records."""
    noted = None if log is None else (0, sha256(b"").hexdigest())
    state = state_json() | {"splits": {"val": {"sha256": scored}}}
    return StoredStep(Path(f"step-{step}"), Manifest(step, {}, noted), Checkpoint(step, {}, state))


def test_every_checkpoint_but_that_of_step_0_has_a_clock_to_compare() -> None:
    log = log_of({"kind": "train", "step": 1})
    files = Files(Path("a"), {step: checkpoint(step, log) for step in (0, 1, 2)}, log, [], [], [])
    assert numbers_in(record_facts(files)) == []  # of every one
    files.checkpoints[1] = checkpoint(1, None)
    assert numbers_in(record_facts(files)) == [1, 2]


# --- where metrics.jsonl was changed --------------------------------------------------------------

LINES = [
    json.dumps({"kind": "train", "step": step, "loss": 1.5}).encode() + b"\n"
    for step in range(1, 9)
]


def note_lines(lines: list[bytes], *counts: int) -> list[Noted]:
    """What checkpoints have noted of the first lines."""
    notes = []
    for count in counts:
        data = b"".join(lines[:count])
        notes.append(Noted(count, len(data), sha256(data).hexdigest()))
    return notes


@in_one
@pytest.mark.parametrize(
    ("changed", "stated"),
    [
        (0, [2, 2, 1, 2, 2, 1, 2]),  # seen at, before; lines from, to; records, steps from, to
        (2, [3, 2, 3, 3, 3]),  # seen at; between; line, step
        (5, [7, 3, 7, 4, 7, 4, 4, 7]),
    ],
)
@pytest.mark.parametrize("loss", ["2.5", "3", "2." + 90 * "0" + "1"])
def test_a_changed_line_is_found_between_two_checkpoints(
    changed: int, stated: list[int], loss: str
) -> None:
    """Also where it became longer or shorter."""
    lines = [*LINES]
    lines[changed] = lines[changed].replace(b"1.5", loss.encode())

    (problem,) = read(b"".join(lines), note_lines(LINES, 2, 3, 7)).problems

    assert problem.kind == "damaged"
    assert numbers_in(problem.text) == stated


def test_what_was_changed_before_a_run_went_on_is_told_apart() -> None:
    lines = [LINES[0].replace(b"1.5", b"2.5"), *LINES[1:]]
    notes = note_lines(LINES, 2, 3) + note_lines(lines, 7)

    (problem,) = read(b"".join(lines), notes).problems

    assert numbers_in(problem.text)[-1] == 7


CUT_LINE = LINES[3][:9]


def test_a_line_that_a_kill_has_cut_off_is_no_problem() -> None:
    assert read(b"".join([*LINES[:3], CUT_LINE]), []).problems == ()
    resumed = json.dumps({"kind": "resume", "step": 2}).encode()
    lines = [*LINES[:3], CUT_LINE + b"\n", resumed + b"\n", *LINES[2:]]
    assert read(b"".join(lines), []).problems == ()


def test_a_line_without_a_record_that_no_kill_leaves_is_a_problem() -> None:
    lines = [*LINES[:3], CUT_LINE + b"\n", *LINES[4:]]
    (problem,) = read(b"".join(lines), []).problems
    assert problem.kind == "inconsistent"
    assert numbers_in(problem.text) == [4]


def log_of(*records: dict[str, object]) -> Log:
    return read(b"".join(json.dumps(record).encode() + b"\n" for record in records), [])


def rate_problems(*records: dict[str, object]) -> list[Problem]:
    """Of a schedule whose rate is that of the step times the factor of evaluations."""
    return list(rates(log_of(*records), lambda index, factor: factor * index))


def test_a_rate_that_an_evaluation_lowered_holds_for_the_steps_after_it() -> None:
    """The step that was evaluated was made before, also where its record stands after the
    scores.
    """
    lowered: dict[str, object] = {"kind": "eval", "step": 5, "lr_factor": 0.5}
    evaluated: dict[str, object] = {"kind": "train", "step": 5, "lr": 4.0}
    after: dict[str, object] = {"kind": "train", "step": 6, "lr": 2.5}
    assert rate_problems(lowered, evaluated, after) == []
    assert rate_problems(evaluated, lowered, after) == []

    (problem,) = rate_problems(lowered, evaluated | {"lr": 2.0})
    assert problem.step == 5
    (problem,) = rate_problems(lowered, after | {"lr": 5.0})
    assert problem.step == 6


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_are_compared_to_the_last_bit_and_nan_is_nan() -> None:
    known = {"loss", "grad_norm", "skipped", "targets"}
    record = {"loss": 0.1, "grad_norm": math.nan, "skipped": 0, "targets": 8.0}
    same = {"loss": 0.1, "grad_norm": math.nan, "skipped": 0, "targets": 8, "loss_max": 3.0}
    assert numbers(record, same, known=known, exact=True) == []

    (different,) = numbers(record, same | {"loss": math.nextafter(0.1, 1)}, known=known, exact=True)
    assert different.where == "loss"
    assert different.saved == "0.1"
    assert different.computed == "0.10000000000000002"


def test_a_number_that_a_record_lacks_is_named() -> None:
    known = {"loss", "grad_norm"}
    (absent,) = numbers({"loss": 0.1}, {"loss": 0.1, "grad_norm": 2.0}, known=known, exact=True)
    assert absent.where == "grad_norm"
    assert absent.saved == "absent"


def test_elsewhere_counts_must_agree_and_thresholds_need_not() -> None:
    record = {"loss": 1.0, "clip_fraction": 0.5, "skipped": 0}
    other_loss = {"loss": 1.01, "clip_fraction": 0.6, "skipped": 0}
    other_count = {"loss": 1.0, "clip_fraction": 0.6, "skipped": 1}

    (loss,) = numbers(record, other_loss, known=set(record), exact=False)
    (skipped,) = numbers(record, other_count, known=set(record), exact=False)

    assert loss.where == "loss"
    assert loss.relative == pytest.approx(0.01, rel=0.02)
    assert skipped.where == "skipped"
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
    if dtype == torch.float16:  # torch has no nextafter for it
        computed[2, 1] *= 0.5
    else:
        computed[2, 1] = torch.nextafter(computed[2, 1], computed[2, 1] * 0)

    difference = difference_of(saved, computed)

    assert tensor("w", saved, saved.clone()) is None
    assert difference.where == "w[2, 1]"
    assert difference.more == "1 of 12 values"
    assert 0 < difference.relative < 0.5


def difference_of(saved: torch.Tensor, computed: torch.Tensor) -> Difference:
    difference = tensor("w", saved, computed)
    assert difference is not None
    return difference


def test_zeros_of_other_sign_are_a_difference_of_no_size() -> None:
    difference = difference_of(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert difference.relative == 0.0
    assert difference.saved == "0.0"
    assert difference.computed == "-0.0"


def test_nan_is_equal_to_nan_alone() -> None:
    assert tensor("w", torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    difference = difference_of(torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]))
    assert difference.where == "w[1]"
    assert difference.relative == math.inf


def test_another_integer_is_no_rounding() -> None:
    difference = difference_of(torch.tensor(3), torch.tensor(4))
    assert difference.where == "w"
    assert difference.relative == math.inf


def test_another_shape_is_a_difference() -> None:
    difference = difference_of(torch.zeros(2, 3), torch.zeros(3, 2))
    assert difference.saved == "float32 [2, 3]"
    assert difference.computed == "float32 [3, 2]"


def test_to_rounding_an_entry_that_only_rounding_drives_is_judged_with_all_others() -> None:
    """Its gradient was a billionth of the others', so its optimizer took it anywhere; the others
    must be where they were.
    """
    weights = torch.full((100,), 1.0)
    average = torch.cat([torch.full((1,), 1e-9), torch.full((99,), 1.0)])
    states = {"w/exp_avg": average, "w/step": torch.tensor(3.0)}
    saved = Checkpoint(3, {"model": {"w": weights, "mean": torch.ones(4)}, "optimizer": states})

    def rescaled_differences(name: str, place: int) -> list[float]:
        """Of a checkpoint in which one entry is larger by 0.05."""
        model = {"w": weights.clone(), "mean": torch.ones(4)}
        model[name][place] += 0.05
        computed = Checkpoint(3, {"model": model, "optimizer": states})
        differences = tensors(saved, computed, exact=False)
        rescaled = rescale(saved, computed, differences, buffers={"mean"})
        return [difference.relative for difference in rescaled]

    assert rescaled_differences("w", 0) == pytest.approx([0.0, 0.005], rel=1e-4)
    assert rescaled_differences("w", 7) == pytest.approx([0.05, 0.005], rel=1e-4)
    assert rescaled_differences("mean", 2) == pytest.approx([0.025], rel=1e-4)


def test_another_drawing_is_told_from_a_changed_entry() -> None:
    saved = torch.randn(50, generator=torch.Generator().manual_seed(0))
    changed = saved.clone()
    changed[3] += 1
    drawn = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert difference_of(saved, changed).differing == 1 / 50
    assert difference_of(saved, drawn).differing == 1.0


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
