"""Every finding on histories made by formula: found when it is so, not found when it is not, and at
its border; 2 seconds.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnose.histories import (
    EVERY,
    KINDS,
    RECORDS,
    begun_at,
    described,
    falling,
    found,
    healthy,
    history,
    layers,
    scores,
    targets,
    train,
    verdict,
    wobble,
)
from in_one import in_one
from stated import numbers_in
from surefoot.config.behavior import AVERAGES
from surefoot.optim.optimizers import OPTIMIZERS
from surefoot.tools.diagnose.checks import CHECKS, findings, format_findings, verdicts
from surefoot.tools.diagnose.finding import Finding, Healthy, Unknown
from surefoot.tools.diagnose.generalization import smoothed_floor
from surefoot.tools.diagnose.gradients import noise_scale
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.tracking.record import Record


def slow_rank(
    rank: int = 3, since_step: int = 90, *, step: int = 110, **changes: Any
) -> list[Record]:
    usual = {"host": "node7", "work": "forward", "own_s": 0.042, "median_s": 0.03, "share": 0.11}
    return [
        {
            "kind": "slow_rank",
            "step": step,
            "rank": rank,
            "since_step": since_step,
            **usual,
            **changes,
        }
    ]


def event(what: str, step: int = RECORDS * EVERY) -> list[Record]:
    return [{"kind": "event", "step": step, "event": what}]


def data(**told: Any) -> list[Record]:
    return [{"kind": "data_check", "step": 0, **told}]


def shared(found: int, *, samples: int, **told: Any) -> list[Record]:
    """Of 100 of a split `found` are among the 100 training samples that were looked at."""
    return data(
        samples=samples,
        checked=100,
        overlap={"val": {"checked": 100, "overlapping": found, **told}},
    )


def passages(found: int) -> dict[str, Any]:
    return {"checked": 100, "overlapping": found, "passages": True}


def noisy(batch: int, scale: float, *, watched: int = 8) -> list[Record]:
    """Watched steps of two micro-batches, whose squared norms are those of gradient 1 and a noise
    of `scale`, exactly.
    """
    told = {
        "small_count": batch // 2,
        "small_squared": 1 + scale / (batch // 2),
        "big_count": batch,
        "big_squared": 1 + scale / batch,
    }
    return layers(watched=watched, grad_noise=lambda _: told)


def flat(place: int) -> float:
    return 2.3 + 0.02 * wobble(place)


def noisy_scores() -> list[float]:
    """Level for long, each 3 % up or down by chance, the lowest in the middle and the last two
    above the level.
    """
    found = [1 + 3 * math.exp(-place / 4) + 0.03 * (-1) ** place for place in range(60)]
    return [*found[:25], 0.955, *found[26:58], 1.02, 1.02]


def below_zero(place: int) -> float:
    """Learnt at once, and as good from then on; within 3 % of it."""
    return -5 + 5 * math.exp(-place) + 0.02 * wobble(place)


def exploded(place: int) -> float:
    """Within the first record it rose to a million; it has fallen since, and varies as much as it
    is high.
    """
    return 1e6 if place == 0 else (300 * math.exp(-place / 10) + 20) * (1 + 0.5 * wobble(place))


LN_2, LN_10 = math.log(2), math.log(10)


# --- what must be found ---------------------------------------------------------------------------

FAULTS: dict[str, list[tuple[str, Callable[[], History]]]] = {
    "no-better-than-chance": [
        ("error", lambda: history(targets(10), train(flat))),
        ("error", lambda: history(targets(2), begun_at(LN_2, train(exploded)))),
        (
            "error",
            lambda: history(targets(2), begun_at(0.7, train(exploded)), scores([4.8, 15.6, 22.5])),
        ),
        (  # of inputs that are not normalized: the units died, and the frequencies are left
            "error",
            lambda: history(
                targets(10, entropy=1.5),
                begun_at(80.0, train(lambda place: 60.0 if place == 0 else 1.5)),
            ),
        ),
        (  # it comes down to the frequencies from above, and not below step 0
            "error",
            lambda: history(
                targets(10),
                begun_at(LN_10, train(lambda place: LN_10 + math.exp(-place / 15))),
            ),
        ),
        ("warning", lambda: history(targets(10), train(), scores([2.4, 2.31, 2.5, 3.0]))),
    ],
    "loss-not-falling": [
        ("error", lambda: history(train(flat))),
        ("error", lambda: history(begun_at(LN_2, train(exploded)))),
    ],
    "rate-too-high": [
        ("error", lambda: history(begun_at(LN_2, train(exploded)))),
        ("warning", lambda: history(train(), layers(update=lambda name, place: 1.01))),
        ("error", lambda: history(train(flat), layers(update=lambda name, place: 3.0))),
        ("error", lambda: history(train(lambda place: 2.3 + 0.1 * place))),
        (
            "warning",
            lambda: history(train(lambda place: 4.0 - 0.1 * min(place, 10) + 0.2 * (place > 12))),
        ),  # it bounced
        (
            "warning",
            lambda: history(
                train(lambda place: 5.5 if place == 0 else 9.0 * math.exp(-place / 30))
            ),
        ),  # at once
        (
            "warning",
            lambda: history(
                train(
                    lambda place: (
                        [5.0, 6.5, 7.0][place]
                        if place < 3
                        else (7.0 if place < 16 else 3.0) + 0.48 * wobble(place)
                    )
                )
            ),
        ),  # within the first quarter
    ],
    "rate-too-low": [
        ("warning", lambda: history(train(lambda place: 2.3 - 0.003 * place, lr=lambda _: 1e-5))),
        ("warning", lambda: history(train(), layers(update=lambda name, place: 9e-5))),
        (
            "warning",
            lambda: history(train(flat), layers(update=lambda name, place: 1.6e-3)),
        ),  # 600 times are 0.096
    ],
    "diverged": [
        ("error", lambda: history(train(lambda place: falling(place) if place < 40 else 9.0))),
        ("error", lambda: history(train(lambda place: 2.3 if place < 12 else 3.0 + 0.1 * place))),
        ("error", lambda: history(train(), event("diverged"))),
        (
            "error",
            lambda: history(
                train(
                    loss=lambda place: falling(place) if place < 50 else math.nan,
                    skipped=lambda place: 0 if place < 50 else EVERY,
                )
            ),
        ),
    ],
    "non-finite-steps": [
        ("warning", lambda: history(train(skipped=lambda place: int(place == 7)))),
        ("error", lambda: history(train(skipped=lambda place: int(place % 2)))),
        ("note", lambda: history(train(skipped=lambda place: int(place < 3)), precision="fp16")),
    ],
    "loss-spikes": [
        ("warning", lambda: history(train(lambda place: falling(place) + 4.0 * (place == 30)))),
        (
            "warning",
            lambda: history(
                train(loss_max=lambda place: falling(place) + 0.3 + 2.0 * (place == 30))
            ),
        ),
    ],
    "overfitting": [
        ("warning", lambda: history(train(), scores([3.0, 2.0, 1.5, 1.6, 1.7, 1.9]))),
        ("warning", lambda: history(train(), scores([-2.0, -3.0, -4.0, -3.7, -3.5, -3.0]))),
    ],
    "train-validation-overlap": [
        (
            "error",
            lambda: history(train(), data(overlap={"val": {"checked": 100, "overlapping": 50}})),
        ),
        ("warning", lambda: history(train(), shared(14, samples=7000))),
        ("warning", lambda: history(train(), shared(14, samples=700, among_all=True))),
        (
            "warning",
            lambda: history(train(), data(overlap={"val": {"checked": 100, "overlapping": 1}})),
        ),
        (
            "note",
            lambda: history(train(), data(overlap={"val": {"checked": 1000, "overlapping": 1}})),
        ),
        ("note", lambda: history(train(), data(overlap={"val": passages(9)}))),
        ("warning", lambda: history(train(), data(overlap={"val": passages(10)}))),
        ("error", lambda: history(train(), data(overlap={"val": passages(50)}))),
        (
            "warning",
            lambda: history(
                train(), data(overlap={"a": passages(9), "b": {"checked": 100, "overlapping": 2}})
            ),
        ),
        (
            "note",
            lambda: history(
                train(), data(overlap={"val": {"checked": 9, "overlapping": 9, "same": True}})
            ),
        ),
    ],
    "non-finite-scores": [
        ("warning", lambda: history(train(), scores([2.0, 1.5, math.nan, math.nan]))),
        ("note", lambda: history(train(), scores([2.0, 1.5], auc=[0.5, math.nan]))),
    ],
    "constant-targets": [
        (
            "error",
            lambda: history(train(), data(targets={"distinct": 1, "most_common_fraction": 1.0})),
        ),
        (
            "warning",
            lambda: history(train(), data(targets={"distinct": 9, "most_common_fraction": 0.95})),
        ),
    ],
    "loss-contract": [
        (
            "warning",
            lambda: history(
                train(), data(loss_contract={"holds": False, "description": "2 for a batch, 4 for"})
            ),
        ),
    ],
    "average-too-slow": [
        ("warning", lambda: history(train(), ema=0.999)),  # of an older version
        ("warning", lambda: history(train(), ema=0.999, ema_ramp=False, behavior=AVERAGES)),
        ("warning", lambda: history(train(), ema=0.9, ema_every="100 steps", ema_ramp=False)),
    ],
    "dead-units": [
        (
            "warning",
            lambda: history(train(), layers(zero_grad_row_fraction=lambda _: {"2.weight": 0.5})),
        ),
        ("error", lambda: history(train(), layers(saturated_fraction=lambda _: {"1": 1.0}))),
    ],
    "saturated-units": [
        ("warning", lambda: history(train(), layers(saturated_fraction=lambda _: {"3": 0.5})))
    ],
    "vanishing-gradient": [
        (
            "warning",
            lambda: history(
                train(), layers(gradient=lambda name, place: 9e-5 if name[0] == "0" else 1.0)
            ),
        ),
        ("error", lambda: history(train(flat, grad_norm=lambda _: 0.0))),
    ],
    "growing-gradient": [
        ("warning", lambda: history(train(grad_norm=lambda place: 0.1 * 1.1**place)))
    ],
    "often-clipped": [
        ("note", lambda: history(train(clip_fraction=lambda _: 0.91, grad_norm=lambda _: 2.0))),
        ("warning", lambda: history(train(clip_fraction=lambda _: 0.91, grad_norm=lambda _: 10.0))),
    ],
    "never-updated": [
        ("warning", lambda: history(train(), layers(never_updated=lambda _: ["9.weight"]))),
        (
            "warning",
            lambda: history(
                train(), layers(update=lambda name, place: 0.0 if name[0] == "2" else 0.01)
            ),
        ),
    ],
    "unusual-updates": [
        (
            "note",
            lambda: history(
                train(), layers(update=lambda name, place: 1.01 if name[0] == "2" else 0.01)
            ),
        ),
        (
            "warning",
            lambda: history(
                train(), layers(update=lambda name, place: 0.01 if name[0] == "2" else 9e-5)
            ),
        ),
    ],
    "batch-too-small": [
        ("note", lambda: history(train(), noisy(8, 81.0))),
        ("warning", lambda: history(train(), noisy(8, 8000.0))),
    ],
    "smoothed-perplexity": [
        (
            "warning",
            lambda: history(
                train(),
                scores([3.0, 2.0, 1.5], perplexity=[20.1, 7.4, 4.5]),
                program="file",
                identity={"loss": {"label_smoothing": 0.1}},
            ),
        )
    ],
    "growing-memory": [
        ("note", lambda: history(train(host_memory_bytes=lambda place: 500e6 + 1e6 * place))),
        (
            "error",
            lambda: history(
                train(host_memory_bytes=lambda place: 500e6 + 1e7 * place),
                memory_bytes=1_050_000_000,
            ),
        ),
        (
            "note",
            lambda: history(train(device_memory_peak_bytes=lambda place: 500e6 + 1e6 * place)),
        ),
    ],
    "data-bound": [
        ("note", lambda: history(train(data_wait_s=lambda _: 0.1))),
        ("warning", lambda: history(train(data_wait_s=lambda _: 0.4))),
    ],
    "evaluating-too-long": [
        ("warning", lambda: history(train(evaluating_s=lambda _: 0.3))),
        ("note", lambda: history(train(evaluating_s=lambda _: 0.1, training_s=lambda _: 0.1))),
    ],
    "saving-too-long": [
        ("warning", lambda: history(train(saving_s=lambda _: 0.2, training_s=lambda _: 1.2))),
        ("note", lambda: history(train(saving_s=lambda _: 0.1))),
    ],
    "slow-rank": [
        ("warning", lambda: history(train(), slow_rank())),
        ("note", lambda: history(train(), slow_rank(), slow_rank(step=400, until_step=390))),
        ("note", lambda: history(train(), slow_rank(), [{"kind": "resume", "step": 110}])),
    ],
    "falling-throughput": [
        ("note", lambda: history(train(targets_per_s=lambda place: 100 / (1 + place / 30))))
    ],
    "jittering-throughput": [
        ("note", lambda: history(train(targets_per_s=lambda place: 100 + 60 * wobble(place))))
    ],
    "ended-early": [
        ("warning", lambda: history(train(count=40))),
        ("note", lambda: history(train(count=40), event("stopped by SIGTERM", 400))),
        ("note", lambda: history(train(count=40), written={"stop_after": "400 steps"})),
    ],
    "long-warm-up": [
        ("warning", lambda: history(train(), schedule={"shape": "cosine", "warmup": 151}))
    ],
    "high-rate-at-end": [
        (
            "note",
            lambda: history(train(lr=lambda _: 1e-3), schedule={"shape": "constant", "warmup": 0}),
        )
    ],
    "still-improving": [
        ("note", lambda: history(train(), scores([2.0 - 0.1 * place for place in range(10)])))
    ],
}

CASES = [(name, severity, make) for name, cases in FAULTS.items() for severity, make in cases]


def test_there_is_a_fault_for_every_finding() -> None:
    assert list(FAULTS) != []
    assert {check(healthy()).name for check in CHECKS} == set(FAULTS)


@in_one
@pytest.mark.parametrize(
    ("name", "severity", "make"), CASES, ids=[f"{name}-{severity}" for name, severity, _ in CASES]
)
def test_a_fault_is_found_with_evidence_causes_and_what_to_try(
    name: str, severity: str, make: Callable[[], History]
) -> None:
    finding = found(name, make())
    assert finding is not None
    assert finding.severity == severity
    assert finding.evidence
    assert finding.causes
    assert finding.try_
    assert finding.message.endswith(".")
    assert all(
        math.isfinite(number) or number > 0
        for number in finding.numbers.values()
        if not math.isnan(number)
    )


def test_nothing_is_found_in_a_healthy_run() -> None:
    assert findings(healthy()) == []
    assert findings(healthy(standing="running")) == []


# --- nan is never evidence of health --------------------------------------------------------------


def full() -> list[list[Record]]:
    """Records of a healthy run with every value that a check reads."""
    noise = {"small_count": 4, "small_squared": 1.5, "big_count": 8, "big_squared": 1.2}
    losses = [1 + 3 * math.exp(-place) for place in range(1, 9)]
    watched = layers(
        activation_rms=lambda _: {"0": 1.0},
        saturated_fraction=lambda _: {"1": 0.1},
        grad_noise=lambda _: noise,
    )
    trained = begun_at(4.1, train(loss_max=lambda place: falling(place) + 0.1))
    return [targets(10), trained, scores(losses, perplexity=[3.0] * 8), watched]


def without_numbers(kind: str, name: str, *, after: int) -> History:
    """The same records, in which a value is not a number after a step."""
    parts = full()
    for record in (record for part in parts for record in part):
        if record["kind"] == kind and name in record and record["step"] > after:
            value = record[name]
            record[name] = dict.fromkeys(value) if isinstance(value, dict) else None
    return history(*parts)


VALUES = {
    (record["kind"], name)
    for part in full()
    for record in part
    for name, value in record.items()
    if isinstance(value, int | float | dict) and name not in ("step", "measured_step", "targets")
}


@in_one
@pytest.mark.parametrize(("kind", "name"), sorted(VALUES))
@pytest.mark.parametrize("after", [0, 300])
def test_no_check_is_healthy_because_of_a_value_that_is_not_a_number(
    kind: str, name: str, after: int
) -> None:
    for told in verdicts(without_numbers(kind, name, after=after)):
        assert not re.search(r"\bnan\b", told.message), told
        if isinstance(told, Finding):
            assert not any(math.isnan(number) for number in told.numbers.values())


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
    before = history(*full())
    after = without_numbers(kind, name, after=300)
    for check in checks:
        assert isinstance(verdict(check, before), Healthy)
        assert isinstance(verdict(check, after), Unknown)


def test_a_loss_that_was_not_compared_with_its_halves_is_not_known_to_be_a_mean() -> None:
    not_checked = {"holds": True, "description": "not checked: the loss of a batch is nan"}
    assert isinstance(verdict("loss-contract", history(data(loss_contract=not_checked))), Unknown)


def test_the_start_of_a_loss_is_that_of_step_0() -> None:
    started = verdict("rate-too-high", history(begun_at(3.9, train())))
    assert isinstance(started, Healthy)
    assert "3.9" in started.message
    for records in (train(exploded), begun_at(math.nan, train(exploded))):  # it is not known
        assert not isinstance(verdict("rate-too-high", history(records)), Finding)


@in_one
@pytest.mark.parametrize("name", [*OPTIMIZERS, "TheirsAdamW"])
@pytest.mark.parametrize("rate", [1e-4, 1e-2, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("by", [3, 10])
def test_no_remedy_for_a_rate_is_far_above_the_usual_one(name: str, rate: float, by: int) -> None:
    usual = OPTIMIZERS[name].first_run[0] if name in OPTIMIZERS else 1e-2
    command = described(optimizer={"name": name, "lr": rate}).lr_divided(by)
    proposed = float(command.split()[1])
    assert proposed <= 10 * usual * 1.01
    if rate / by <= 10 * usual:
        assert proposed == pytest.approx(rate / by, rel=0.01)
    else:
        assert proposed == usual


def test_a_loss_between_two_guesses_is_neither_healthy_nor_a_finding() -> None:
    """It is that of a bad model, or of a good one with weighted targets."""
    between = history(targets(2, entropy=0.3), begun_at(0.7, train(lambda _: 0.5)))
    assert isinstance(verdict("no-better-than-chance", between), Unknown)


def test_a_guess_is_known_of_the_targets_that_an_older_version_counted() -> None:
    counted = data(targets={"distinct": 2, "most_common_fraction": 0.9})
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    finding = found("no-better-than-chance", history(counted, train(lambda _: entropy)))
    assert finding is not None
    assert finding.numbers["chance"] == pytest.approx(entropy, rel=1e-12)


# --- and at the borders what must not -------------------------------------------------------------

BORDERS: dict[str, list[Callable[[], History]]] = {
    "no-better-than-chance": [
        lambda: history(targets(10), begun_at(2.4, train())),
        lambda: history(targets(10), begun_at(2.4, train(falling)), scores([2.2, 3.0])),
        lambda: history(targets(10), begun_at(23.0, train(lambda p: 10 * falling(p)))),  # a sum
        lambda: history(targets(10), begun_at(4.6, train(lambda p: 2.6 + 2 * math.exp(-p / 9)))),
        lambda: history(  # weighted: far above the frequencies, and below a uniform guess
            targets(2, entropy=0.1), begun_at(0.72, train(lambda p: 0.3 + 0.4 * math.exp(-p / 9)))
        ),
        lambda: history(  # smoothed or mixed: high in training, but not in the split
            targets(10), begun_at(2.4, train(flat)), scores([2.2, 1.5, 1.4])
        ),
        lambda: history(  # passes the frequencies of its targets
            targets(1000, entropy=5.0), begun_at(6.9, train(lambda p: 6.9 - 0.035 * p))
        ),
        lambda: history(  # of several tokens for a sample
            targets(100, entropy=2.3), begun_at(4.6, train(flat, samples=lambda _: 8))
        ),
        lambda: history(targets(10), train(flat), scores([9.0, 9.0], accuracy=[0.5, 0.6])),
        lambda: history(targets(10), train(flat, count=4), length="40 steps"),
        lambda: history(targets(10), train(flat, count=25), standing="running"),
        lambda: history(targets(500), train(lambda place: math.log(500))),  # 10 of each target
        lambda: history(  # a GAN
            [targets(10)[0] | {"has_loss": False}],
            train(flat),
            optimizer={"d": {"name": "adamw", "lr": 1e-3}, "g": {"name": "adamw", "lr": 1e-3}},
        ),
        lambda: history(train(flat)),
    ],
    "loss-not-falling": [lambda: history(train(lambda place: 2.3 - 0.001 * place))],
    "rate-too-high": [
        lambda: history(begun_at(3.9, train())),
        lambda: history(begun_at(4.0, train(lambda place: 1.0 if place < 20 else 1.2))),
        lambda: history(  # a batch of few targets that were easy
            begun_at(0.01, train(lambda place: 1 + 0.3 * wobble(place), targets=lambda _: 20))
        ),
        lambda: history(begun_at(1.0, train(lambda place: 2.3 * (1 + 0.6 * wobble(place))))),
        lambda: history(train(), layers(update=lambda name, place: 0.99)),
        lambda: history(
            train(),
            layers(zero_grad_row_fraction=lambda place: {"2.weight": 0.0 if place < 2 else 0.9}),
        ),  # it may be well
        lambda: history(train(below_zero)),
        lambda: history(train(lambda place: 2.3 + 0.1 * (place > 40))),  # by 4 % only
        lambda: history(train(lambda place: 4.0 - 0.1 * min(place, 10) + 0.05 * (place > 12))),
        lambda: history(
            train(
                lambda place: (
                    4.0 - 0.1 * min(place, 10) + 0.2 * (12 < place < 20) - 0.1 * (place >= 20)
                )
            )
        ),
    ],
    "rate-too-low": [
        lambda: history(train(), layers(update=lambda name, place: 1.1e-4)),
        lambda: history(train(), layers(update=lambda name, place: 1.6e-3)),
        lambda: history(train(flat), layers(update=lambda name, place: 1.7e-3)),
        lambda: history(
            train(lambda place: 2.3 - 0.02 * place, lr=lambda _: 1e-5)
        ),  # a line, but it learns
        lambda: history(train(lambda place: 2.1 + 0.2 * math.exp(-place / 12), lr=lambda _: 1e-5)),
    ],
    "diverged": [
        lambda: history(
            train(lambda place: falling(place) + 0.9 * (place >= 40))
        ),  # lost a third of what it had gained
        lambda: history(train(lambda place: falling(place) + 5 * (place == 40))),  # and came back
        lambda: history(train(skipped=lambda place: 3 if place == RECORDS - 1 else 0)),
    ],
    "non-finite-steps": [lambda: history(train())],
    "loss-spikes": [
        lambda: history(
            train(lambda place: falling(place) + 0.2 * (place == 40))
        ),  # below a quarter
        lambda: history(train(lambda place: 9.0 if place == 0 else falling(place))),  # the start
    ],
    "overfitting": [
        lambda: history(train(), scores([3.0, 2.0, 1.5, 1.51, 1.52, 1.52])),  # by 1 %
        lambda: history(train(), scores([3.0, 2.0, 1.5, 1.4, 1.3, 1.6])),  # once
        lambda: history(
            train(), scores([3.0, 2.0, 1.5, 1.6, 1.5, 1.9])
        ),  # of the last two the last one alone
        lambda: history(train(), scores([3.0, 2.0, 1.5, 1.6, 1.9, 1.5])),
        lambda: history(
            train(flat), scores([3.0, 2.0, 1.5, 1.6, 1.7, 1.9])
        ),  # training does not fall
        lambda: history(train(), scores(noisy_scores())),
    ],
    "train-validation-overlap": [
        lambda: history(train(), data(overlap={"val": {"checked": 100, "overlapping": 0}})),
        lambda: history(
            train(),
            data(overlap={"train_data": {"checked": 100, "overlapping": 100, "same": True}}),
        ),
    ],
    "non-finite-scores": [
        lambda: history(train(), scores([math.nan, 1.5])),
        lambda: history(train(lambda _: math.nan), scores([2.0, math.nan])),
    ],
    "constant-targets": [
        lambda: history(train(), data(targets={"distinct": 2, "most_common_fraction": 0.94}))
    ],
    "loss-contract": [
        lambda: history(
            train(),
            data(loss_contract={"holds": True, "description": "holds: 2 for a batch, 2 for"}),
        ),
        lambda: history(
            train(),
            data(loss_contract={"holds": True, "description": "not checked: it draws numbers"}),
        ),
    ],
    "average-too-slow": [
        lambda: history(train()),
        lambda: history(train(), ema=0.9999, behavior=AVERAGES),  # its decay rises
        lambda: history(train(), ema=0.99, ema_ramp=False, behavior=AVERAGES),
        lambda: history(
            train(), ema=0.999, ema_start="600 steps", ema_ramp=False, behavior=AVERAGES
        ),  # it has not begun
    ],
    "dead-units": [
        lambda: history(train(), layers(zero_grad_row_fraction=lambda _: {"2.weight": 0.49})),
        lambda: history(
            train(),
            layers(zero_grad_row_fraction=lambda _: {"2.weight": 0.9}),
            kinds=KINDS | {"2": "Embedding"},
        ),
        lambda: history(train(), layers(saturated_fraction=lambda _: {"1": 0.95})),  # sparse
        lambda: history(
            train(),
            layers(zero_grad_row_fraction=lambda place: {"2.weight": 1.0 if place == 0 else 0.0}),
        ),  # a head from 0
    ],
    "saturated-units": [
        lambda: history(train(), layers(saturated_fraction=lambda _: {"3": 0.49, "1": 0.6}))
    ],
    "vanishing-gradient": [
        lambda: history(
            train(), layers(gradient=lambda name, place: 1.1e-4 if name[0] == "0" else 1.0)
        ),
        lambda: history(
            train(),
            layers(
                watched=12,
                weight=lambda name, place: 1e-5 if name[0] == "0" and place < 7 else 10.0,
            ),
            schedule={"shape": "linear", "warmup": 700},
        ),  # a projection that starts at 0
        lambda: history(
            train(),
            layers(
                names=("0.weight", "0.bias"),
                gradient=lambda name, place: 1e-9 if "bias" in name else 1.0,
                zero_grad_row_fraction=lambda _: {},
            ),
        ),
    ],
    "growing-gradient": [
        lambda: history(train(grad_norm=lambda place: 0.5 + 4.4 * place / RECORDS))
    ],
    "often-clipped": [
        lambda: history(train(clip_fraction=lambda _: 0.89, grad_norm=lambda _: 2.0)),
        lambda: history(train(clip_fraction=lambda _: 1.0, grad_norm=lambda _: 1.9)),
        lambda: history(
            train(clip_fraction=lambda _: 1.0, grad_norm=lambda _: 9.0), clip="auto 0.9"
        ),
    ],
    "never-updated": [
        lambda: history(train(), layers(update=lambda name, place: 0.01 * (place == 5)))
    ],
    "unusual-updates": [
        lambda: history(
            train(), layers(update=lambda name, place: 0.99 if name[0] == "2" else 1.1e-4)
        ),
        lambda: history(
            train(),
            layers(weight=lambda name, place: 0.01 if name[0] == "2" and place < 4 else 10.0),
        ),  # began at 0
        lambda: history(
            train(lr=lambda place: 1e-3 if place < 31 else 1e-6),
            layers(update=lambda name, place: 0.01 if place < 4 else 1e-7),
        ),
    ],
    "batch-too-small": [lambda: history(train(), noisy(8, 79.0))],
    "smoothed-perplexity": [
        lambda: history(
            train(), scores([3.0], perplexity=[20.1]), identity={"label_smoothing": 0.1}
        ),  # a recipe's
        lambda: history(train(), scores([3.0], perplexity=[20.1]), program="file"),
        lambda: history(
            train(),
            data(targets={"distinct": 1000}),
            scores([0.5], perplexity=[1.65]),
            program="file",
            identity={"label_smoothing": 0.1},
        ),  # below what a smoothed one can be
    ],
    "growing-memory": [
        lambda: history(train(host_memory_bytes=lambda place: 500e6 + 1e5 * place)),
        lambda: history(
            train(host_memory_bytes=lambda place: 500e6 + 1e8 * (place > 20))
        ),  # one step up
        # a process that began at record 20, and took what it needs until 32
        lambda: history(
            train(host_memory_bytes=lambda place: 650e6 + 1e7 * min(max(place - 20, 0), 22)),
            [{"kind": "resume", "step": 200}],
        ),
    ],
    "data-bound": [
        lambda: history(train(data_wait_s=lambda _: 0.088)),
        lambda: history(train(data_wait_s=lambda place: 60.0 * (place == 0))),
    ],
    "evaluating-too-long": [lambda: history(train(evaluating_s=lambda _: 0.26))],
    "saving-too-long": [lambda: history(train(saving_s=lambda _: 0.09))],
    "slow-rank": [
        lambda: history(train(), [{"kind": "slow_rank", "step": 110, "rank": 3}]),
        lambda: history(train(), slow_rank(work="update")),
    ],
    "falling-throughput": [lambda: history(train(targets_per_s=lambda place: 100 - 0.25 * place))],
    "jittering-throughput": [
        lambda: history(train(targets_per_s=lambda place: 100 + 20 * wobble(place)))
    ],
    "ended-early": [
        lambda: history(train()),
        lambda: history(train(count=40), event("finished", 400)),
        lambda: history(train(count=40), standing="running"),
    ],
    "long-warm-up": [
        lambda: history(train(), schedule={"shape": "cosine", "warmup": 150}),
        lambda: history(train(), schedule={"shape": "one_cycle", "warmup": 180}),
    ],
    "high-rate-at-end": [
        lambda: history(train(lr=lambda place: 1e-3 * (1 - 0.51 * place / (RECORDS - 1))))
    ],
    "still-improving": [
        lambda: history(
            train(), scores([2.0 - 0.1 * place for place in range(8)] + [1.29, 1.28])
        ),  # by 1.6 %
        lambda: history(train(count=40), scores([2.0 - 0.1 * place for place in range(10)])[:6]),
    ],
}


@in_one
@pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name, cases in BORDERS.items() for make in cases]
)
def test_what_is_just_not_so_is_not_found(name: str, make: Callable[[], History]) -> None:
    assert found(name, make()) is None


def test_every_finding_has_a_border() -> None:
    assert set(BORDERS) == set(FAULTS)


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


@in_one
@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "grad_norm",
        "clip_fraction",
        "lr",
        "targets_per_s",
        "host_memory_bytes",
        "data_wait_s",
    ],
)
@pytest.mark.parametrize("how", ["lacking", "null", "nan", "inf"])
def test_no_verdict_needs_a_field_that_older_runs_lack_or_that_is_no_number(
    name: str, how: str
) -> None:
    values = {"null": None, "nan": math.nan, "inf": math.inf}
    records = [
        {key: value for key, value in record.items() if key != name}
        | ({name: values[how]} if how in values else {})
        for record in train()
    ]
    assert len(verdicts(history(records, layers()))) == len(CHECKS)
    some = [
        record | ({name: values[how]} if how in values else {}) if place % 3 == 0 else record
        for place, record in enumerate(train())
    ]
    assert [finding.severity for finding in findings(history(some, layers()))].count("error") == 0


def test_nothing_is_needed_of_the_settings() -> None:
    bare = healthy(
        **dict.fromkeys(
            ("length", "schedule_of_steps", "schedule", "optimizer", "batch_size", "clip", "data")
        ),
        kinds={},
        program="script",
    )
    assert findings(bare) == []


# --- what the findings say ------------------------------------------------------------------------


def test_divergence_names_the_layer_that_grew_first_and_the_step() -> None:
    def gradient(name: str, place: int) -> float:
        return 100.0 if (name == "2.weight" and place >= 4) or place >= 5 else 1.0

    finding = found(
        "diverged",
        history(
            train(lambda place: falling(place) if place < 40 else 9.0), layers(gradient=gradient)
        ),
    )
    assert finding is not None
    assert "2.weight" in finding.evidence[-1]
    assert numbers_in(finding.evidence[-1].replace("100x", "100")) == [100, 400]
    assert finding.step is not None
    assert 340 <= finding.step <= 400


def test_steps_of_which_none_was_applied_have_no_loss_of_zero() -> None:
    records = train(lambda place: falling(place) if place < 50 else math.nan)
    for record in records[50:]:
        record.update({"skipped": EVERY, "loss_applied": 0.0})
    lost = history(records, event("diverged", RECORDS * EVERY), length="1000 steps")
    assert len(lost.loss) == 50
    finding = found("diverged", lost)
    assert finding is not None
    assert any(1 < number < 2 for number in numbers_in(finding.evidence[0]))  # the last finite one
    assert found("ended-early", lost) is None  # of which all is said


def test_before_the_first_update_no_rate_is_the_cause() -> None:
    records = train(lambda place: math.nan)[:1]
    records[0].update({"skipped": EVERY, "skipped_steps": list(range(EVERY))})
    finding = found("diverged", history(records, event("diverged", EVERY)))
    assert finding is not None
    assert finding.step == 0
    assert not [each for each in (*finding.causes, *finding.try_) if "rate" in each or "lr" in each]


def test_what_is_to_be_typed_can_be_typed_for_the_program_that_made_the_run() -> None:
    spike = train(lambda place: falling(place) + 4.0 * (place == 30))
    for program, replay, test in (
        ("recipe", "surefoot replay runs/a --step 309", "surefoot find-lr runs/a --checkpoint 0"),
        ("script", "print(sf.load(run).replay(309))", "print(sf.tune.find_lr(run))"),
    ):
        jumped = found("loss-spikes", history(spike, program=program))
        still = history(train(flat), program=program)
        not_falling = found("loss-not-falling", still)
        assert jumped is not None
        assert not_falling is not None
        assert jumped.try_[0].startswith(replay)
        assert not_falling.try_[-1].startswith(test)


def test_no_finding_of_a_scripts_run_has_a_command_that_is_refused_for_it_or_a_flag() -> None:
    texts = []
    for name, _, make in CASES:
        made = make()
        for schedule in (made.described.identity["schedule"], {"shape": "wsd", "warmup": 0}):
            identity = {**made.described.identity, "schedule": schedule}
            finding = found(
                name,
                replace(
                    made, described=replace(made.described, program="script", identity=identity)
                ),
            )
            texts += [] if finding is None else finding.try_
    refused = r"surefoot (evaluate|replay|resume|train|profile|find-lr|find-batch-size|predict)\b|(^| )--\w"
    assert [text for text in texts if re.search(refused, text)] == []
    calls = (
        'load(run).evaluate(checkpoint="best")',
        "load(run).replay(",
        "profile.measure(run)",
        "tune.find_lr(run)",
    )
    assert [call for call in calls if not any(call in text for text in texts)] == []


def test_a_bad_sample_is_told_by_its_coming_once_in_each_pass() -> None:
    indexes = [33, 160, 288, 333, 487, 555]  # passes of 100 steps
    records = train(
        skipped=lambda place: sum(10 * place <= index < 10 * (place + 1) for index in indexes),
        skipped_steps=lambda place: [
            index for index in indexes if 10 * place <= index < 10 * (place + 1)
        ],
    )
    finding = found("non-finite-steps", history(records))
    assert finding is not None
    stated = [numbers_in(line.replace("1%", "1")) for line in finding.evidence]
    assert [800] in stated  # one in each epoch
    assert [6, 600, 1] in stated
    assert finding.step == 33
    assert finding.try_[0].startswith("surefoot replay runs/a --step 33 ")


@pytest.mark.parametrize(
    ("indexes", "expected"),
    [
        ([33], False),
        ([33, 133], True),
        ([33, 133, 288], True),
        ([33, 77], False),
        ([33, 433], False),
    ],
)
def test_two_skipped_steps_in_two_passes_that_follow_are_one_sample(
    indexes: list[int], expected: bool
) -> None:
    def within(place: int) -> list[int]:
        return [index for index in indexes if 10 * place <= index < 10 * (place + 1)]

    records = train(
        skipped=lambda place: len(within(place)), skipped_steps=within
    )  # passes of 100 steps
    finding = found("non-finite-steps", history(records))
    assert finding is not None
    assert any(numbers_in(line) == [800] for line in finding.evidence) == expected  # in each epoch


def test_a_jump_as_high_as_one_just_before_it_is_not_told_again() -> None:
    finding = found("loss-spikes", history(train(lambda place: 5.0 if place in (30, 34) else 1.0)))
    assert finding is not None
    assert finding.numbers["spikes"] == 1


def test_of_unusual_updates_the_farthest_are_named_first() -> None:
    sizes = {"0.weight": 2.0, "2.weight": 30.0, "4.weight": 5.0, "6.weight": 5e-5, "8.weight": 1e-6}
    updates = layers(names=tuple(sizes), update=lambda name, place: sizes[name])
    finding = found("unusual-updates", history(train(), updates))
    assert finding is not None
    assert "above 0.1: 2.weight (3), 4.weight (0.5), 0.weight (0.2)" in finding.evidence
    assert "below 1e-05: 8.weight (1e-07), 6.weight (5e-06)" in finding.evidence


def test_how_much_longer_steps_take_is_told_of_the_last_third_against_the_first() -> None:
    """Without the first record: the levels of 20 records each."""
    falling_speed = {"targets_per_s": lambda place: 100 / (1 + place / 30)}
    finding = found(
        "falling-throughput",
        history(
            train(
                count=61,
                training_s=lambda place: 1.0 + place,
                data_wait_s=lambda place: 2.0,
                **falling_speed,
            )
        ),
    )
    assert finding is not None
    times = f"{(1 + 50.5) / (1 + 10.5):.2g}x"
    assert re.findall(r"[\d.]+x", finding.evidence[1]) == [times, "1x"]


def test_a_gradient_without_a_limit_of_the_users_own_is_not_clipped_too_often() -> None:
    records = train(clip_fraction=lambda _: 1.0, grad_norm=lambda _: 99.0)
    unclipped = verdict("often-clipped", history(records, clip="off"))
    followed = verdict("often-clipped", history(records, clip="auto 0.9"))
    assert isinstance(unclipped, Healthy)
    assert isinstance(followed, Healthy)
    assert "not" in unclipped.message.split()
    assert "not" not in followed.message.split()


def test_settings_to_try_are_typed_with_their_present_values() -> None:
    finding = found("rate-too-high", history(train(flat), layers(update=lambda name, place: 3.0)))
    assert finding is not None
    assert finding.try_[0] == "--optimizer.lr 0.0001 (now 0.001)"
    of_a_script = found(
        "rate-too-high",
        history(train(flat), layers(update=lambda name, place: 3.0), program="script"),
    )
    assert of_a_script is not None
    assert of_a_script.try_[0] == "adamw(lr=0.0001) (now 0.001)"


@pytest.mark.parametrize(("killed", "told"), [(0.1, True), (0.11, False)])
def test_units_that_died_are_told_beside_what_shows_a_rate_that_is_too_high(
    killed: float, told: bool
) -> None:
    died = layers(
        update=lambda name, place: 1.01,
        zero_grad_row_fraction=lambda place: {"2.weight": killed if place == 1 else 0.5},
    )
    finding = found("rate-too-high", history(train(), died))
    assert finding is not None
    assert any("2.weight (10%, then 50%)" in line for line in finding.evidence) == told


@pytest.mark.parametrize(("started_at", "severity"), [(0.12, "warning"), (2.3, "error")])
def test_a_loss_that_stays_where_it_is_good_is_no_error(started_at: float, severity: str) -> None:
    targets = data(targets={"distinct": 10, "most_common_fraction": 0.1})
    finding = found(
        "loss-not-falling", history(targets, train(lambda place: started_at + 0.01 * wobble(place)))
    )
    assert finding is not None
    assert finding.severity == severity
    assert any("pretrained" in cause for cause in finding.causes) == (severity == "warning")


def test_overfitting_names_the_best_checkpoint_only_if_the_run_keeps_one() -> None:
    values = history(train(), scores([3.0, 2.0, 1.5, 1.6, 1.7, 1.9]))
    keeping, without = (RunDescription(keeps_best=keeps_best) for keeps_best in (True, False))
    first = [
        found("overfitting", replace(values, described=each)).try_[0] for each in (keeping, without)
    ]
    assert 'evaluate(checkpoint="best")' in first[0]
    assert first[1].startswith("Run(best='min ")


def test_overfitting_tells_what_other_scores_did() -> None:
    accuracy = [0.5, 0.6, 0.7, 0.72, 0.74, 0.76]
    finding = found(
        "overfitting", history(train(), scores([3.0, 2.0, 1.5, 1.6, 1.7, 1.9], accuracy=accuracy))
    )
    assert finding is not None
    assert "val/accuracy 0.7 then, 0.76 now" in finding.evidence


def test_overfitting_names_its_best_step() -> None:
    finding = found("overfitting", history(train(), scores([3.0, 2.0, 1.5, 1.6, 1.7, 1.9])))
    assert finding is not None
    assert finding.step == 300
    assert finding.numbers["best"] == 1.5


def test_what_was_compared_with_a_part_of_the_training_data_is_told_as_the_least() -> None:
    for told_of, begun in (({}, "At least 14%"), ({"among_all": True}, "14%")):
        finding = found(
            "train-validation-overlap", history(train(), shared(14, samples=700, **told_of))
        )
        assert finding is not None
        assert finding.message.startswith(f"{begun} of val")


def test_a_loss_that_is_no_goal_is_not_judged_by_its_fall() -> None:
    pair = {name: {"name": "adam", "lr": 1e-3} for name in ("generator", "critic")}
    risen = train(lambda place: 1.0 + 0.01 * place + 0.01 * wobble(place))
    around_zero = train(lambda place: 0.5 * (place > 20) + 2.0 * wobble(place))
    for records, changes, checked in (
        ([*data(has_loss=False), *risen], {"optimizer": pair}, False),
        ([*data(has_loss=True), *risen], {"optimizer": pair}, True),  # one loss for both
        ([*data(has_loss=False), *risen], {}, True),
        (around_zero, {}, False),
    ):
        values = history(records, **changes)
        assert isinstance(verdict("loss-not-falling", values), Finding if checked else Unknown)
        assert (found("rate-too-high", values) is not None) == checked


def test_a_run_whose_records_are_lost_is_not_told_as_ended_early() -> None:
    lost = verdict("ended-early", history(saved_step=600))
    assert isinstance(lost, Unknown)
    assert "surefoot verify runs/a" in lost.message
    assert 0 in numbers_in(lost.message)  # the step at which the records end
    killed_at_once = found("ended-early", history())
    assert killed_at_once is not None
    assert all("0 steps" not in one for one in killed_at_once.try_)
    resume = "surefoot resume runs/a  #"
    assert killed_at_once.try_[0].startswith(resume)
    assert numbers_in(killed_at_once.try_[0]) == [0]
    saved = found("ended-early", history(train(count=40), saved_step=300))
    assert saved is not None
    assert saved.try_[0].startswith(resume)
    assert numbers_in(saved.try_[0]) == [300]


@pytest.mark.parametrize(("targets", "trained"), [(8.0, True), (0.0, False)])
def test_no_length_is_advised_where_no_step_was_trained(targets: float, trained: bool) -> None:
    failed = {"kind": "event", "step": 100, "event": "failed: ConfigError: no sample is left"}
    ended = found("ended-early", history(train(count=10, targets=lambda _: targets), [failed]))
    assert ended is not None
    assert any("--length" in one for one in ended.try_) == trained
    assert any("learning rate" in one for one in ended.evidence) == trained
    assert "surefoot resume runs/a" in ended.try_[0]


def test_steps_that_a_checkpoint_has_were_trained_where_no_record_tells_of_them() -> None:
    killed = found("ended-early", history(saved_step=40))
    assert killed is not None
    assert (killed.step, killed.numbers["made"]) == (40, 40)
    assert any("--length" in one for one in killed.try_)


def test_a_run_that_is_complete_is_judged_and_did_not_end_early() -> None:
    whole = history(train())
    stopped = history(train(count=40), event("stopped early", 400))
    for complete in (whole, stopped):
        assert isinstance(verdict("ended-early", complete), Healthy)


def test_steps_that_are_slower_because_of_unfrozen_parameters_are_no_falling_throughput() -> None:
    slower = train(targets_per_s=lambda place: 100 / (1 + place / 30))
    unfrozen = [
        record | ({"frozen_tensors": 4} if record["step"] < 300 else {}) for record in slower
    ]
    frozen = [record | {"frozen_tensors": 4} for record in slower]
    assert found("falling-throughput", history(slower)) is not None
    assert found("falling-throughput", history(frozen)) is not None
    assert found("falling-throughput", history(unfrozen)) is None


def test_a_run_still_improves_by_the_score_that_chooses_its_best_checkpoint() -> None:
    def evaluated(accuracy: Callable[[int], float]) -> tuple[Record, ...]:
        losses = scores([2.0 - 0.1 * place for place in range(10)])
        return tuple(
            record | {"val/accuracy": accuracy(place)} for place, record in enumerate(losses)
        )

    by_accuracy = {"monitored": ("max", "val/accuracy")}
    flat = evaluated(lambda _: 0.5)
    rising = evaluated(lambda place: 0.5 + 0.05 * place)
    assert found("still-improving", history(train(), flat)) is not None
    assert found("still-improving", history(train(), flat, **by_accuracy)) is None
    better = found("still-improving", history(train(), rising, **by_accuracy))
    assert better is not None
    assert "val/accuracy" in better.message


@pytest.mark.parametrize(
    ("how", "is_a_cause"), [("SIGINT", False), ("SIGTERM", True), ("time_limit", False)]
)
def test_a_time_limit_is_no_cause_of_a_run_that_somebody_stopped(
    how: str, is_a_cause: bool
) -> None:
    stopped = found("ended-early", history(train(count=40), event(f"stopped by {how}", 400)))
    assert stopped is not None
    assert any("time limit" in cause for cause in stopped.causes) == is_a_cause


def test_where_too_few_records_were_made_it_says_how_to_have_more() -> None:
    hint = '--log-every "4 steps"'
    few, enough = history(train(count=11)), history(train(count=12))
    assert hint in format_findings(few, verdicts(few), every=True)
    assert hint not in format_findings(enough, verdicts(enough), every=True)


def test_workers_to_try_are_those_that_keep_up() -> None:
    finding = found("data-bound", history(train(data_wait_s=lambda _: 2.4), processors=8))
    assert finding is not None
    assert finding.numbers["workers"] == 3  # 2.4 s of reading for 0.8 s of training


def test_the_body_of_a_loop_is_no_wait_and_workers_that_are_set_are_not_advised() -> None:
    assert (
        found("data-bound", history(train(data_wait_s=lambda _: 0.4, user_s=lambda _: 4.0))) is None
    )
    finding = found(
        "data-bound",
        history(train(data_wait_s=lambda _: 2.4), processors=2, written={"workers": 2}),
    )
    assert finding is not None
    assert not any("(now 2)" in advice for advice in finding.try_)
    assert [8, 2] in [numbers_in(advice) for advice in finding.try_]  # workers, processors
    saving = found(
        "saving-too-long", history(train(saving_s=lambda _: 0.2, training_s=lambda _: 1.2))
    )
    assert saving is not None
    assert "not known" not in str(saving)
    rarely = history(
        train(saving_s=lambda _: 0.2, training_s=lambda _: 1.2), written={"save_every": "15 min"}
    )
    saving = found("saving-too-long", rarely)
    assert saving is not None
    assert not any("save_every" in advice for advice in saving.try_)


def test_memory_is_told_by_the_step_and_until_when() -> None:
    finding = found(
        "growing-memory",
        history(
            train(host_memory_bytes=lambda place: 500e6 + 1e6 * place), memory_bytes=2_000_000_000
        ),
    )
    assert finding is not None
    assert finding.numbers["bytes_per_step"] == pytest.approx(1e5)
    assert finding.numbers["full_at_step"] == pytest.approx(600 + (2e9 - 559e6) / 1e5, abs=2)


def test_errors_come_first() -> None:
    severities = [
        finding.severity
        for finding in findings(
            history(
                train(
                    flat,
                    data_wait_s=lambda _: 0.1,
                    clip_fraction=lambda _: 1.0,
                    grad_norm=lambda _: 11.0,
                )
            )
        )
    ]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert {"error", "warning", "note"} <= set(severities)


def test_noise_scale_is_that_of_gradients_of_which_it_is_known() -> None:
    """Of samples whose gradients are a fixed vector and noise: the trace of the covariance over the
    squared norm.
    """
    generator = np.random.default_rng(0)
    truth = np.full(50, 0.2)
    deviation = 1.5
    size = 4000
    rows = []
    for _ in range(size):
        samples = truth + deviation * generator.standard_normal((8, 50))
        rows.append([2.0, (samples[:2].mean(0) ** 2).sum(), 8.0, (samples.mean(0) ** 2).sum()])
    assert noise_scale(np.array(rows)) == pytest.approx(50 * deviation**2 / (50 * 0.2**2), rel=0.1)


@pytest.mark.parametrize(("smoothing", "classes"), [(0.1, 10), (0.1, 1000), (0.3, 5)])
def test_no_prediction_has_a_smoothed_loss_below_the_floor(smoothing: float, classes: int) -> None:
    torch = pytest.importorskip("torch")
    target = torch.full((classes,), smoothing / classes)
    target[0] += 1 - smoothing
    best = torch.nn.functional.cross_entropy(
        target.log()[None], torch.tensor([0]), label_smoothing=smoothing
    )
    assert smoothed_floor(smoothing, classes) == pytest.approx(float(best), rel=1e-5)


def test_a_resumed_run_is_one_curve_and_what_ended_an_earlier_session_is_no_end() -> None:
    marker: Record = {"kind": "resume", "step": 300}
    records = [*train(count=30), *event("failed: OSError", 350), marker, *train()[30:50]]
    going = history(records, standing="running")
    assert isinstance(verdict("ended-early", going), Unknown)
    assert going.step == 500
    dead = found("ended-early", history(records))
    assert dead is not None
    assert numbers_in(dead.evidence[0]) == [500, 600]
    assert found("ended-early", history([*records, *train()[50:]])) is None


def test_a_run_that_has_recorded_its_end_is_over_though_its_lock_is_held() -> None:
    ending = history(train(lr=lambda _: 1e-3), event("finished"), standing="running")
    assert found("high-rate-at-end", ending) is not None


def test_while_it_trains_nothing_is_said_of_its_end() -> None:
    going = history(
        train(count=40, lr=lambda _: 1e-3), scores([3.0, 2.0, 1.5, 1.0]), standing="running"
    )
    for name in ("ended-early", "high-rate-at-end", "still-improving"):
        assert isinstance(verdict(name, going), Unknown), name


def test_a_finding_as_json_has_its_numbers() -> None:
    finding = findings(history(train(flat)))[0]
    assert isinstance(finding, Finding)
    assert finding.to_dict()["numbers"]["start"] == pytest.approx(2.3, abs=0.02)


_AT_STEP = re.compile(r"(?<!full )at step (\d+(?:,\d{3})*)")


@in_one
@pytest.mark.parametrize(
    ("name", "severity", "make"), CASES, ids=[f"{name}-{severity}" for name, severity, _ in CASES]
)
def test_a_value_is_told_at_a_step_at_which_something_was_recorded(
    name: str, severity: str, make: Callable[[], History]
) -> None:
    """`step` of a record counts steps made; what is watched or is the largest of a record has the
    index of its step.
    """
    past = make()
    records = past.records
    steps = {
        *records.train.steps,
        *past.column("loss_max_step").value,
        *records.scores.steps,
        *records.layers.steps,
        past.step,
    }
    finding = next(
        finding
        for finding in findings(past)
        if (finding.name, finding.severity) == (name, severity)
    )
    for line in finding.evidence:
        for step in _AT_STEP.findall(line):
            assert int(step.replace(",", "")) in steps, line


def test_scores_of_odd_steps_are_told_at_those() -> None:
    past = history(train(), scores([2.0 - 0.1 * place for place in range(13)]))
    measured = [str(step) for step in past.records.scores.steps]
    (line,) = next(
        finding for finding in findings(past) if finding.name == "still-improving"
    ).evidence
    assert [step in measured for step in _AT_STEP.findall(line)] == [True, True]


def test_no_bad_step_in_a_row_is_a_limit_too() -> None:
    assert RunDescription(identity={"max_bad_steps": 0}).max_bad_steps == 0


def test_commands_quote_the_path_of_a_run() -> None:
    described = RunDescription(name="runs/a b", program="gpt")
    commands = [described.go_on(), described.replay(3), described.profile(), described.rate_test]
    for command in commands:
        assert "runs/a b" in shlex.split(command)
    assert RunDescription(identity={"max_bad_steps": 3}).max_bad_steps == 3
    assert RunDescription().max_bad_steps == 5


def test_a_stream_that_is_waited_for_gets_no_advice_about_workers() -> None:
    records = train(data_wait_s=lambda _: 2.4)
    finding = found("data-bound", history(records, data={"type": "Tape"}, processors=8))
    assert finding is not None
    assert not any("workers=" in each for each in finding.try_)


def test_the_newest_rank_that_is_slow_now_is_named_and_the_others_are_evidence() -> None:
    finding = found(
        "slow-rank",
        history(train(), slow_rank(), slow_rank(5, 200, step=230, work="data_wait", median_s=0.0)),
    )
    assert finding is not None
    assert (finding.step, finding.numbers["rank"], finding.numbers["times"]) == (200, 5, 100)
    assert "node7" in finding.evidence[1]
    assert numbers_in(finding.evidence[1])[:4] == [3, 90, 42, 30]  # rank, step, ms, median
    ended = slow_rank(5, 200, step=400, work="data_wait", until_step=390)
    finding = found("slow-rank", history(train(), slow_rank(), slow_rank(5, 200, step=230), ended))
    assert finding is not None
    assert finding.numbers["times"] == pytest.approx(1.4)
    assert numbers_in(finding.message)[-1] == 90  # since
    assert numbers_in(finding.evidence[1])[:3] == [5, 200, 390]
    assert (finding.step, finding.numbers["rank"]) == (90, 3)


def test_a_rank_that_was_slow_in_an_earlier_session_is_slow_until_the_resume() -> None:
    finding = found("slow-rank", history(train(), slow_rank(), [{"kind": "resume", "step": 300}]))
    assert finding is not None
    assert (finding.severity, finding.numbers["rank"]) == ("note", 3)
    assert numbers_in(finding.message)[-2:] == [90, 300]
    again = slow_rank(3, 310, step=340)
    finding = found(
        "slow-rank", history(train(), slow_rank(), [{"kind": "resume", "step": 300}], again)
    )
    assert finding is not None
    assert finding.severity == "warning"
