"""From the records of runs to rows, verdicts and notes. (3 s)"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from compare.compared_runs import (
    ORDER,
    batches,
    difference_of,
    repeats,
    row_of,
    run,
    trained,
    variant,
    verdicts,
)
from refused import refused
from stated import numbers_in
from surefoot.tools.compare.results import (
    EQUAL_BITS,
    INSIDE_NOISE,
    NO_SPREAD,
    ONE_SEED,
    compared,
)
from surefoot.tools.compare.trained import Compared, read_run
from surefoot.tracking.jsonl import line

# --- a row of one run -----------------------------------------------------------------------------


def test_best_final_and_time_to_the_target_are_those_of_the_records() -> None:
    row = row_of("lr=1", [run("lr=1")], target=1.2)

    assert (row.best, row.best_step, row.final) == (1.0, 20, 1.5)
    assert (row.target_step, row.target_s) == (20, 2.0)
    assert (row.training_s, row.targets_per_s) == (4.0, 100.0)


def test_higher_is_better_where_the_run_says_so() -> None:
    first = run("a", [(10, 0.5), (20, 0.9)], watch=("max", "val/accuracy"))
    second = run("b", [(10, 0.7), (20, 0.8)], watch=("max", "val/accuracy"))

    best, other = compared([second, first]).rows

    assert (best.name, other.name) == ("a", "b")
    assert best.verdict == "best"
    assert best.target_step == 20  # 0.8, the best of the first given


@pytest.mark.parametrize("first", [math.nan, -math.inf])
def test_what_is_not_a_number_is_never_best(first: float) -> None:
    assert trained([(10, first), (20, 3.0)]).best == (20, 3.0)
    assert trained([(10, first)]).best is None
    assert trained([(10, first)]).reached(1.0) is None


def test_a_run_without_records_is_a_row_without_numbers(tmp_path: Path) -> None:
    empty = Compared(variant("lr=9"), read_run(tmp_path), "failed", "killed")

    last = compared([run("lr=1"), empty]).rows[-1]

    assert last.name == "lr=9"
    assert last.best is None


def test_records_that_a_resume_superseded_are_no_part_of_a_curve(tmp_path: Path) -> None:
    at_5 = {"kind": "train", "step": 5, "loss": 3.0, "targets": 10}
    at_10 = {"kind": "train", "step": 10, "loss": 9.0, "targets": 10}
    at_10_again = {"kind": "train", "step": 10, "loss": 2.0, "targets": 10}
    records = [
        at_5 | {"training_s": 1.0, "data_wait_s": 0.5},
        at_10 | {"training_s": 1.0, "data_wait_s": 0.5},
        {"kind": "eval", "step": 10, "val/loss": 9.0},
        {"kind": "resume", "step": 5},
        at_10_again | {"training_s": 2.0, "data_wait_s": 0.0},
        {"kind": "eval", "step": 10, "val/loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line(record)}\n" for record in records))

    result = read_run(tmp_path)

    assert result.loss == [(5, 3.0), (10, 2.0)]
    assert result.scores == [(10, 1.0)]
    assert (result.training_s, result.targets) == (3.5, 20.0)
    assert result.watch == ("min", "val/loss")


def test_a_score_that_a_run_lacks_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    record = {"kind": "eval", "step": 10, "val/loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(f"{line(record)}\n")
    with refused("score-missing", available={"val/loss": 1.0}):
        read_run(tmp_path, metric="max val/accuracy")


def test_a_target_is_that_of_the_first_variant_that_has_a_score() -> None:
    of_second = compared([run("a", []), run("b")]).notes[0]
    assert of_second.startswith("target: 1, ")
    assert " b, " in of_second

    of_first = compared([run("a"), run("b")]).notes[0]
    assert " a, " in of_first


# --- verdicts -------------------------------------------------------------------------------------


def test_a_small_difference_is_inside_the_noise_and_a_steady_one_is_not() -> None:
    runs = repeats({"steady": (1.5, 1.6, 1.5), "noisy": (0.7, 1.6, 1.2), "best": (1.0, 1.1, 1.05)})

    assert verdicts(runs) == {"best": "best", "steady": "worse", "noisy": INSIDE_NOISE}
    assert verdicts(runs, baseline="steady") == {
        "steady": "baseline",
        "best": "better",
        "noisy": INSIDE_NOISE,
    }


def test_all_pairs_count_where_the_reference_was_chosen_by_looking() -> None:
    runs = repeats({"a": (1.0, 1.2, 1.1), "b": (1.3, 1.6, 1.4), "c": (1.5, 1.8, 1.7)})

    p_if_chosen = row_of("b", runs).p
    p_if_named = row_of("b", runs, baseline="a").p

    assert p_if_chosen is not None
    assert p_if_named is not None
    assert p_if_chosen > p_if_named > 0


@pytest.mark.parametrize("baseline", ["best", "steady"])
def test_one_seed_is_never_tested_however_large_the_difference(baseline: str) -> None:
    steady = run("steady", batches=batches(1.1, 2.1, 3.11, 4.1, 5.09))
    best = run("best", [(10, 0.9)], batches=batches(1.0, 2.0, 3.0, 4.0, 5.0))
    without_batches = run("without batches", [(10, 9.0)])

    comparison = compared([steady, best, without_batches], baseline=baseline)

    others = [row for row in comparison.rows if row.name != baseline]
    assert len(others) == 2
    for row in others:
        assert row.verdict == ONE_SEED
        assert row.p is None


def test_one_seed_beside_several_is_not_tested() -> None:
    best = run("best", [(10, 0.9)])
    several = repeats({"several": (7.0, 7.1, 7.2)})
    assert verdicts([best, *several]) == {"best": "best", "several": ONE_SEED}


def test_a_repeat_that_failed_leaves_one_seed() -> None:
    runs = repeats({"a": (1.0, 1.2), "b": (5.0, 5.1)}, failed=("b", 1))
    assert verdicts(runs)["b"] == ONE_SEED


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("direction", ["min", "max"])
def test_equal_scores_are_a_tie(seeds: int, direction: str) -> None:
    runs = []
    for repeat in repeats({"a": (0.0,) * seeds, "b": (0.0,) * seeds, "c": (0.0,) * seeds}):
        watched = replace(repeat.trained, watch=(direction, "x/y"))
        runs.append(replace(repeat, trained=watched))

    assert verdicts(runs) == {"a": "tie", "b": "tie", "c": "tie"}
    assert verdicts(runs, baseline="b") == {"a": "tie", "b": "baseline", "c": "tie"}


def test_a_tie_of_the_first_two_is_no_tie_of_the_third() -> None:
    runs = repeats({"a": (1.0, 2.0, 3.0), "b": (3.0, 2.0, 1.0), "c": (90.0, 91.0, 92.5)})
    assert verdicts(runs) == {"a": "tie", "b": "tie", "c": "worse"}


def test_seeds_without_spread_are_no_test() -> None:
    """Three equal accuracies of few samples say nothing of a fourth."""
    row = row_of("b", repeats({"a": (0.9, 0.9, 0.9), "b": (0.91, 0.91, 0.91)}))
    assert row.verdict == NO_SPREAD
    assert row.p is None


def test_half_a_run_is_no_repeat_of_a_whole_one() -> None:
    runs = repeats({"a": (1.0, 1.2, 9.0), "b": (1.5, 1.8, 1.6)}, failed=("a", 2))

    row = row_of("a", runs)

    assert (row.best, row.repeats) == (1.1, 3)
    assert "failed" in row.status.split()
    assert numbers_in(row.status) == [1, 3, 30]  # of how many repeats, and the step
    assert difference_of("b", runs).pairs == 2
    assert any(" a " in note for note in compared(runs).notes)


def test_runs_judged_by_different_scores_are_not_compared() -> None:
    with refused("runs-ranked-by-different-scores"):
        compared([run("a"), run("b", watch=("max", "val/accuracy"))])


def test_an_unknown_reference_is_refused() -> None:
    with refused("baseline-unknown", value="z"):
        compared([run("a")], baseline="z")


# --- differences and their errors -----------------------------------------------------------------


def variance_of_mean(values: Sequence[float]) -> float:
    return float(np.var(values, ddof=1)) / len(values)


def with_batches(runs: list[Compared], batches_of: dict[str, dict[str, Any]]) -> list[Compared]:
    return [replace(repeat, batches=batches_of[repeat.variant.group]) for repeat in runs]


def test_the_sign_is_that_of_the_row_minus_the_reference() -> None:
    one = run("one", [(10, 2.0)], batches(2.0, 3.0))
    other = run("other", [(10, 1.0)], batches(1.0, 2.5))

    assert difference_of("one", [one, other]).mean == 0.75
    assert difference_of("other", [other, one], baseline="one").mean == -0.75


def test_with_repeats_the_noise_is_that_between_seeds() -> None:
    runs = repeats({"a": (1.0, 1.2, 1.1), "b": (1.5, 1.8, 1.6)})

    best = row_of("a", runs)
    difference = difference_of("b", runs)

    assert best.best == pytest.approx(1.1)
    assert best.best_error == pytest.approx(0.1 / 3**0.5)
    assert difference.mean == pytest.approx(1.6 / 3)
    assert difference.pairs == 3


def test_batches_that_are_not_finite_leave_the_error_of_seeds() -> None:
    runs = repeats({"a": (1.0, 1.2, 1.1), "b": (1.5, 1.8, 1.6)})
    not_finite = with_batches(runs, {"a": batches(1.0, math.nan), "b": batches(1.0, 2.0)})

    assert difference_of("b", not_finite) == difference_of("b", runs)
    assert verdicts(not_finite)["b"] == verdicts(runs)["b"] == "worse"


def test_with_seeds_the_error_also_covers_the_evaluation_data() -> None:
    """The two variances add, each in its closed form; so do the degrees of freedom."""
    scores = {"a": (1.0, 1.2, 1.1), "b": (1.5, 1.8, 1.6)}
    means = {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.1, 2.5, 3.1, 4.7]}
    batches_of = {name: batches(*values) for name, values in means.items()}

    difference = difference_of("b", with_batches(repeats(scores), batches_of))

    of_a = variance_of_mean(scores["a"])
    of_b = variance_of_mean(scores["b"])
    of_seeds = of_a + of_b
    of_data = variance_of_mean([0.1, 0.5, 0.1, 0.7])  # the differences of the batches
    freedom_of_seeds = int(of_seeds**2 / (of_a**2 / 2 + of_b**2 / 2))
    variance = of_seeds + of_data
    freedom = int(variance**2 / (of_seeds**2 / freedom_of_seeds + of_data**2 / 3))
    assert difference.mean == pytest.approx(1.6 / 3)
    assert difference.standard_error == pytest.approx(variance**0.5)
    assert difference.freedom == freedom


def resampled(*scores: float) -> dict[str, Any]:
    """Scores of the whole split, of each draw from it."""
    return {
        "split": {"sha256": "x"},
        "counts": [2.0] * 40,
        "best": {"step": 10, "resampled": list(scores)},
    }


def test_a_score_of_the_whole_split_has_the_error_of_its_draws() -> None:
    scores = {"a": (0.6, 0.62, 0.61), "b": (0.3, 0.29, 0.32)}
    draws = {"a": resampled(0.5, 0.7, 0.6), "b": resampled(0.3, 0.4, 0.1)}

    difference = difference_of("a", with_batches(repeats(scores), draws))

    of_seeds = variance_of_mean(scores["a"]) + variance_of_mean(scores["b"])
    of_draws = float(np.var([0.2, 0.3, 0.5], ddof=1))
    assert difference.standard_error == pytest.approx((of_seeds + of_draws) ** 0.5)


def test_means_and_draws_are_not_paired() -> None:
    means = batches(1.0, 2.0)
    draws = means | {"best": {"step": 20, "resampled": [1.0, 2.0]}}  # they differ in nothing else
    runs = [run("a", batches=means), run("b", batches=draws)]
    assert [row.difference for row in compared(runs).rows] == [None, None]


def test_five_shared_seeds_are_paired() -> None:
    one = (1.0, 2.0, 3.0, 4.0, 5.0)
    other = (1.1, 2.2, 3.1, 4.3, 5.1)
    runs = repeats({"a": one, "b": other})

    difference = difference_of("b", runs)

    of_pairs = variance_of_mean(np.subtract(other, one).tolist())
    assert difference.standard_error == pytest.approx(of_pairs**0.5)
    assert difference.freedom == 4
    assert verdicts(runs)["b"] == "worse"


def test_seeds_that_are_not_shared_are_compared_without_pairs() -> None:
    first = repeats({"a": (1.0, 1.2, 1.1)})
    of_seeds_3_to_5 = repeats({"b": (9.0, 9.0, 9.0, 1.5, 1.8, 1.6)})[3:]
    runs = [*first, *of_seeds_3_to_5]

    difference = difference_of("b", runs)

    variance = variance_of_mean([1.0, 1.2, 1.1]) + variance_of_mean([1.5, 1.8, 1.6])
    assert difference.standard_error == pytest.approx(variance**0.5)
    assert verdicts(runs)["b"] == "worse"


# --- notes ----------------------------------------------------------------------------------------


def test_other_evaluation_data_are_not_paired_and_it_is_said_why() -> None:
    first = run("a", batches=batches(1.0, 2.0))
    other_data = compared([first, run("b", batches=batches(1.0, 2.0, split="y"))])
    same_data = compared([first, run("b", batches=batches(1.0, 2.0))])

    assert [row.difference for row in other_data.rows] == [None, None]
    (_why,) = set(other_data.notes) - set(same_data.notes)
    (of_difference,) = set(same_data.notes) - set(other_data.notes)
    assert numbers_in(of_difference)[0] == 2  # batches


def test_the_size_of_the_batches_that_a_difference_is_over_is_said() -> None:
    first = run("a", batches=batches(1.0, 2.0, 3.0))
    second = run("b", batches=batches(1.1, 2.3, 3.2))
    note = compared([first, second]).notes[1]
    assert numbers_in(note)[:3] == [3, 2, 6]  # batches, targets of each, and in all


def test_batches_of_one_target_are_samples() -> None:
    first = run("a", batches=batches(1.0, 2.0, 3.0, targets=1.0))
    second = run("b", batches=batches(1.1, 2.3, 3.2, targets=1.0))
    note = compared([first, second]).notes[1]
    assert numbers_in(note)[:1] == [3]


def test_models_of_other_sizes_are_said_also_where_all_seeds_differ() -> None:
    one = run("a", order=ORDER | {"model_bytes": 400})
    other = run("b", order=ORDER | {"model_bytes": 900, "seed": 1})

    of_two_sizes = [numbers_in(note) for note in compared([one, other]).notes]
    of_one_size = [numbers_in(note) for note in compared([one, one]).notes]

    assert of_two_sizes.count([0, 400, 900]) == 1
    assert not any(400 in numbers for numbers in of_one_size)


def test_nothing_is_shared_where_there_are_no_two_to_share_it() -> None:
    assert not any("shared" in note for note in compared(repeats({"a": (1.0, 1.2)})).notes)


def test_what_a_run_began_with_is_not_known_without_its_first_checkpoint() -> None:
    notes = compared([run("a"), run("b"), run("c", order=None)]).notes
    (unknown,) = [note for note in notes if " c, " in note]
    assert numbers_in(unknown) == [0]


def things_named_after(label: str, notes: Sequence[str]) -> set[str]:
    """Which of the things that two runs may share are in the only note with a label."""
    (note,) = [note.removeprefix(f"{label}: ") for note in notes if note.startswith(f"{label}: ")]
    return set(re.findall(r"weights|order|precision|seed|batch_size|data", note))


@pytest.mark.parametrize(
    ("changes", "not_shared", "shared"),
    [
        ({"weights": "other"}, {"weights"}, {"order"}),
        ({"seed": 1, "data": "b"}, {"order", "seed", "data"}, {"weights"}),
        ({"precision": "bf16"}, {"precision"}, {"weights", "order"}),
    ],
)
def test_what_is_not_shared_is_said(
    changes: dict[str, Any], not_shared: set[str], shared: set[str]
) -> None:
    notes = compared([run("a"), run("b", order=ORDER | changes)]).notes
    assert things_named_after("not shared", notes) == not_shared
    assert things_named_after("shared", notes) == shared


# --- equal bits -----------------------------------------------------------------------------------


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def renamed() -> nn.Module:
    return nn.Sequential(OrderedDict(into=nn.Linear(2, 3), act=nn.Tanh(), out=nn.Linear(3, 1)))


def train_one_step(run_dir: Path, model: Callable[[], nn.Module], *, lr: float) -> Compared:
    """A run whose scores are equal for any rate: they are those of step 0."""
    data = torch.linspace(-1, 1, 16).reshape(8, 2), torch.linspace(0, 1, 8)[:, None]
    sf.Run(
        model=model,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        train_data=data,
        batch_size=4,
        length="1 steps",
        optimizer=sf.optim.sgd(lr=lr),
        splits={"val": sf.Split(data, loss=False, metrics={"same": lambda *_: sf.Mean(1.0, 1)})},
        best="min val/same",
        evaluate_every="1 steps",
        run_dir=run_dir,
        console=False,
        report=False,
        device="cpu",
        precision="fp32",
    ).train()
    return Compared(variant(run_dir.name), read_run(run_dir))


def test_other_names_of_the_same_computation_are_equal_bits(tmp_path: Path) -> None:
    one = train_one_step(tmp_path / "one", plain, lr=0.1)
    other_names = train_one_step(tmp_path / "other names", renamed, lr=0.1)
    other_rate = train_one_step(tmp_path / "other rate", plain, lr=0.11)

    assert verdicts([one, other_names], baseline="one")["other names"] == EQUAL_BITS
    assert verdicts([one, other_rate], baseline="one")["other rate"] == "tie"
