"""Every finding on histories made by formula: made where it is so, not made where it is not, and at
its border; what each says; 4 seconds.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnose.border_histories import BORDERS, Border
from diagnose.faulty_histories import FAULTS, OVERFITTED, Fault, exploded, shared, slow_rank
from diagnose.histories import (
    EVERY,
    always,
    begun_at,
    data_check,
    described,
    diverging,
    event,
    falling,
    find,
    finds,
    flat,
    healthy,
    history,
    judge,
    layers,
    resume,
    scores,
    targets,
    train,
    wobble,
)
from in_one import in_one
from stated import numbers_in
from surefoot.optim.optimizers import OPTIMIZERS
from surefoot.tools.diagnose.checks import CHECKS, findings, format_findings, verdicts
from surefoot.tools.diagnose.finding import Finding, Healthy, Unknown
from surefoot.tools.diagnose.generalization import smoothed_floor
from surefoot.tools.diagnose.gradients import noise_scale
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.tracking.record import Record

_AT_STEP = re.compile(r"(?<!full )at step (\d+(?:,\d{3})*)")


# --- what must be found, and what must not --------------------------------------------------------


def test_there_is_a_fault_and_a_border_for_every_finding() -> None:
    names = {check.name for check in CHECKS}
    assert {fault.finding for fault in FAULTS} == names
    assert {border.finding for border in BORDERS} == names


@in_one
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_evidence_causes_and_what_to_try(fault: Fault) -> None:
    finding = find(fault.finding, fault.make())

    assert finding.severity == fault.severity
    assert finding.evidence
    assert finding.causes
    assert finding.try_
    assert finding.message.endswith(".")
    assert -math.inf not in finding.numbers.values()


@in_one
@pytest.mark.parametrize("border", BORDERS)
def test_what_is_just_not_so_is_not_found(border: Border) -> None:
    assert not finds(border.finding, border.make())


@pytest.mark.parametrize("standing", ["over", "running"])
def test_nothing_is_found_in_a_healthy_run(standing: str) -> None:
    assert findings(healthy(standing=standing)) == []


@in_one
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("standing", ["running", "over", "unknown"])
def test_a_few_records_are_evidence_of_nothing(count: int, standing: str) -> None:
    few = history(
        train(flat, count=count, host_memory_bytes=lambda place: 1e8 * place),
        layers(watched=count // 2),
        length=f"{EVERY * count} steps",
        standing=standing,
    )
    assert findings(few) == []


def test_nothing_is_needed_of_the_settings() -> None:
    settings = (
        "length",
        "schedule_of_steps",
        "schedule",
        "optimizer",
        "batch_size",
        "clip",
        "data",
    )
    bare = healthy(**dict.fromkeys(settings), kinds={}, program="script")
    assert findings(bare) == []


# --- nan is never evidence of health --------------------------------------------------------------


def full_records() -> list[Record]:
    """Records of a healthy run with every value that a check reads."""
    noise = {"small_count": 4, "small_squared": 1.5, "big_count": 8, "big_squared": 1.2}
    losses = [1 + 3 * math.exp(-place) for place in range(1, 9)]
    watched = layers(
        activation_rms=always({"0": 1.0}),
        saturated_fraction=always({"1": 0.1}),
        grad_noise=always(noise),
    )
    trained = begun_at(4.1, train(loss_max=lambda place: falling(place) + 0.1))
    return [*targets(10), *trained, *scores(losses, perplexity=[3.0] * 8), *watched]


def without_numbers(kind: str, name: str, *, after: int) -> History:
    """The same records, in which a value is not a number after a step."""
    records = full_records()
    for record in records:
        if record["kind"] == kind and name in record and record["step"] > after:
            value = record[name]
            record[name] = dict.fromkeys(value) if isinstance(value, dict) else None
    return history(records)


def kinds_and_names_of_numbers() -> list[tuple[str, str]]:
    pairs = set()
    for record in full_records():
        for name, value in record.items():
            is_number = isinstance(value, int | float | dict)
            if is_number and name not in ("step", "measured_step", "targets"):
                pairs.add((record["kind"], name))
    return sorted(pairs)


@in_one
@pytest.mark.parametrize(("kind", "name"), kinds_and_names_of_numbers())
@pytest.mark.parametrize("after", [0, 300])
def test_no_check_is_healthy_because_of_a_value_that_is_not_a_number(
    kind: str, name: str, after: int
) -> None:
    for verdict in verdicts(without_numbers(kind, name, after=after)):
        assert not re.search(r"\bnan\b", verdict.message), verdict
        if isinstance(verdict, Finding):
            assert not any(math.isnan(number) for number in verdict.numbers.values())


@in_one
@pytest.mark.parametrize(
    ("kind", "name", "checks"),
    [
        ("train", "loss", ["diverged", "loss-not-falling", "no-better-than-chance"]),
        ("train", "grad_norm", ["often-clipped"]),
        ("eval", "val/loss", ["overfitting", "still-improving"]),
    ],
)
def test_what_ends_in_nan_is_not_known_to_be_healthy(
    kind: str, name: str, checks: list[str]
) -> None:
    before = history(full_records())
    after = without_numbers(kind, name, after=300)
    for check in checks:
        assert isinstance(judge(check, before), Healthy)
        assert isinstance(judge(check, after), Unknown)


def with_values(records: list[Record], name: str, how: str) -> list[Record]:
    """Copies of records that lack a field, or whose field is no number."""
    values = {"null": None, "nan": math.nan, "inf": math.inf}
    changed = []
    for record in records:
        copy = {key: value for key, value in record.items() if key != name}
        if how != "lacking":
            copy[name] = values[how]
        changed.append(copy)
    return changed


OFTEN_LACKING = [
    "loss",
    "grad_norm",
    "clip_fraction",
    "lr",
    "targets_per_s",
    "host_memory_bytes",
    "data_wait_s",
]


@in_one
@pytest.mark.parametrize("name", OFTEN_LACKING)
@pytest.mark.parametrize("how", ["lacking", "null", "nan", "inf"])
def test_no_verdict_needs_a_field_that_older_runs_lack_or_that_is_no_number(
    name: str, how: str
) -> None:
    changed = with_values(train(), name, how)
    assert len(verdicts(history(changed, layers()))) == len(CHECKS)


@in_one
@pytest.mark.parametrize("name", OFTEN_LACKING)
@pytest.mark.parametrize("how", ["null", "nan", "inf"])
def test_no_number_in_every_third_record_is_no_error(name: str, how: str) -> None:
    records = train()
    records[::3] = with_values(records[::3], name, how)
    severities = [finding.severity for finding in findings(history(records, layers()))]
    assert "error" not in severities


def test_a_loss_that_was_not_compared_with_its_halves_is_not_known_to_be_a_mean() -> None:
    contract = {"holds": True, "description": "not checked: the loss of a batch is nan"}
    not_checked = history(data_check(loss_contract=contract))
    assert isinstance(judge("loss-contract", not_checked), Unknown)


# --- the loss -------------------------------------------------------------------------------------


def test_the_start_of_a_loss_is_that_of_step_0() -> None:
    verdict = judge("rate-too-high", history(begun_at(3.9, train())))
    assert isinstance(verdict, Healthy)
    assert "3.9" in verdict.message


@pytest.mark.parametrize("records", [train(exploded), begun_at(math.nan, train(exploded))])
def test_without_the_loss_of_step_0_it_is_not_known_that_a_loss_exploded(
    records: list[Record],
) -> None:
    assert not finds("rate-too-high", history(records))


@in_one
@pytest.mark.parametrize("name", [*OPTIMIZERS, "TheirsAdamW"])
@pytest.mark.parametrize("rate", [1e-4, 1e-2, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("divisor", [3, 10])
def test_no_remedy_for_a_rate_is_far_above_the_usual_one(
    name: str, rate: float, divisor: int
) -> None:
    usual = OPTIMIZERS[name].first_run[0] if name in OPTIMIZERS else 1e-2

    command = described(optimizer={"name": name, "lr": rate}).lr_divided(divisor)

    proposed = float(command.split()[1])
    assert proposed <= 10 * usual * 1.01
    if rate / divisor <= 10 * usual:
        assert proposed == pytest.approx(rate / divisor, rel=0.01)
    else:
        assert proposed == usual


def test_a_loss_between_two_guesses_is_neither_healthy_nor_a_finding() -> None:
    """It is that of a bad model, or of a good one with weighted targets."""
    between = history(targets(2, entropy=0.3), begun_at(0.7, train(always(0.5))))
    assert isinstance(judge("no-better-than-chance", between), Unknown)


def test_a_guess_is_known_of_the_targets_that_an_older_version_counted() -> None:
    counted = data_check(targets={"distinct": 2, "most_common_fraction": 0.9})
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)

    finding = find("no-better-than-chance", history(counted, train(always(entropy))))

    assert finding.numbers["chance"] == pytest.approx(entropy, rel=1e-12)


def test_divergence_names_the_layer_that_grew_first_and_the_step() -> None:
    def gradient(name: str, place: int) -> float:
        grows_from = 4 if name == "2.weight" else 5
        return 100.0 if place >= grows_from else 1.0

    finding = find("diverged", history(train(diverging), layers(gradient=gradient)))

    assert "2.weight" in finding.evidence[-1]
    assert numbers_in(finding.evidence[-1].replace("100x", "100")) == [100, 400]
    assert finding.step is not None
    assert 340 <= finding.step <= 400


def test_steps_of_which_none_was_applied_have_no_loss_of_zero() -> None:
    records = train(lambda place: falling(place) if place < 50 else math.nan)
    for record in records[50:]:
        record.update({"skipped": EVERY, "loss_applied": 0.0})
    lost = history(records, event("diverged"), length="1000 steps")

    finding = find("diverged", lost)

    assert len(lost.loss) == 50
    assert any(1 < number < 2 for number in numbers_in(finding.evidence[0]))  # the last finite one
    assert not finds("ended-early", lost)  # all is said of it


def test_before_the_first_update_no_rate_is_the_cause() -> None:
    records = train(always(math.nan), count=1)
    records[0].update({"skipped": EVERY, "skipped_steps": list(range(EVERY))})

    finding = find("diverged", history(records, event("diverged", EVERY)))

    assert finding.step == 0
    for text in (*finding.causes, *finding.try_):
        assert "rate" not in text
        assert "lr" not in text


def skipped_in_records(indexes: list[int]) -> list[Record]:
    """Records of a run that skipped these steps; a pass over its data has 100 steps."""

    def within(place: int) -> list[int]:
        return [index for index in indexes if 10 * place <= index < 10 * (place + 1)]

    return train(skipped=lambda place: len(within(place)), skipped_steps=within)


def test_a_bad_sample_is_told_by_its_coming_once_in_each_pass() -> None:
    records = skipped_in_records([33, 160, 288, 333, 487, 555])

    finding = find("non-finite-steps", history(records))

    stated = [numbers_in(line.replace("1%", "1")) for line in finding.evidence]
    assert [800] in stated  # one in each epoch
    assert [6, 600, 1] in stated
    assert finding.step == 33
    assert finding.try_[0].startswith("surefoot replay runs/a --step 33 ")


@pytest.mark.parametrize(
    ("indexes", "is_one_sample"),
    [
        ([33], False),
        ([33, 133], True),
        ([33, 133, 288], True),
        ([33, 77], False),
        ([33, 433], False),
    ],
)
def test_two_skipped_steps_in_two_passes_that_follow_are_one_sample(
    indexes: list[int], is_one_sample: bool
) -> None:
    finding = find("non-finite-steps", history(skipped_in_records(indexes)))

    one_in_each_epoch = any(numbers_in(line) == [800] for line in finding.evidence)
    assert one_in_each_epoch == is_one_sample


def test_a_jump_as_high_as_one_just_before_it_is_not_told_again() -> None:
    records = train(lambda place: 5.0 if place in (30, 34) else 1.0)
    assert find("loss-spikes", history(records)).numbers["spikes"] == 1


@pytest.mark.parametrize(("died", "is_told"), [(0.1, True), (0.11, False)])
def test_units_that_died_are_told_beside_what_shows_a_rate_that_is_too_high(
    died: float, is_told: bool
) -> None:
    watched = layers(
        update=always(1.01),
        zero_grad_row_fraction=lambda place: {"2.weight": died if place == 1 else 0.5},
    )

    finding = find("rate-too-high", history(train(), watched))

    assert any("2.weight (10%, then 50%)" in line for line in finding.evidence) == is_told


@pytest.mark.parametrize(("started_at", "severity"), [(0.12, "warning"), (2.3, "error")])
def test_a_loss_that_stays_where_it_is_good_is_no_error(started_at: float, severity: str) -> None:
    seen = data_check(targets={"distinct": 10, "most_common_fraction": 0.1})
    records = train(lambda place: started_at + 0.01 * wobble(place))

    finding = find("loss-not-falling", history(seen, records))

    assert finding.severity == severity
    may_be_pretrained = any("pretrained" in cause for cause in finding.causes)
    assert may_be_pretrained == (severity == "warning")


def rising(place: int) -> float:
    return 1.0 + 0.01 * place + 0.01 * wobble(place)


TWO_OPTIMIZERS = {name: {"name": "adam", "lr": 1e-3} for name in ("generator", "critic")}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            history(data_check(has_loss=True), train(rising), optimizer=TWO_OPTIMIZERS),
            id="one loss for both models",
        ),
        pytest.param(history(data_check(has_loss=False), train(rising)), id="one model"),
    ],
)
def test_a_loss_is_judged_by_its_fall(run: History) -> None:
    assert finds("loss-not-falling", run)
    assert finds("rate-too-high", run)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            history(data_check(has_loss=False), train(rising), optimizer=TWO_OPTIMIZERS),
            id="a loss for each model",
        ),
        pytest.param(
            history(train(lambda place: 0.5 * (place > 20) + 2.0 * wobble(place))),
            id="a loss around zero",
        ),
    ],
)
def test_a_loss_that_is_no_goal_is_not_judged_by_its_fall(run: History) -> None:
    assert isinstance(judge("loss-not-falling", run), Unknown)
    assert not finds("rate-too-high", run)


# --- splits and scores ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keeps_best", "advice"),
    [
        (True, re.compile(r'evaluate\(checkpoint="best"\)')),
        (False, re.compile(r"^Run\(best='min ")),
    ],
)
def test_overfitting_names_the_best_checkpoint_only_if_the_run_keeps_one(
    keeps_best: bool, advice: re.Pattern[str]
) -> None:
    overfitted = history(train(), scores(OVERFITTED))
    run = replace(overfitted, described=RunDescription(keeps_best=keeps_best))
    assert advice.search(find("overfitting", run).try_[0])


def test_overfitting_tells_what_other_scores_did() -> None:
    accuracy = [0.5, 0.6, 0.7, 0.72, 0.74, 0.76]
    finding = find("overfitting", history(train(), scores(OVERFITTED, accuracy=accuracy)))
    assert "val/accuracy 0.7 then, 0.76 now" in finding.evidence


def test_overfitting_names_its_best_step() -> None:
    finding = find("overfitting", history(train(), scores(OVERFITTED)))
    assert finding.step == 300
    assert finding.numbers["best"] == 1.5


@pytest.mark.parametrize(
    ("fields", "first_words"), [({}, "At least 14%"), ({"among_all": True}, "14%")]
)
def test_what_was_compared_with_a_part_of_the_training_data_is_told_as_the_least(
    fields: dict[str, Any], first_words: str
) -> None:
    looked_at = shared(14, samples=700, **fields)
    finding = find("train-validation-overlap", history(train(), looked_at))
    assert finding.message.startswith(f"{first_words} of val")


def test_a_run_still_improves_by_the_score_that_chooses_its_best_checkpoint() -> None:
    losses = [2.0 - 0.1 * place for place in range(10)]
    level = scores(losses, accuracy=[0.5] * 10)
    better = scores(losses, accuracy=[0.5 + 0.05 * place for place in range(10)])
    by_accuracy = ("max", "val/accuracy")

    assert finds("still-improving", history(train(), level))
    assert not finds("still-improving", history(train(), level, monitored=by_accuracy))
    finding = find("still-improving", history(train(), better, monitored=by_accuracy))
    assert "val/accuracy" in finding.message


def test_no_longer_run_is_advised_where_early_stopping_ended_the_run() -> None:
    losses = [2.0 - 0.1 * place for place in range(10)]
    constant = {"shape": "constant", "warmup": 0}
    records = [*train(lr=lambda _place: 1e-3), *scores(losses)]
    stopped = history(records, event("stopped early", 600), length="1000 steps", schedule=constant)

    assert isinstance(judge("still-improving", stopped), Healthy)
    high_rate = find("high-rate-at-end", stopped)
    assert '--length "600 steps" (now 1000 steps)' in high_rate.try_[0]
    assert not any("resume" in advice for advice in high_rate.try_)


def test_scores_of_odd_steps_are_told_at_those() -> None:
    run = history(train(), scores([2.0 - 0.1 * place for place in range(13)]))
    steps = [str(step) for step in run.records.scores.steps]

    (line,) = find("still-improving", run).evidence

    stated = _AT_STEP.findall(line)
    assert len(stated) == 2
    assert set(stated) <= set(steps)


# --- gradients and layers -------------------------------------------------------------------------


def test_of_unusual_updates_the_farthest_are_named_first() -> None:
    sizes = {"0.weight": 2.0, "2.weight": 30.0, "4.weight": 5.0, "6.weight": 5e-5, "8.weight": 1e-6}
    updates = layers(names=tuple(sizes), update=lambda name, place: sizes[name])

    finding = find("unusual-updates", history(train(), updates))

    assert "above 0.1: 2.weight (3), 4.weight (0.5), 0.weight (0.2)" in finding.evidence
    assert "below 1e-05: 8.weight (1e-07), 6.weight (5e-06)" in finding.evidence


def test_a_gradient_without_a_limit_of_the_users_own_is_not_clipped_too_often() -> None:
    records = train(clip_fraction=always(1.0), grad_norm=always(99.0))

    unclipped = judge("often-clipped", history(records, clip="off"))
    followed = judge("often-clipped", history(records, clip="auto 0.9"))

    assert isinstance(unclipped, Healthy)
    assert isinstance(followed, Healthy)
    assert "not" in unclipped.message.split()
    assert "not" not in followed.message.split()


def test_noise_scale_is_that_of_gradients_of_which_it_is_known() -> None:
    """Of samples whose gradients are a fixed vector and noise: the trace of the covariance over the
    squared norm.
    """
    generator = np.random.default_rng(0)
    truth = np.full(50, 0.2)
    deviation = 1.5
    rows = []
    for _ in range(4000):
        samples = truth + deviation * generator.standard_normal((8, 50))
        small_squared = (samples[:2].mean(0) ** 2).sum()
        big_squared = (samples.mean(0) ** 2).sum()
        rows.append([2.0, small_squared, 8.0, big_squared])

    expected = 50 * deviation**2 / (50 * 0.2**2)
    assert noise_scale(np.array(rows)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("smoothing", "classes"), [(0.1, 10), (0.1, 1000), (0.3, 5)])
def test_no_prediction_has_a_smoothed_loss_below_the_floor(smoothing: float, classes: int) -> None:
    torch = pytest.importorskip("torch")
    target = torch.full((classes,), smoothing / classes)
    target[0] += 1 - smoothing
    best_logits = target.log()[None]

    best = torch.nn.functional.cross_entropy(
        best_logits, torch.tensor([0]), label_smoothing=smoothing
    )

    assert smoothed_floor(smoothing, classes) == pytest.approx(float(best), rel=1e-5)


# --- memory and time ------------------------------------------------------------------------------


def test_memory_is_told_by_the_step_and_until_when() -> None:
    records = train(host_memory_bytes=lambda place: 500e6 + 1e6 * place)

    finding = find("growing-memory", history(records, memory_bytes=2_000_000_000))

    full_at_step = 600 + (2e9 - 559e6) / 1e5
    assert finding.numbers["bytes_per_step"] == pytest.approx(1e5)
    assert finding.numbers["full_at_step"] == pytest.approx(full_at_step, abs=2)


def test_how_much_longer_steps_take_is_told_of_the_last_third_against_the_first() -> None:
    records = train(
        count=61,
        training_s=lambda place: 1.0 + place,
        data_wait_s=always(2.0),
        targets_per_s=lambda place: 100 / (1 + place / 30),
    )

    finding = find("falling-throughput", history(records))

    # without the first record, thirds are of 20 records: their levels are in their middles
    training = f"{(1 + 50.5) / (1 + 10.5):.2g}x"
    waiting = "1x"
    assert re.findall(r"[\d.]+x", finding.evidence[1]) == [training, waiting]


def test_steps_that_are_slower_because_of_unfrozen_parameters_are_no_falling_throughput() -> None:
    slower = train(targets_per_s=lambda place: 100 / (1 + place / 30))
    frozen = [record | {"frozen_tensors": 4} for record in slower]
    at_step_300 = next(place for place, record in enumerate(slower) if record["step"] == 300)
    unfrozen = frozen[:at_step_300] + slower[at_step_300:]

    assert finds("falling-throughput", history(slower))
    assert finds("falling-throughput", history(frozen))
    assert not finds("falling-throughput", history(unfrozen))


def test_workers_to_try_are_those_that_keep_up() -> None:
    finding = find("data-bound", history(train(data_wait_s=always(2.4)), processors=8))
    assert finding.numbers["workers"] == 3  # 2.4 s of reading for 0.8 s of training


def test_a_stream_that_is_waited_for_gets_no_advice_about_workers() -> None:
    records = train(data_wait_s=always(2.4))
    finding = find("data-bound", history(records, data={"type": "Tape"}, processors=8))
    assert not any("workers=" in advice for advice in finding.try_)


def test_the_body_of_a_loop_is_no_wait() -> None:
    records = train(data_wait_s=always(0.4), user_s=always(4.0))
    assert not finds("data-bound", history(records))


def test_workers_that_are_set_are_not_advised() -> None:
    records = train(data_wait_s=always(2.4))

    finding = find("data-bound", history(records, processors=2, written={"workers": 2}))

    assert not any("(now 2)" in advice for advice in finding.try_)
    workers_and_processors = [8, 2]
    assert workers_and_processors in [numbers_in(advice) for advice in finding.try_]


def test_a_save_interval_that_is_not_known_is_not_told() -> None:
    records = train(saving_s=always(0.2), training_s=always(1.2))
    assert "not known" not in str(find("saving-too-long", history(records)))


def test_a_save_interval_that_is_long_is_not_advised() -> None:
    records = train(saving_s=always(0.2), training_s=always(1.2))
    finding = find("saving-too-long", history(records, written={"save_every": "15 min"}))
    assert not any("save_every" in advice for advice in finding.try_)


def test_the_newest_rank_that_is_slow_now_is_named_and_the_others_are_evidence() -> None:
    newest = slow_rank(5, 200, step=230, work="data_wait", median_s=0.0)

    finding = find("slow-rank", history(train(), slow_rank(), newest))

    assert finding.step == 200
    assert finding.numbers["rank"] == 5
    assert finding.numbers["times"] == 100
    assert "node7" in finding.evidence[1]
    assert numbers_in(finding.evidence[1])[:4] == [3, 90, 42, 30]  # rank, step, ms, median


def test_a_rank_that_is_no_longer_slow_is_evidence_beside_one_that_is() -> None:
    newest = slow_rank(5, 200, step=230)
    newest_ended = slow_rank(5, 200, step=400, work="data_wait", until_step=390)

    finding = find("slow-rank", history(train(), slow_rank(), newest, newest_ended))

    assert finding.step == 90
    assert finding.numbers["rank"] == 3
    assert finding.numbers["times"] == pytest.approx(1.4)
    assert numbers_in(finding.message)[-1] == 90  # since
    assert numbers_in(finding.evidence[1])[:3] == [5, 200, 390]


def test_a_rank_that_was_slow_in_an_earlier_session_is_slow_until_the_resume() -> None:
    finding = find("slow-rank", history(train(), slow_rank(), resume(300)))

    assert finding.severity == "note"
    assert finding.numbers["rank"] == 3
    assert numbers_in(finding.message)[-2:] == [90, 300]


def test_a_rank_that_is_slow_again_after_a_resume_is_slow_now() -> None:
    again = slow_rank(3, 310, step=340)
    finding = find("slow-rank", history(train(), slow_rank(), resume(300), again))
    assert finding.severity == "warning"


# --- the end of a run -----------------------------------------------------------------------------


RESUME = "surefoot resume runs/a"


def test_a_run_whose_records_are_lost_is_not_told_as_ended_early() -> None:
    verdict = judge("ended-early", history(saved_step=600))
    assert isinstance(verdict, Unknown)
    assert "surefoot verify runs/a" in verdict.message
    assert 0 in numbers_in(verdict.message)  # the step at which the records end


def test_a_run_that_was_killed_before_its_first_record_is_resumed_from_step_0() -> None:
    finding = find("ended-early", history())
    assert all("0 steps" not in advice for advice in finding.try_)
    assert finding.try_[0].startswith(f"{RESUME}  #")
    assert numbers_in(finding.try_[0]) == [0]


def test_a_killed_run_is_resumed_from_its_newest_checkpoint() -> None:
    finding = find("ended-early", history(train(count=40), saved_step=300))
    assert finding.try_[0].startswith(f"{RESUME}  #")
    assert numbers_in(finding.try_[0]) == [300]


@pytest.mark.parametrize(("target_count", "has_trained"), [(8.0, True), (0.0, False)])
def test_no_length_is_advised_where_no_step_was_trained(
    target_count: float, has_trained: bool
) -> None:
    failed = event("failed: ConfigError: no sample is left", 100)

    finding = find("ended-early", history(train(count=10, targets=always(target_count)), failed))

    assert any("--length" in advice for advice in finding.try_) == has_trained
    assert any("learning rate" in line for line in finding.evidence) == has_trained
    assert RESUME in finding.try_[0]


def test_steps_that_a_checkpoint_has_were_trained_where_no_record_tells_of_them() -> None:
    finding = find("ended-early", history(saved_step=40))
    assert finding.step == 40
    assert finding.numbers["made"] == 40
    assert any("--length" in advice for advice in finding.try_)


@pytest.mark.parametrize(
    "complete", [history(train()), history(train(count=40), event("stopped early", 400))]
)
def test_a_run_that_is_complete_is_judged_and_did_not_end_early(complete: History) -> None:
    assert isinstance(judge("ended-early", complete), Healthy)


@pytest.mark.parametrize(
    ("reason", "is_a_cause"), [("SIGINT", False), ("SIGTERM", True), ("time_limit", False)]
)
def test_a_time_limit_is_no_cause_of_a_run_that_somebody_stopped(
    reason: str, is_a_cause: bool
) -> None:
    stopped = history(train(count=40), event(f"stopped by {reason}", 400))
    finding = find("ended-early", stopped)
    assert any("time limit" in cause for cause in finding.causes) == is_a_cause


def test_a_resumed_run_is_one_curve_and_what_ended_an_earlier_session_is_no_end() -> None:
    failed = event("failed: OSError", 350)
    records = [*train(count=30), *failed, *resume(300), *train()[30:50]]

    still_running = history(records, standing="running")
    assert isinstance(judge("ended-early", still_running), Unknown)
    assert still_running.step == 500

    killed = history(records)
    assert numbers_in(find("ended-early", killed).evidence[0]) == [500, 600]

    complete = history(records, train()[50:])
    assert not finds("ended-early", complete)


def test_a_run_that_has_recorded_its_end_is_over_though_its_lock_is_held() -> None:
    ending = history(train(lr=always(1e-3)), event("finished"), standing="running")
    assert finds("high-rate-at-end", ending)


@pytest.mark.parametrize("name", ["ended-early", "high-rate-at-end", "still-improving"])
def test_while_it_trains_nothing_is_said_of_its_end(name: str) -> None:
    records = train(count=40, lr=always(1e-3))
    going_on = history(records, scores([3.0, 2.0, 1.5, 1.0]), standing="running")
    assert isinstance(judge(name, going_on), Unknown)


# --- what is to be typed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "replay", "rate_test"),
    [
        (
            "recipe",
            "surefoot replay runs/a --step 309",
            "surefoot find-lr runs/a --checkpoint 0",
        ),
        ("script", "print(sf.load(run).replay(309))", "print(sf.tune.find_lr(run))"),
    ],
)
def test_what_is_to_be_typed_can_be_typed_for_the_program_that_made_the_run(
    program: str, replay: str, rate_test: str
) -> None:
    spike = train(lambda place: falling(place) + 4.0 * (place == 30))

    jumped = find("loss-spikes", history(spike, program=program))
    not_falling = find("loss-not-falling", history(train(flat), program=program))

    assert jumped.try_[0].startswith(replay)
    assert not_falling.try_[-1].startswith(rate_test)


def advice_to_a_script(fault: Fault, **settings: Any) -> tuple[str, ...]:
    """What to try where a script made the run, with other settings; nothing without the finding."""
    run = fault.make()
    identity = {**run.described.identity, **settings}
    of_a_script = replace(run.described, program="script", identity=identity)
    verdict = judge(fault.finding, replace(run, described=of_a_script))
    return verdict.try_ if isinstance(verdict, Finding) else ()


def test_no_finding_of_a_scripts_run_has_a_command_that_is_refused_for_it_or_a_flag() -> None:
    texts: list[str] = []
    for fault in FAULTS:
        texts += advice_to_a_script(fault)
        texts += advice_to_a_script(fault, schedule={"shape": "wsd", "warmup": 0})

    commands = "evaluate|replay|resume|train|profile|find-lr|find-batch-size|predict"
    refused = re.compile(rf"surefoot ({commands})\b|(^| )--\w")
    assert [text for text in texts if refused.search(text)] == []
    for call in (
        'load(run).evaluate(checkpoint="best")',
        "load(run).replay(",
        "profile.measure(run)",
        "tune.find_lr(run)",
    ):
        assert any(call in text for text in texts), call


@pytest.mark.parametrize(
    ("program", "advice"),
    [
        ("recipe", "--optimizer.lr 0.0001 (now 0.001)"),
        ("script", "adamw(lr=0.0001) (now 0.001)"),
    ],
)
def test_settings_to_try_are_typed_with_their_present_values(program: str, advice: str) -> None:
    run = history(train(flat), layers(update=always(3.0)), program=program)
    assert find("rate-too-high", run).try_[0] == advice


def test_where_too_few_records_were_made_it_says_how_to_have_more() -> None:
    hint = '--log-every "4 steps"'
    few = history(train(count=11))
    enough = history(train(count=12))
    assert hint in format_findings(few, verdicts(few), every=True)
    assert hint not in format_findings(enough, verdicts(enough), every=True)


def test_commands_quote_the_path_of_a_run() -> None:
    run = RunDescription(name="runs/a b", program="gpt")
    for command in (run.go_on(), run.replay(3), run.profile(), run.rate_test):
        assert "runs/a b" in shlex.split(command)


@pytest.mark.parametrize(
    ("identity", "limit"), [({"max_bad_steps": 0}, 0), ({"max_bad_steps": 3}, 3), ({}, 5)]
)
def test_no_bad_step_in_a_row_is_a_limit_too(identity: dict[str, Any], limit: int) -> None:
    assert RunDescription(identity=identity).max_bad_steps == limit


# --- all findings of a run ------------------------------------------------------------------------


def test_errors_come_first() -> None:
    records = train(
        flat, data_wait_s=always(0.1), clip_fraction=always(1.0), grad_norm=always(11.0)
    )

    severities = [finding.severity for finding in findings(history(records))]

    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert set(severities) == {"error", "warning", "note"}


def test_a_finding_as_json_has_its_numbers() -> None:
    finding = findings(history(train(flat)))[0]
    assert finding.to_dict()["numbers"]["start"] == pytest.approx(2.3, abs=0.02)


@in_one
@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_is_told_at_a_step_at_which_something_was_recorded(fault: Fault) -> None:
    """`step` of a record counts steps made; what is watched or is the largest of a record has the
    index of its step.
    """
    run = fault.make()
    recorded = {
        *run.records.train.steps,
        *run.column("loss_max_step").value,
        *run.records.scores.steps,
        *run.records.layers.steps,
        run.step,
    }

    finding = find(fault.finding, run)

    for line in finding.evidence:
        for step in _AT_STEP.findall(line):
            assert int(step.replace(",", "")) in recorded, line
