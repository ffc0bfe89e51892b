"""Every threshold of a finding: its number as it is published, and that it decides at 0.9 and 1.1
times itself; 2 seconds.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surefoot.tools.diagnose
from diagnose.histories import (
    RECORDS,
    always,
    begun_at,
    data_check,
    diverging,
    event,
    find,
    finds,
    history,
    judge,
    jump,
    layers,
    noisy_gradients,
    only_at,
    only_in,
    overlap,
    scores,
    targets,
    train,
)
from in_one import in_one
from surefoot.tools.diagnose.finding import Unknown
from surefoot.tracking.record import Record

LAST = RECORDS - 1
LN_10 = math.log(10)
OF_THREE = 1.4826 * 3 / math.sqrt(6)  # the noise of a series that goes +1, 0, -1 and again
# the standard error of the difference of two quarters' levels, in deviations of the noise
ERROR_OF_QUARTERS = math.sqrt(2 / 15) * 1.2533 * OF_THREE
Decides = Callable[[Any], bool]


@dataclass(frozen=True)
class Threshold:
    """A constant `MODULE.NAME` with its published number; `decides(x)` is true from it on, or up to
    it (`above=False`).

    `x` is the quantity that is compared with it. A count (`counted`) is tested one below and at
    itself.
    """

    name: str
    published: float
    decides: Decides
    above: bool = True
    counted: bool = False
    entry: int | None = None  # of a tuple

    @property
    def constant(self) -> float:
        """The number in the source."""
        module, _, name = self.name.partition(".")
        constant = constant_of(module, name)
        return float(constant if self.entry is None else constant[self.entry])


def constant_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"surefoot.tools.diagnose.{module}"), name)


PUBLISHED: list[Threshold] = []


def threshold(name: str, published: float, **kind: Any) -> Callable[[Decides], Decides]:
    """Add what a function decides to `PUBLISHED`."""

    def add(decides: Decides) -> Decides:
        PUBLISHED.append(Threshold(name, published, decides, **kind))
        return decides

    return add


# --- what is asked of a history -------------------------------------------------------------------


def is_told(name: str, *parts: Sequence[Record], **changes: Any) -> bool:
    return finds(name, history(*parts, **changes))


def is_clear(name: str, *parts: Sequence[Record], **changes: Any) -> bool:
    return not isinstance(judge(name, history(*parts, **changes)), Unknown)


def is_as_bad_as(severity: str, name: str, *parts: Sequence[Record], **changes: Any) -> bool:
    return find(name, history(*parts, **changes)).severity == severity


def says(text: str, name: str, *parts: Sequence[Record]) -> bool:
    return text in str(find(name, history(*parts)))


# --- records of which a quantity is known exactly -------------------------------------------------


def cycle(place: int) -> float:
    """+1, 0, -1 and again: any three in a row, and whole quarters, have the median 0."""
    return 1.0 - place % 3


def guessing(loss: float, **columns: Any) -> list[Record]:
    """Targets of ten equal kinds, and a loss that stays where it is."""
    return targets(10) + train(always(loss), **columns)


def guessing_from_step_0(loss: float) -> list[Record]:
    return targets(10) + begun_at(loss, train(always(loss)))


def of_steps(count: int) -> list[Record]:
    """Records of the last steps of a run that guesses."""
    records = guessing(LN_10, count=13)
    for place, record in enumerate(records[1:]):
        record["step"] = count - 12 + place
    return records


def exploded_to(level: float, *, target_count: int = 80) -> list[Record]:
    """A loss of 1 at step 0, and from then on at a level, as noisy as it is high."""
    losses = train(lambda place: level * (1 + 0.3 * cycle(place)), targets=always(target_count))
    return begun_at(1.0, losses)


def noisy_fall(level: float, noise: float, deviations: float, *, at: int) -> list[Record]:
    """A loss that cycles around a level, and from a record on around one that is lower by so many
    standard errors of the difference of two quarters.
    """

    def loss(place: int) -> float:
        noisy = level + noise * cycle(place)
        return noisy - deviations * noise * ERROR_OF_QUARTERS if place >= at else noisy

    return train(loss)


def with_trend(deviations: float) -> list[float]:
    """60 levels that go from 1 to 11, with a trend (Mann-Kendall) as near to so many deviations as
    it can be.

    Of the middle third the first `ups` are 11 and the others 20: concordant less discordant pairs
    are 400 + 40 ups - ups^2.
    """
    wanted = deviations * math.sqrt(60 * 59 * 125 / 18)
    ups = min(range(21), key=lambda ups: abs(400 + 40 * ups - ups**2 - wanted))
    return [1.0] * 20 + [11.0] * ups + [20.0] * (20 - ups) + [11.0] * 20


def memory(values: Sequence[float]) -> list[Record]:
    """Records of which the last have these bytes; the others have none."""
    first = RECORDS - len(values)
    return train(host_memory_bytes=lambda place: values[place - first] if place >= first else None)


def rising_memory(deviations: float) -> list[float]:
    """12 sizes that rise, of which neighbours are swapped (first ones first) until the trend is as
    low as that.
    """
    swaps = min(5, round((66 - deviations * math.sqrt(12 * 11 * 29 / 18)) / 2))
    sizes = [100e6 * place for place in range(1, 13)]
    for swap in range(swaps):
        first = 2 * swap
        sizes[first : first + 2] = [sizes[first + 1], sizes[first]]
    return sizes


def stretched(levels: Sequence[float]) -> list[float]:
    """45 sizes in as many equal stretches as there are levels."""
    sizes = []
    for level, stretch in zip(levels, np.array_split(np.arange(45), len(levels)), strict=True):
        sizes += [100e6 + 100e6 * level] * len(stretch)
    return sizes


def spent(**seconds: float) -> list[Record]:
    """Records of nothing but these seconds each."""
    nothing = dict.fromkeys(("training_s", "data_wait_s", "evaluating_s", "saving_s"), 0.0)
    columns = {name: always(amount) for name, amount in (nothing | seconds).items()}
    return train(**columns)


def wavering_scores(count: int) -> list[float]:
    """Scores that go up and down by a tenth, the last two between them."""
    losses = [1.0 + 0.1 * (-1) ** place for place in range(count)]
    losses[-2:] = [1.0, 1.0]
    return losses


def half_as_fast(second: float) -> list[Record]:
    """Two straight lines at a constant rate: the loss gains 0.1 in the first half of the run, and
    `second` times it then.
    """
    middle = LAST / 2

    def loss(place: int) -> float:
        gained = min(place, middle) + second * max(place - middle, 0)
        return 2.3 - 0.1 * gained / middle

    return train(loss, lr=always(1e-5))


NO_WARMUP: dict[str, Any] = {"schedule": {"shape": "linear", "warmup": 0}}


# --- statistics and divergence --------------------------------------------------------------------


@threshold("statistics.FEWEST", 12, counted=True)
def as_many_records_show_a_divergence(count: int) -> bool:
    return is_clear("diverged", train(count=count))


@threshold("divergence.LOST", 0.5)
def this_part_of_what_was_gained_is_lost(part: float) -> bool:
    def loss(place: int) -> float:
        if place < 9:
            return 4.0
        return 1.0 if place < 40 else 1 + 3 * part

    return is_told("diverged", train(loss))


@threshold("divergence.RISEN", 1.2)
def a_loss_that_was_never_lower_rises_to_this_times_itself(times: float) -> bool:
    return is_told("diverged", train(jump(2.0, 2 * times, at=15)))


@threshold("divergence.GREW", 5.0)
def a_gradient_that_is_this_times_as_large_grew(times: float) -> bool:
    grown = layers(gradient=lambda name, place: times if place > 3 else 1.0)
    return says("first to grow", "diverged", train(diverging), grown)


@threshold("divergence.MANY", 0.05)
def this_part_of_the_steps_are_many(part: float) -> bool:
    skipped = only_at(7, round(600 * part), others=0)
    return is_as_bad_as("error", "non-finite-steps", train(skipped=skipped))


@threshold("divergence.FP16", 0.01, above=False)
def this_part_of_the_steps_are_few_in_fp16(part: float) -> bool:
    records = train(count=600, skipped=only_at(7, round(6000 * part), others=0))
    return is_as_bad_as("note", "non-finite-steps", records, precision="fp16")


@threshold("divergence.NEIGHBOURS", 10, above=False, counted=True)
def a_level_before_it_that_is_higher_hides_a_spike_at_this_distance(distance: int) -> bool:
    spikes = {2: 9.0, 2 + distance: 8.9}
    return not is_told("loss-spikes", train(lambda place: spikes.get(place, 1.0)))


@threshold("divergence.SIGMAS", 8.0)
def a_spike_is_this_many_deviations_high(deviations: float) -> bool:
    def noise(place: int) -> float:
        if place == 30:
            return deviations * 1.4826
        return (-1) ** place if place < 30 else (-1) ** (place + 1)

    return is_told("loss-spikes", train(lambda place: 1 + 0.1 * noise(place)))


@threshold("divergence.NOTHING", 0.01)
def a_spike_is_this_part_of_the_start(part: float) -> bool:
    spike = {0: 100.0, 30: 1.0 + 100 * part}
    return is_told("loss-spikes", train(lambda place: spike.get(place, 1.0)))


@threshold("divergence.ABOVE", 0.25)
def a_spike_is_this_part_above_its_neighbours(part: float) -> bool:
    return is_told("loss-spikes", train(only_at(30, 1 + part, others=1.0)))


# --- chance ---------------------------------------------------------------------------------------


@threshold("chance.FEWEST_STEPS", 50, counted=True)
def as_many_steps_show_a_guess(count: int) -> bool:
    records = of_steps(count)
    return is_clear("no-better-than-chance", records, length=f"{count} steps", schedule=None)


@threshold("chance.TIMES_SEEN", 20)
def each_target_was_seen_this_often(times: float) -> bool:
    records = guessing(LN_10, targets=always(10 * times / RECORDS))
    return is_clear("no-better-than-chance", records)


@threshold("chance.PART_OF_RUN", 0.5)
def this_part_of_the_run_is_done(part: float) -> bool:
    records = guessing(LN_10, count=round(RECORDS * part))
    return is_clear("no-better-than-chance", records, standing="running")


@threshold("chance.NEAR", 0.02, above=False)
def a_loss_this_part_above_a_guess_is_one(part: float) -> bool:
    return is_told("no-better-than-chance", guessing(LN_10 * (1 + part)))


@threshold("chance.CLEARLY", 0.1, above=False)
def a_score_this_part_below_a_guess_is_one(part: float) -> bool:
    scored = scores([3.0, LN_10 * (1 - part), 3.0])
    return is_told("no-better-than-chance", guessing(LN_10), scored)


@threshold("chance.EVALUATIONS", 2, counted=True)
def as_many_evaluations_show_a_guess(count: int) -> bool:
    return is_told("no-better-than-chance", targets(10), train(), scores([3.0] * count))


@threshold("chance.SURE", 3.0, above=False)
def a_fall_by_this_many_standard_errors_is_none(deviations: float) -> bool:
    records = noisy_fall(LN_10, 0.01, deviations, at=45)
    return is_told("no-better-than-chance", targets(10), records)


@threshold("chance.USUAL_START", 1.5, above=False, entry=0)
def a_start_of_this_times_a_guess_is_usual(times: float) -> bool:
    return is_told("no-better-than-chance", guessing_from_step_0(LN_10 * times + 0.5))


@threshold("chance.USUAL_START", 0.5, above=False, entry=1)
def a_start_of_this_more_than_a_guess_is_usual(more: float) -> bool:
    return is_told("no-better-than-chance", guessing_from_step_0(LN_10 * 1.5 + more))


# --- generalization -------------------------------------------------------------------------------


@threshold("generalization.EVALUATIONS", 4, counted=True)
def as_many_evaluations_show_overfitting(count: int) -> bool:
    return is_clear("overfitting", train(), scores([1.0] * count))


@threshold("generalization.WORSE", 0.02)
def a_loss_this_part_above_the_best_is_worse(part: float) -> bool:
    worse = 1.5 * (1 + part)
    return is_told("overfitting", train(), scores([1.6, 1.55, 1.5, worse, worse]))


@threshold("generalization.MANY_EVALUATIONS", 12, counted=True)
def of_as_many_evaluations_the_noise_is_known(count: int) -> bool:
    losses = wavering_scores(count)
    losses[count // 2] = 0.85
    return not is_told("overfitting", train(), scores(losses))


@threshold("generalization.BY_CHANCE", 3.0)
def scores_rise_by_this_many_deviations_of_their_noise(deviations: float) -> bool:
    risen = 0.85 + deviations * 1.4826 * 0.4 / math.sqrt(6)
    losses = wavering_scores(20)
    losses[5] = 0.85
    losses[-2:] = [risen, risen]
    return is_told("overfitting", train(), scores(losses))


@threshold("generalization.NOTHING", 0.01)
def a_rise_is_this_part_of_the_first_loss(part: float) -> bool:
    risen = 1 + 100 * part
    return is_told("overfitting", train(), scores([100.0, 10.0, 1.0, risen, risen]))


@threshold("generalization.NEARLY_ALL", 0.95)
def this_part_of_the_targets_is_nearly_all(part: float) -> bool:
    seen = {"distinct": 9, "most_common_fraction": min(part, 1.0)}
    return is_told("constant-targets", train(), data_check(targets=seen))


@threshold("generalization.SHARED", 0.01)
def this_part_of_the_samples_is_shared(part: float) -> bool:
    records = overlap(round(1000 * part), checked=1000)
    return is_as_bad_as("warning", "train-validation-overlap", records)


@threshold("generalization.PASSAGES_SHARED", 0.1)
def passages_of_this_part_are_shared(part: float) -> bool:
    records = overlap(round(1000 * part), checked=1000, passages=True)
    return is_as_bad_as("warning", "train-validation-overlap", records)


@threshold("generalization.MOSTLY_SHARED", 0.5)
def this_part_of_the_samples_is_most(part: float) -> bool:
    records = overlap(round(1000 * part), checked=1000)
    return is_as_bad_as("error", "train-validation-overlap", records)


# --- gradients ------------------------------------------------------------------------------------


@threshold("gradients.FEWEST", 12, counted=True)
def as_many_records_show_a_growing_gradient(count: int) -> bool:
    return is_clear("growing-gradient", train(count=count), **NO_WARMUP)


@threshold("gradients.OFTEN", 0.9)
def this_part_of_the_steps_is_often(part: float) -> bool:
    return is_told("often-clipped", train(clip_fraction=always(part), grad_norm=always(2.5)))


@threshold("gradients.FAR_BELOW", 2.0)
def a_norm_of_this_times_the_limit_is_told(times: float) -> bool:
    return is_told("often-clipped", train(clip_fraction=always(1.0), grad_norm=always(times)))


@threshold("gradients.FAR_ABOVE", 10.0)
def a_norm_of_this_times_the_limit_is_far_above(times: float) -> bool:
    records = train(clip_fraction=always(1.0), grad_norm=always(times))
    return is_as_bad_as("warning", "often-clipped", records)


@threshold("gradients.GREW", 10.0)
def a_norm_that_is_this_times_as_large_grew(times: float) -> bool:
    return is_told("growing-gradient", train(grad_norm=jump(1.0, times, at=30)))


@threshold("gradients.GREW", 10.0)
def a_layer_whose_norm_is_this_times_as_large_grew(times: float) -> bool:
    grown = layers(watched=9, gradient=lambda name, place: times if place > 5 else 1.0)
    records = train(grad_norm=jump(1.0, 90.0, at=30))
    return says("most in 0.weight", "growing-gradient", records, grown)


@threshold("gradients.SURE", 3.0)
def a_trend_of_this_many_deviations_is_sure(deviations: float) -> bool:
    norms = with_trend(deviations)
    return is_told("growing-gradient", train(grad_norm=lambda place: norms[place]), **NO_WARMUP)


@threshold("gradients.GONE", 1e-4, above=False)
def this_part_of_the_largest_gradient_is_gone(part: float) -> bool:
    return is_told("vanishing-gradient", train(), layers(gradient=only_in("0", part, others=1.0)))


@threshold("gradients.NOISY", 10.0)
def a_noise_of_this_times_the_batch_is_told(times: float) -> bool:
    return is_told("batch-too-small", train(), noisy_gradients(8, 8 * times))


@threshold("gradients.NOISY", 10.0)
def a_noise_of_this_times_the_batch_squared_is_a_warning(times: float) -> bool:
    watched = noisy_gradients(8, 8 * times**2)
    return is_as_bad_as("warning", "batch-too-small", train(), watched)


# --- the rate and its schedule --------------------------------------------------------------------


@threshold("learning_rate.FEWEST", 12, counted=True)
def as_many_records_show_that_a_loss_does_not_fall(count: int) -> bool:
    return is_clear("loss-not-falling", train(count=count))


@threshold("learning_rate.SMALLEST_FALL", 0.01)
def a_loss_falls_by_this_part(part: float) -> bool:
    return not is_told("loss-not-falling", train(jump(2.0, 2 * (1 - part), at=15)))


@threshold("learning_rate.UNCLEAR_FALL", 0.03)
def a_noisy_loss_may_fall_by_this_part(part: float) -> bool:
    def loss(place: int) -> float:
        noisy = 2.0 + 0.4 * cycle(place)
        return noisy * (1 - part) if place >= 15 else noisy

    return not is_as_bad_as("error", "loss-not-falling", train(loss))


@threshold("learning_rate.CERTAIN", 2.0)
def a_fall_by_this_many_standard_errors_is_certain(deviations: float) -> bool:
    return not is_told("loss-not-falling", noisy_fall(2.0, 0.1, deviations, at=15))


@threshold("learning_rate.FAR_ABOVE_START", 100)
def a_loss_of_this_times_its_start_exploded(times: float) -> bool:
    return is_told("rate-too-high", exploded_to(times))


@threshold("learning_rate.SOME_TARGETS", 8, counted=True)
def a_step_of_as_many_targets_shows_the_start(count: int) -> bool:
    return is_told("rate-too-high", exploded_to(200, target_count=10 * count))


@threshold("learning_rate.LITTLE", 0.25, above=False)
def a_loss_that_falls_in_a_line_by_this_part_falls_by_little(part: float) -> bool:
    records = train(lambda place: 2.0 * (1 - part * place / LAST), lr=always(1e-5))
    return is_told("rate-too-low", records)


@threshold("learning_rate.LITTLE", 0.25, above=False)
def a_loss_that_falls_in_a_curve_by_this_part_falls_by_little(part: float) -> bool:
    def loss(place: int) -> float:
        return 2.0 * (1 - part * (1 - math.exp(-place / 12)))

    return is_told("rate-too-low", train(loss, lr=always(1e-5)), layers(update=always(1.6e-3)))


@threshold("learning_rate.STRAIGHT", 0.6)
def a_second_half_this_part_as_fast_is_a_straight_line(part: float) -> bool:
    return is_told("rate-too-low", half_as_fast(part))


@threshold("learning_rate.WILD", 0.1)
def an_update_of_this_part_of_the_weights_is_wild(part: float) -> bool:
    return is_told("rate-too-high", train(), layers(update=always(10 * part)))


@threshold("learning_rate.TIMID", 1e-5, above=False)
def an_update_of_this_part_of_the_weights_is_timid(part: float) -> bool:
    return is_told("rate-too-low", train(), layers(update=always(10 * part)))


@threshold("learning_rate.MOVED", 0.1, above=False)
def all_updates_move_the_weights_by_this_part(part: float) -> bool:
    return is_told("rate-too-low", train(always(2.3)), layers(update=always(10 * part / 600)))


@threshold("learning_rate.REBOUND", 0.03)
def a_loss_bounces_by_this_part(part: float) -> bool:
    def loss(place: int) -> float:
        fallen = 4.0 - 0.1 * min(place, 10)
        return fallen + 3.0 * part if place > 17 else fallen

    return is_told("rate-too-high", train(loss))


@threshold("learning_rate.ABOVE_START", 1.05)
def a_loss_rises_to_this_times_its_start(times: float) -> bool:
    return is_told("rate-too-high", train(jump(2.0, 2 * times, at=15)))


@threshold("schedule.LONG_WARMUP", 0.25)
def a_warmup_of_this_part_of_the_run_is_long(part: float) -> bool:
    schedule = {"shape": "cosine", "warmup": round(600 * part)}
    return is_told("long-warm-up", train(), schedule=schedule)


@threshold("schedule.HIGH", 0.5)
def a_last_rate_of_this_part_of_the_highest_is_high(part: float) -> bool:
    return is_told("high-rate-at-end", train(lr=only_at(LAST, 1e-3 * part, others=1e-3)))


@threshold("schedule.LEAST_STEPS", 50, counted=True)
def a_run_of_as_many_steps_has_a_schedule(count: int) -> bool:
    finished = event("finished", count)
    return is_clear("high-rate-at-end", train(count=4), finished, length=f"{count} steps")


@threshold("schedule.STILL", 0.02)
def the_last_scores_are_better_by_this_part(part: float) -> bool:
    better = 2 * (1 - part)
    return is_told("still-improving", train(), scores([2.0] * 8 + [better, better]))


@threshold("schedule.EVALUATIONS", 4, counted=True)
def as_many_evaluations_show_an_improvement(count: int) -> bool:
    return is_clear("still-improving", train(), scores([1.0] * count))


# --- memory ---------------------------------------------------------------------------------------


@threshold("memory.FEWEST", 12, counted=True)
def as_many_records_show_that_memory_grows(count: int) -> bool:
    return is_clear("growing-memory", memory([1e8] * count))


@threshold("memory.STRETCHES", 6, counted=True)
def stairs_of_as_many_steps_rise_in_each_stretch(count: int) -> bool:
    return is_told("growing-memory", memory(stretched(range(count))))


@threshold("memory.STEADY", 0.3)
def the_smallest_of_five_rises_is_this_part_of_their_mean(part: float) -> bool:
    smallest = 4 * part / (5 - part)  # beside four rises of 1
    levels = np.cumsum([0, smallest, 1, 1, 1, 1]).tolist()
    return is_told("growing-memory", memory(stretched(levels)))


@threshold("memory.SURE", 4.0)
def memory_rises_by_a_trend_of_this_many_deviations(deviations: float) -> bool:
    return is_told("growing-memory", memory(rising_memory(deviations)))


# the middles of the first and the last third of 45 records are 30 apart


@threshold("memory.LEAST_BYTES", 16e6)
def memory_grows_by_as_many_bytes(count: float) -> bool:
    sizes = [100e6 + count / 30 * place for place in range(45)]
    return is_told("growing-memory", memory(sizes))


@threshold("memory.LEAST_SHARE", 0.02)
def memory_grows_by_this_part_of_itself(part: float) -> bool:
    sizes = [10e9 * (1 + part / 30 * (place - 7)) for place in range(45)]
    return is_told("growing-memory", memory(sizes))


# --- throughput -----------------------------------------------------------------------------------


@threshold("throughput.FEWEST", 12, counted=True)
def as_many_records_show_that_steps_get_slower(count: int) -> bool:
    return is_clear("falling-throughput", train(count=count + 1))


@threshold("throughput.FEWEST", 12, counted=True)
def as_many_records_show_how_much_steps_vary(count: int) -> bool:
    return is_clear("jittering-throughput", train(count=count + 1))


@threshold("throughput.LEAST_S", 1.0)
def evaluations_are_judged_from_this_many_seconds_on(seconds: float) -> bool:
    return is_clear("evaluating-too-long", spent(training_s=seconds / 60))


@threshold("throughput.LEAST_S", 1.0)
def waiting_is_judged_from_this_many_seconds_on(seconds: float) -> bool:
    return is_clear("data-bound", spent(training_s=seconds / 59))


@threshold("throughput.WORTH_S", 60.0)
def evaluations_of_this_many_seconds_are_worth_a_warning(seconds: float) -> bool:
    records = spent(evaluating_s=seconds / 120, training_s=seconds / 120)
    return is_as_bad_as("warning", "evaluating-too-long", records)


@threshold("throughput.LONG_ENOUGH_S", 3.0)
def this_many_seconds_of_training_show_that_steps_get_slower(seconds: float) -> bool:
    return is_clear("falling-throughput", spent(training_s=seconds / 60))


@threshold("throughput.LONG_ENOUGH_S", 3.0)
def this_many_seconds_of_waiting_show_how_much_steps_vary(seconds: float) -> bool:
    return is_clear("jittering-throughput", spent(data_wait_s=seconds / 60))


@threshold("throughput.WAITING", 0.1)
def steps_wait_for_this_part_of_the_time(part: float) -> bool:
    return is_told("data-bound", spent(data_wait_s=part, training_s=1 - part))


@threshold("throughput.MUCH_WAITING", 0.3)
def steps_wait_for_much_of_the_time(part: float) -> bool:
    return is_as_bad_as("warning", "data-bound", spent(data_wait_s=part, training_s=1 - part))


@threshold("throughput.EVALUATING", 0.25)
def evaluations_take_this_part_of_the_time(part: float) -> bool:
    return is_told("evaluating-too-long", spent(evaluating_s=part, training_s=1 - part))


@threshold("throughput.SAVING", 0.1)
def saves_take_this_part_of_the_time(part: float) -> bool:
    return is_told("saving-too-long", spent(saving_s=part, training_s=1 - part))


@threshold("throughput.WANTED", 0.05)
def evaluating_as_seldom_as_is_proposed_takes_at_most_this_part(part: float) -> bool:
    half_of_the_time = spent(training_s=1.0, evaluating_s=1.0)
    run = history(half_of_the_time, scores([1.0] * 10), length="1000000 steps")

    advice = find("evaluating-too-long", run).try_[0]

    interval = re.search(r"evaluate_every='(\d+) steps'|--evaluate-every \"(\d+) steps\"", advice)
    assert interval is not None
    proposed_steps = int(interval[1] or interval[2])
    times_as_seldom = proposed_steps / 60
    return 1 / (1 + times_as_seldom) <= part


@threshold("throughput.FELL", 0.8, above=False)
def a_speed_of_this_part_of_the_first_fell(part: float) -> bool:
    speed = jump(100, 100 * part, at=30)
    return is_told("falling-throughput", train(targets_per_s=speed))


@threshold("throughput.SURE", 3.0)
def speed_falls_by_a_trend_of_this_many_deviations(deviations: float) -> bool:
    losses_of_speed = with_trend(deviations)
    records = train(
        count=61, targets_per_s=lambda place: 100 - 4 * losses_of_speed[max(place - 1, 0)]
    )
    return is_told("falling-throughput", records)


@threshold("throughput.UNEVEN", 0.25)
def speed_varies_by_this_part(part: float) -> bool:
    records = train(targets_per_s=lambda place: 100 * (1 + part / OF_THREE * cycle(place)))
    return is_told("jittering-throughput", records)


# --- layers ---------------------------------------------------------------------------------------


@threshold("layers.DEAD", 0.5)
def a_layer_of_which_this_part_is_dead_is_told(part: float) -> bool:
    watched = layers(zero_grad_row_fraction=always({"2.weight": part}))
    return is_told("dead-units", train(), watched)


@threshold("layers.ALIVE", 0.1, above=False)
def a_layer_of_which_this_part_was_dead_was_alive(part: float) -> bool:
    watched = layers(
        update=always(1.01),
        zero_grad_row_fraction=lambda place: {"2.weight": part if place == 1 else 0.5},
    )
    return says("units that were alive", "rate-too-high", train(), watched)


@threshold("layers.ALL_FLAT", 0.99)
def a_relu_of_which_this_part_is_flat_lets_nothing_through(part: float) -> bool:
    watched = layers(saturated_fraction=always({"1": min(part, 1.0)}))
    return is_told("dead-units", train(), watched)


@threshold("layers.FLAT", 0.5)
def a_tanh_of_which_this_part_is_flat_is_saturated(part: float) -> bool:
    return is_told("saturated-units", train(), layers(saturated_fraction=always({"3": part})))


@threshold("layers.USUAL", 1e-4, above=False, entry=0)
def an_update_of_this_part_is_smaller_than_usual(part: float) -> bool:
    watched = layers(update=only_in("2", part, others=0.01))
    return is_told("unusual-updates", train(), watched)


@threshold("layers.USUAL", 1e-2, entry=1)
def an_update_of_this_part_is_larger_than_usual(part: float) -> bool:
    watched = layers(update=only_in("2", 100 * part, others=0.01))
    return is_told("unusual-updates", train(), watched)


@threshold("layers.FAR", 10.0)
def an_update_of_this_times_the_usual_is_far_from_it(times: float) -> bool:
    watched = layers(update=only_in("2", 0.1 * times, others=0.01))
    return is_told("unusual-updates", train(), watched)


@threshold("layers.WATCHED", 3, counted=True)
def as_many_watched_steps_show_that_a_layer_is_not_updated(count: int) -> bool:
    return is_clear("never-updated", train(), layers(watched=count))


# --- the table itself -----------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize("threshold", PUBLISHED, ids=lambda threshold: threshold.name)
def test_a_threshold_is_the_published_number_and_decides_within_a_tenth_of_it(
    threshold: Threshold,
) -> None:
    assert threshold.constant == threshold.published
    if not threshold.counted:
        below = 0.9 * threshold.constant
        above = 1.1 * threshold.constant
    elif threshold.above:
        above = int(threshold.published)
        below = above - 1
    else:
        below = int(threshold.published)
        above = below + 1

    assert threshold.decides(below) is not threshold.above
    assert threshold.decides(above) is threshold.above


def assigned_names(module: ast.Module) -> list[str]:
    """The plain names to which a module assigns, outside its functions and classes."""
    names = []
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            names += [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return names


def test_every_number_by_which_a_finding_decides_is_in_the_table() -> None:
    numbers = set()
    for file in Path(surefoot.tools.diagnose.__file__).parent.glob("*.py"):
        for name in assigned_names(ast.parse(file.read_text())):
            if name.startswith("_") or not name.isupper():
                continue
            constant = constant_of(file.stem, name)
            first = constant[0] if isinstance(constant, tuple) and constant else constant
            if isinstance(first, int | float):
                numbers.add(f"{file.stem}.{name}")

    assert numbers == {threshold.name for threshold in PUBLISHED}
