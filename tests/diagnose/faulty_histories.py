"""Histories of runs with a fault: each finding must be made in some, with the severity named here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diagnose.histories import (
    EVERY,
    always,
    begun_at,
    data_check,
    diverging,
    event,
    falling,
    flat,
    history,
    layers,
    noisy_gradients,
    only_at,
    only_in,
    overlap,
    resume,
    scores,
    targets,
    train,
    wobble,
)
from surefoot.config.behavior import AVERAGES
from surefoot.tools.diagnose.history import History
from surefoot.tracking.record import Record

LN_2 = math.log(2)
LN_10 = math.log(10)
OVERFITTED = [3.0, 2.0, 1.5, 1.6, 1.7, 1.9]


@dataclass(frozen=True)
class Fault:
    """A history, and the finding that must be made in it."""

    finding: str
    severity: str
    make: Callable[[], History]

    @property
    def name(self) -> str:
        return f"{self.finding}: {self.make.__name__}"


FAULTS: list[Fault] = []


def fault(finding: str, severity: str) -> Callable[[Callable[[], History]], Callable[[], History]]:
    """Add a history to `FAULTS`; its name says what is wrong with the run."""

    def add(make: Callable[[], History]) -> Callable[[], History]:
        FAULTS.append(Fault(finding, severity, make))
        return make

    return add


def exploded(place: int) -> float:
    """Within the first record it rose to a million; it has fallen since, and varies as much as it
    is high.
    """
    if place == 0:
        return 1e6
    return (300 * math.exp(-place / 10) + 20) * (1 + 0.5 * wobble(place))


def slow_rank(
    rank: int = 3, since_step: int = 90, *, step: int = 110, **changes: Any
) -> list[Record]:
    record = {
        "kind": "slow_rank",
        "step": step,
        "rank": rank,
        "since_step": since_step,
        "host": "node7",
        "work": "forward",
        "own_s": 0.042,
        "median_s": 0.03,
        "share": 0.11,
    }
    return [record | changes]


def shared(overlapping: int, *, samples: int, **fields: Any) -> list[Record]:
    """Of 100 of a split so many are among the 100 training samples that were looked at."""
    split = {"checked": 100, "overlapping": overlapping, **fields}
    return data_check(samples=samples, checked=100, overlap={"val": split})


# --- the loss -------------------------------------------------------------------------------------


@fault("no-better-than-chance", "error")
def the_loss_stays_at_that_of_a_guess() -> History:
    return history(targets(10), train(flat))


@fault("no-better-than-chance", "error")
def the_loss_explodes_far_above_a_guess() -> History:
    return history(targets(2), begun_at(LN_2, train(exploded)))


@fault("no-better-than-chance", "error")
def the_loss_explodes_and_the_scores_get_worse() -> History:
    return history(targets(2), begun_at(0.7, train(exploded)), scores([4.8, 15.6, 22.5]))


@fault("no-better-than-chance", "error")
def units_die_of_inputs_that_are_not_normalized_and_the_frequencies_are_left() -> History:
    records = train(only_at(0, 60.0, others=1.5))
    return history(targets(10, entropy=1.5), begun_at(80.0, records))


@fault("no-better-than-chance", "error")
def the_loss_falls_to_that_of_a_guess_and_not_below_step_0() -> History:
    records = train(lambda place: LN_10 + math.exp(-place / 15))
    return history(targets(10), begun_at(LN_10, records))


@fault("no-better-than-chance", "warning")
def the_split_is_only_guessed() -> History:
    return history(targets(10), train(), scores([2.4, 2.31, 2.5, 3.0]))


@fault("loss-not-falling", "error")
def the_loss_stays_where_it_is() -> History:
    return history(train(flat))


@fault("loss-not-falling", "error")
def the_loss_explodes() -> History:
    return history(begun_at(LN_2, train(exploded)))


@fault("rate-too-high", "error")
def the_loss_explodes_in_the_first_record() -> History:
    return history(begun_at(LN_2, train(exploded)))


@fault("rate-too-high", "warning")
def updates_are_a_tenth_of_the_weights() -> History:
    return history(train(), layers(update=always(1.01)))


@fault("rate-too-high", "error")
def updates_are_large_and_the_loss_does_not_fall() -> History:
    return history(train(flat), layers(update=always(3.0)))


@fault("rate-too-high", "error")
def the_loss_rises_from_the_start() -> History:
    return history(train(lambda place: 2.3 + 0.1 * place))


@fault("rate-too-high", "warning")
def the_loss_falls_and_bounces_back() -> History:
    def loss(place: int) -> float:
        fallen = 4.0 - 0.1 * min(place, 10)
        return fallen + 0.2 if place > 12 else fallen

    return history(train(loss))


@fault("rate-too-high", "warning")
def the_loss_jumps_at_once() -> History:
    def loss(place: int) -> float:
        return 5.5 if place == 0 else 9.0 * math.exp(-place / 30)

    return history(train(loss))


@fault("rate-too-high", "warning")
def the_loss_rises_within_the_first_quarter() -> History:
    def loss(place: int) -> float:
        if place < 3:
            return [5.0, 6.5, 7.0][place]
        level = 7.0 if place < 16 else 3.0
        return level + 0.48 * wobble(place)

    return history(train(loss))


@fault("rate-too-low", "warning")
def a_tiny_rate_moves_the_loss_slowly() -> History:
    return history(train(lambda place: 2.3 - 0.003 * place, lr=always(1e-5)))


@fault("rate-too-low", "warning")
def updates_are_tiny() -> History:
    return history(train(), layers(update=always(9e-5)))


@fault("rate-too-low", "warning")
def all_updates_together_move_the_weights_by_less_than_a_tenth() -> History:
    return history(train(flat), layers(update=always(1.6e-3)))  # 600 times are 0.096


@fault("diverged", "error")
def the_loss_is_lost_after_it_was_learnt() -> History:
    return history(train(diverging))


@fault("diverged", "error")
def the_loss_rises_without_end() -> History:
    return history(train(lambda place: 2.3 if place < 12 else 3.0 + 0.1 * place))


@fault("diverged", "error")
def the_run_ended_because_it_diverged() -> History:
    return history(train(), event("diverged"))


@fault("diverged", "error")
def the_last_steps_are_all_skipped() -> History:
    records = train(
        lambda place: falling(place) if place < 50 else math.nan,
        skipped=lambda place: 0 if place < 50 else EVERY,
    )
    return history(records)


@fault("non-finite-steps", "warning")
def one_step_is_skipped() -> History:
    return history(train(skipped=only_at(7, 1, others=0)))


@fault("non-finite-steps", "error")
def a_step_of_every_second_record_is_skipped() -> History:
    return history(train(skipped=lambda place: place % 2))


@fault("non-finite-steps", "note")
def fp16_finds_its_scale() -> History:
    return history(train(skipped=lambda place: int(place < 3)), precision="fp16")


@fault("loss-spikes", "warning")
def the_loss_of_a_record_is_high() -> History:
    return history(train(lambda place: falling(place) + 4.0 * (place == 30)))


@fault("loss-spikes", "warning")
def the_largest_loss_within_a_record_is_high() -> History:
    return history(train(loss_max=lambda place: falling(place) + 0.3 + 2.0 * (place == 30)))


# --- the data and the splits ----------------------------------------------------------------------


@fault("overfitting", "warning")
def the_loss_of_the_split_rises_again() -> History:
    return history(train(), scores(OVERFITTED))


@fault("overfitting", "warning")
def a_loss_below_zero_rises_again() -> History:
    return history(train(), scores([-2.0, -3.0, -4.0, -3.7, -3.5, -3.0]))


@fault("train-validation-overlap", "error")
def half_of_the_split_is_trained_on() -> History:
    return history(train(), overlap(50))


@fault("train-validation-overlap", "warning")
def a_few_are_shared_of_a_part_of_the_training_data() -> History:
    return history(train(), shared(14, samples=7000))


@fault("train-validation-overlap", "warning")
def a_few_are_shared_among_all_of_the_training_data() -> History:
    return history(train(), shared(14, samples=700, among_all=True))


@fault("train-validation-overlap", "warning")
def one_of_a_hundred_is_shared() -> History:
    return history(train(), overlap(1))


@fault("train-validation-overlap", "note")
def one_of_a_thousand_is_shared() -> History:
    return history(train(), overlap(1, checked=1000))


@fault("train-validation-overlap", "note")
def passages_of_less_than_a_tenth_are_shared() -> History:
    return history(train(), overlap(9, passages=True))


@fault("train-validation-overlap", "warning")
def passages_of_a_tenth_are_shared() -> History:
    return history(train(), overlap(10, passages=True))


@fault("train-validation-overlap", "error")
def passages_of_half_are_shared() -> History:
    return history(train(), overlap(50, passages=True))


@fault("train-validation-overlap", "warning")
def the_worse_of_two_splits_decides() -> History:
    passages = {"checked": 100, "overlapping": 9, "passages": True}
    samples = {"checked": 100, "overlapping": 2}
    return history(train(), data_check(overlap={"a": passages, "b": samples}))


@fault("train-validation-overlap", "note")
def the_split_is_the_training_data_itself() -> History:
    return history(train(), overlap(9, checked=9, same=True))


@fault("non-finite-scores", "warning")
def the_last_losses_of_the_split_are_nan() -> History:
    return history(train(), scores([2.0, 1.5, math.nan, math.nan]))


@fault("non-finite-scores", "note")
def the_last_value_of_another_score_is_nan() -> History:
    return history(train(), scores([2.0, 1.5], auc=[0.5, math.nan]))


@fault("constant-targets", "error")
def all_targets_are_equal() -> History:
    seen = {"distinct": 1, "most_common_fraction": 1.0}
    return history(train(), data_check(targets=seen))


@fault("constant-targets", "warning")
def nearly_all_targets_are_equal() -> History:
    seen = {"distinct": 9, "most_common_fraction": 0.95}
    return history(train(), data_check(targets=seen))


@fault("loss-contract", "warning")
def the_loss_of_a_batch_is_not_that_of_its_halves() -> History:
    contract = {"holds": False, "description": "2 for a batch, 4 for"}
    return history(train(), data_check(loss_contract=contract))


@fault("average-too-slow", "warning")
def an_older_version_averages_without_a_ramp() -> History:
    return history(train(), ema=0.999)


@fault("average-too-slow", "warning")
def the_average_is_slower_than_the_run() -> History:
    return history(train(), ema=0.999, ema_ramp=False, behavior=AVERAGES)


@fault("average-too-slow", "warning")
def the_average_is_updated_rarely() -> History:
    return history(train(), ema=0.9, ema_every="100 steps", ema_ramp=False)


@fault("smoothed-perplexity", "warning")
def a_perplexity_is_that_of_a_smoothed_loss() -> History:
    return history(
        train(),
        scores([3.0, 2.0, 1.5], perplexity=[20.1, 7.4, 4.5]),
        program="file",
        identity={"loss": {"label_smoothing": 0.1}},
    )


# --- gradients and layers -------------------------------------------------------------------------


@fault("dead-units", "warning")
def half_of_the_rows_have_no_gradient() -> History:
    return history(train(), layers(zero_grad_row_fraction=always({"2.weight": 0.5})))


@fault("dead-units", "error")
def a_relu_lets_nothing_through() -> History:
    return history(train(), layers(saturated_fraction=always({"1": 1.0})))


@fault("saturated-units", "warning")
def half_of_a_tanh_is_saturated() -> History:
    return history(train(), layers(saturated_fraction=always({"3": 0.5})))


@fault("vanishing-gradient", "warning")
def the_gradient_of_the_first_layer_is_tiny() -> History:
    return history(train(), layers(gradient=only_in("0", 9e-5, others=1.0)))


@fault("vanishing-gradient", "error")
def there_is_no_gradient() -> History:
    return history(train(flat, grad_norm=always(0.0)))


@fault("growing-gradient", "warning")
def the_gradient_grows_by_a_tenth_in_each_record() -> History:
    return history(train(grad_norm=lambda place: 0.1 * 1.1**place))


@fault("often-clipped", "note")
def most_steps_are_clipped_to_half() -> History:
    return history(train(clip_fraction=always(0.91), grad_norm=always(2.0)))


@fault("often-clipped", "warning")
def most_steps_are_clipped_to_a_tenth() -> History:
    return history(train(clip_fraction=always(0.91), grad_norm=always(10.0)))


@fault("never-updated", "warning")
def a_parameter_gets_no_gradient() -> History:
    return history(train(), layers(never_updated=always(["9.weight"])))


@fault("never-updated", "warning")
def a_layer_is_not_moved() -> History:
    return history(train(), layers(update=only_in("2", 0.0, others=0.01)))


@fault("unusual-updates", "note")
def the_updates_of_a_layer_are_large() -> History:
    return history(train(), layers(update=only_in("2", 1.01, others=0.01)))


@fault("unusual-updates", "warning")
def the_updates_of_all_layers_but_one_are_tiny() -> History:
    return history(train(), layers(update=only_in("2", 0.01, others=9e-5)))


@fault("batch-too-small", "note")
def the_noise_is_ten_times_the_batch() -> History:
    return history(train(), noisy_gradients(8, 81.0))


@fault("batch-too-small", "warning")
def the_noise_is_a_thousand_times_the_batch() -> History:
    return history(train(), noisy_gradients(8, 8000.0))


# --- memory and time ------------------------------------------------------------------------------


@fault("growing-memory", "note")
def the_memory_of_the_host_grows() -> History:
    return history(train(host_memory_bytes=lambda place: 500e6 + 1e6 * place))


@fault("growing-memory", "error")
def the_memory_of_the_host_will_not_suffice() -> History:
    records = train(host_memory_bytes=lambda place: 500e6 + 1e7 * place)
    return history(records, memory_bytes=1_050_000_000)


@fault("growing-memory", "note")
def the_memory_of_the_device_grows() -> History:
    return history(train(device_memory_peak_bytes=lambda place: 500e6 + 1e6 * place))


@fault("data-bound", "note")
def steps_wait_a_little_for_data() -> History:
    return history(train(data_wait_s=always(0.1)))


@fault("data-bound", "warning")
def steps_wait_long_for_data() -> History:
    return history(train(data_wait_s=always(0.4)))


@fault("evaluating-too-long", "warning")
def evaluations_take_a_quarter_of_the_time() -> History:
    return history(train(evaluating_s=always(0.3)))


@fault("evaluating-too-long", "note")
def evaluations_of_a_short_run_take_half_of_the_time() -> History:
    return history(train(evaluating_s=always(0.1), training_s=always(0.1)))


@fault("saving-too-long", "warning")
def saves_take_more_than_a_tenth_of_the_time() -> History:
    return history(train(saving_s=always(0.2), training_s=always(1.2)))


@fault("saving-too-long", "note")
def saves_of_a_short_run_take_a_tenth_of_the_time() -> History:
    return history(train(saving_s=always(0.1)))


@fault("slow-rank", "warning")
def a_rank_is_slow() -> History:
    return history(train(), slow_rank())


@fault("slow-rank", "note")
def a_rank_was_slow_for_a_while() -> History:
    return history(train(), slow_rank(), slow_rank(step=400, until_step=390))


@fault("slow-rank", "note")
def a_rank_was_slow_in_an_earlier_session() -> History:
    return history(train(), slow_rank(), resume(110))


@fault("falling-throughput", "note")
def steps_take_longer_and_longer() -> History:
    return history(train(targets_per_s=lambda place: 100 / (1 + place / 30)))


@fault("jittering-throughput", "note")
def steps_take_now_longer_now_shorter() -> History:
    return history(train(targets_per_s=lambda place: 100 + 60 * wobble(place)))


# --- the length and the schedule ------------------------------------------------------------------


@fault("ended-early", "warning")
def the_run_was_killed() -> History:
    return history(train(count=40))


@fault("ended-early", "note")
def a_signal_stopped_the_run() -> History:
    return history(train(count=40), event("stopped by SIGTERM", 400))


@fault("ended-early", "note")
def a_setting_stopped_the_run() -> History:
    return history(train(count=40), written={"stop_after": "400 steps"})


@fault("long-warm-up", "warning")
def the_warmup_takes_more_than_a_quarter() -> History:
    return history(train(), schedule={"shape": "cosine", "warmup": 151})


@fault("high-rate-at-end", "note")
def the_rate_is_constant() -> History:
    constant = {"shape": "constant", "warmup": 0}
    return history(train(lr=always(1e-3)), schedule=constant)


@fault("still-improving", "note")
def the_last_scores_are_the_best_by_far() -> History:
    return history(train(), scores([2.0 - 0.1 * place for place in range(10)]))
