"""Histories of runs that nearly have a fault: the finding must not be made in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from diagnose.faulty_histories import slow_rank
from diagnose.histories import (
    KINDS,
    RECORDS,
    always,
    begun_at,
    data_check,
    event,
    falling,
    flat,
    history,
    jump,
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


@dataclass(frozen=True)
class Border:
    """A history, and the finding that must not be made in it."""

    finding: str
    make: Callable[[], History]

    @property
    def name(self) -> str:
        return f"{self.finding}: {self.make.__name__}"


BORDERS: list[Border] = []


def border(finding: str) -> Callable[[Callable[[], History]], Callable[[], History]]:
    """Add a history to `BORDERS`; its name says why the finding is not made."""

    def add(make: Callable[[], History]) -> Callable[[], History]:
        BORDERS.append(Border(finding, make))
        return make

    return add


def below_zero(place: int) -> float:
    """Learnt at once, and as good from then on; within 3 % of it."""
    return -5 + 5 * math.exp(-place) + 0.02 * wobble(place)


def noisy_scores() -> list[float]:
    """Level for long, each 3 % up or down by chance, the lowest in the middle and the last two
    above the level.
    """
    losses = [1 + 3 * math.exp(-place / 4) + 0.03 * (-1) ** place for place in range(60)]
    losses[25] = 0.955
    return [*losses[:58], 1.02, 1.02]


# --- the loss -------------------------------------------------------------------------------------


@border("no-better-than-chance")
def the_loss_falls_far_below_a_guess() -> History:
    return history(targets(10), begun_at(2.4, train()))


@border("no-better-than-chance")
def one_score_is_better_than_a_guess() -> History:
    return history(targets(10), begun_at(2.4, train()), scores([2.2, 3.0]))


@border("no-better-than-chance")
def a_loss_that_is_a_sum_falls() -> History:
    return history(targets(10), begun_at(23.0, train(lambda place: 10 * falling(place))))


@border("no-better-than-chance")
def a_loss_that_began_at_twice_a_guess_falls_near_to_it() -> History:
    records = train(lambda place: 2.6 + 2 * math.exp(-place / 9))
    return history(targets(10), begun_at(4.6, records))


@border("no-better-than-chance")
def a_weighted_loss_is_far_above_the_frequencies_and_below_a_uniform_guess() -> History:
    records = train(lambda place: 0.3 + 0.4 * math.exp(-place / 9))
    return history(targets(2, entropy=0.1), begun_at(0.72, records))


@border("no-better-than-chance")
def a_smoothed_or_mixed_loss_is_high_in_training_but_not_in_the_split() -> History:
    return history(targets(10), begun_at(2.4, train(flat)), scores([2.2, 1.5, 1.4]))


@border("no-better-than-chance")
def the_loss_passes_the_frequencies_of_its_targets() -> History:
    records = train(lambda place: 6.9 - 0.035 * place)
    return history(targets(1000, entropy=5.0), begun_at(6.9, records))


@border("no-better-than-chance")
def a_sample_has_several_tokens() -> History:
    records = train(flat, samples=always(8))
    return history(targets(100, entropy=2.3), begun_at(4.6, records))


@border("no-better-than-chance")
def the_accuracy_rises() -> History:
    return history(targets(10), train(flat), scores([9.0, 9.0], accuracy=[0.5, 0.6]))


@border("no-better-than-chance")
def a_run_of_40_steps_has_hardly_begun() -> History:
    return history(targets(10), train(flat, count=4), length="40 steps")


@border("no-better-than-chance")
def a_run_that_goes_on_is_not_half_done() -> History:
    return history(targets(10), train(flat, count=25), standing="running")


@border("no-better-than-chance")
def each_of_500_targets_was_seen_ten_times() -> History:
    return history(targets(500), train(always(math.log(500))))


@border("no-better-than-chance")
def a_gan_has_no_loss_that_falls() -> History:
    adamw = {"name": "adamw", "lr": 1e-3}
    return history(
        targets(10, has_loss=False), train(flat), optimizer={"d": adamw, "g": adamw.copy()}
    )


@border("no-better-than-chance")
def nothing_is_known_of_the_targets() -> History:
    return history(train(flat))


@border("loss-not-falling")
def the_loss_falls_slowly() -> History:
    return history(train(lambda place: 2.3 - 0.001 * place))


@border("rate-too-high")
def the_loss_began_near_its_first_record() -> History:
    return history(begun_at(3.9, train()))


@border("rate-too-high")
def the_loss_fell_at_once_and_rose_a_little() -> History:
    return history(begun_at(4.0, train(jump(1.0, 1.2, at=20))))


@border("rate-too-high")
def the_first_batch_had_few_targets_that_were_easy() -> History:
    records = train(lambda place: 1 + 0.3 * wobble(place), targets=always(20))
    return history(begun_at(0.01, records))


@border("rate-too-high")
def the_loss_is_noisy_and_twice_that_of_step_0() -> History:
    return history(begun_at(1.0, train(lambda place: 2.3 * (1 + 0.6 * wobble(place)))))


@border("rate-too-high")
def updates_are_just_below_a_tenth_of_the_weights() -> History:
    return history(train(), layers(update=always(0.99)))


@border("rate-too-high")
def units_died_but_the_run_may_be_well() -> History:
    dead = layers(zero_grad_row_fraction=lambda place: {"2.weight": 0.0 if place < 2 else 0.9})
    return history(train(), dead)


@border("rate-too-high")
def a_loss_below_zero_is_level() -> History:
    return history(train(below_zero))


@border("rate-too-high")
def the_loss_jumps_by_4_percent_only() -> History:
    return history(train(lambda place: 2.3 + 0.1 * (place > 40)))


@border("rate-too-high")
def the_loss_bounces_by_little() -> History:
    def loss(place: int) -> float:
        fallen = 4.0 - 0.1 * min(place, 10)
        return fallen + 0.05 if place > 12 else fallen

    return history(train(loss))


@border("rate-too-high")
def the_loss_bounces_and_falls_again() -> History:
    def loss(place: int) -> float:
        fallen = 4.0 - 0.1 * min(place, 10)
        if 12 < place < 20:
            return fallen + 0.2
        return fallen - 0.1 if place >= 20 else fallen

    return history(train(loss))


@border("rate-too-low")
def updates_are_small_but_usual() -> History:
    return history(train(), layers(update=always(1.1e-4)))


@border("rate-too-low")
def the_weights_move_by_less_than_a_tenth_and_the_loss_falls() -> History:
    return history(train(), layers(update=always(1.6e-3)))


@border("rate-too-low")
def all_updates_together_move_the_weights_by_more_than_a_tenth() -> History:
    return history(train(flat), layers(update=always(1.7e-3)))


@border("rate-too-low")
def the_loss_falls_in_a_line_and_far() -> History:
    return history(train(lambda place: 2.3 - 0.02 * place, lr=always(1e-5)))


@border("rate-too-low")
def the_loss_falls_by_little_but_fast() -> History:
    return history(train(lambda place: 2.1 + 0.2 * math.exp(-place / 12), lr=always(1e-5)))


@border("diverged")
def the_loss_lost_a_third_of_what_it_had_gained() -> History:
    return history(train(lambda place: falling(place) + 0.9 * (place >= 40)))


@border("diverged")
def the_loss_jumped_and_came_back() -> History:
    return history(train(lambda place: falling(place) + 5 * (place == 40)))


@border("diverged")
def a_few_of_the_last_steps_are_skipped() -> History:
    return history(train(skipped=only_at(RECORDS - 1, 3, others=0)))


@border("non-finite-steps")
def no_step_is_skipped() -> History:
    return history(train())


@border("loss-spikes")
def the_jump_is_below_a_quarter() -> History:
    return history(train(lambda place: falling(place) + 0.2 * (place == 40)))


@border("loss-spikes")
def the_first_record_is_high() -> History:
    return history(train(lambda place: 9.0 if place == 0 else falling(place)))


# --- the data and the splits ----------------------------------------------------------------------


@border("overfitting")
def the_loss_of_the_split_rises_by_1_percent() -> History:
    return history(train(), scores([3.0, 2.0, 1.5, 1.51, 1.52, 1.52]))


@border("overfitting")
def only_the_last_loss_of_the_split_is_higher() -> History:
    return history(train(), scores([3.0, 2.0, 1.5, 1.4, 1.3, 1.6]))


@border("overfitting")
def of_the_last_two_losses_of_the_split_the_last_one_alone_is_higher() -> History:
    return history(train(), scores([3.0, 2.0, 1.5, 1.6, 1.5, 1.9]))


@border("overfitting")
def the_last_loss_of_the_split_is_the_best_again() -> History:
    return history(train(), scores([3.0, 2.0, 1.5, 1.6, 1.9, 1.5]))


@border("overfitting")
def the_training_loss_does_not_fall() -> History:
    return history(train(flat), scores([3.0, 2.0, 1.5, 1.6, 1.7, 1.9]))


@border("overfitting")
def the_losses_of_the_split_rise_by_no_more_than_their_noise() -> History:
    return history(train(), scores(noisy_scores()))


@border("train-validation-overlap")
def nothing_is_shared() -> History:
    return history(train(), overlap(0))


@border("train-validation-overlap")
def a_split_of_the_training_data_says_so_by_its_name() -> History:
    split = {"checked": 100, "overlapping": 100, "same": True}
    return history(train(), data_check(overlap={"train_data": split}))


@border("non-finite-scores")
def only_the_first_loss_of_the_split_is_nan() -> History:
    return history(train(), scores([math.nan, 1.5]))


@border("non-finite-scores")
def the_training_loss_is_nan_too() -> History:
    return history(train(always(math.nan)), scores([2.0, math.nan]))


@border("constant-targets")
def of_two_targets_one_has_94_percent() -> History:
    seen = {"distinct": 2, "most_common_fraction": 0.94}
    return history(train(), data_check(targets=seen))


@border("loss-contract")
def the_loss_of_a_batch_is_that_of_its_halves() -> History:
    contract = {"holds": True, "description": "holds: 2 for a batch, 2 for"}
    return history(train(), data_check(loss_contract=contract))


@border("loss-contract")
def the_loss_was_not_compared() -> History:
    contract = {"holds": True, "description": "not checked: it draws numbers"}
    return history(train(), data_check(loss_contract=contract))


@border("average-too-slow")
def nothing_is_averaged() -> History:
    return history(train())


@border("average-too-slow")
def the_decay_of_the_average_rises() -> History:
    return history(train(), ema=0.9999, behavior=AVERAGES)


@border("average-too-slow")
def the_average_is_fast() -> History:
    return history(train(), ema=0.99, ema_ramp=False, behavior=AVERAGES)


@border("average-too-slow")
def the_average_has_not_begun() -> History:
    return history(train(), ema=0.999, ema_start="600 steps", ema_ramp=False, behavior=AVERAGES)


@border("smoothed-perplexity")
def a_recipe_knows_that_its_loss_is_smoothed() -> History:
    scored = scores([3.0], perplexity=[20.1])
    return history(train(), scored, identity={"label_smoothing": 0.1})


@border("smoothed-perplexity")
def the_loss_is_not_smoothed() -> History:
    return history(train(), scores([3.0], perplexity=[20.1]), program="file")


@border("smoothed-perplexity")
def the_loss_is_below_what_a_smoothed_one_can_be() -> History:
    return history(
        train(),
        data_check(targets={"distinct": 1000}),
        scores([0.5], perplexity=[1.65]),
        program="file",
        identity={"label_smoothing": 0.1},
    )


# --- gradients and layers -------------------------------------------------------------------------


@border("dead-units")
def less_than_half_of_the_rows_have_no_gradient() -> History:
    return history(train(), layers(zero_grad_row_fraction=always({"2.weight": 0.49})))


@border("dead-units")
def rows_of_an_embedding_have_no_gradient() -> History:
    unused_rows = layers(zero_grad_row_fraction=always({"2.weight": 0.9}))
    return history(train(), unused_rows, kinds=KINDS | {"2": "Embedding"})


@border("dead-units")
def a_relu_is_sparse() -> History:
    return history(train(), layers(saturated_fraction=always({"1": 0.95})))


@border("dead-units")
def a_head_begins_at_0() -> History:
    dead_at_first = layers(
        zero_grad_row_fraction=lambda place: {"2.weight": 1.0 if place == 0 else 0.0}
    )
    return history(train(), dead_at_first)


@border("saturated-units")
def less_than_half_of_a_tanh_is_saturated() -> History:
    return history(train(), layers(saturated_fraction=always({"3": 0.49, "1": 0.6})))


@border("vanishing-gradient")
def the_gradient_of_the_first_layer_is_small() -> History:
    return history(train(), layers(gradient=only_in("0", 1.1e-4, others=1.0)))


@border("vanishing-gradient")
def a_projection_starts_at_0_in_a_long_warmup() -> History:
    def weight(name: str, place: int) -> float:
        return 1e-5 if name.startswith("0.") and place < 7 else 10.0

    watched = layers(watched=12, weight=weight)
    return history(train(), watched, schedule={"shape": "linear", "warmup": 700})


@border("vanishing-gradient")
def only_a_bias_has_a_tiny_gradient() -> History:
    def gradient(name: str, place: int) -> float:
        return 1e-9 if "bias" in name else 1.0

    watched = layers(
        names=("0.weight", "0.bias"), gradient=gradient, zero_grad_row_fraction=always({})
    )
    return history(train(), watched)


@border("growing-gradient")
def the_gradient_grows_to_less_than_ten_times() -> History:
    return history(train(grad_norm=lambda place: 0.5 + 4.4 * place / RECORDS))


@border("often-clipped")
def a_tenth_of_the_steps_is_not_clipped() -> History:
    return history(train(clip_fraction=always(0.89), grad_norm=always(2.0)))


@border("often-clipped")
def all_steps_are_clipped_by_little() -> History:
    return history(train(clip_fraction=always(1.0), grad_norm=always(1.9)))


@border("often-clipped")
def the_limit_follows_the_gradients() -> History:
    return history(train(clip_fraction=always(1.0), grad_norm=always(9.0)), clip="auto 0.9")


@border("never-updated")
def all_layers_are_moved_once() -> History:
    return history(train(), layers(update=lambda name, place: 0.01 * (place == 5)))


@border("unusual-updates")
def the_updates_of_all_layers_are_within_the_usual() -> History:
    return history(train(), layers(update=only_in("2", 0.99, others=1.1e-4)))


@border("unusual-updates")
def the_weights_of_a_layer_began_near_0() -> History:
    def weight(name: str, place: int) -> float:
        return 0.01 if name.startswith("2.") and place < 4 else 10.0

    return history(train(), layers(weight=weight))


@border("unusual-updates")
def updates_are_tiny_where_the_rate_is() -> History:
    watched = layers(update=lambda name, place: 0.01 if place < 4 else 1e-7)
    return history(train(lr=jump(1e-3, 1e-6, at=31)), watched)


@border("batch-too-small")
def the_noise_is_just_below_ten_times_the_batch() -> History:
    return history(train(), noisy_gradients(8, 79.0))


# --- memory and time ------------------------------------------------------------------------------


@border("growing-memory")
def memory_grows_by_little() -> History:
    return history(train(host_memory_bytes=lambda place: 500e6 + 1e5 * place))


@border("growing-memory")
def memory_takes_one_step_up() -> History:
    return history(train(host_memory_bytes=jump(500e6, 600e6, at=21)))


@border("growing-memory")
def a_process_that_began_at_record_20_took_what_it_needs_until_42() -> History:
    records = train(host_memory_bytes=lambda place: 650e6 + 1e7 * min(max(place - 20, 0), 22))
    return history(records, resume(200))


@border("data-bound")
def steps_wait_for_less_than_a_tenth_of_their_time() -> History:
    return history(train(data_wait_s=always(0.088)))


@border("data-bound")
def only_the_first_record_waits() -> History:
    return history(train(data_wait_s=only_at(0, 60.0, others=0.0)))


@border("evaluating-too-long")
def evaluations_take_less_than_a_quarter_of_the_time() -> History:
    return history(train(evaluating_s=always(0.26)))


@border("saving-too-long")
def saves_take_less_than_a_tenth_of_the_time() -> History:
    return history(train(saving_s=always(0.09)))


@border("slow-rank")
def a_record_of_a_slow_rank_lacks_its_fields() -> History:
    return history(train(), [{"kind": "slow_rank", "step": 110, "rank": 3}])


@border("slow-rank")
def a_rank_is_slow_in_work_that_is_not_known() -> History:
    return history(train(), slow_rank(work="update"))


@border("falling-throughput")
def steps_get_slower_by_little() -> History:
    return history(train(targets_per_s=lambda place: 100 - 0.25 * place))


@border("jittering-throughput")
def the_time_of_steps_varies_by_little() -> History:
    return history(train(targets_per_s=lambda place: 100 + 20 * wobble(place)))


# --- the length and the schedule ------------------------------------------------------------------


@border("ended-early")
def all_steps_are_done() -> History:
    return history(train())


@border("ended-early")
def the_run_says_that_it_has_finished() -> History:
    return history(train(count=40), event("finished", 400))


@border("ended-early")
def the_run_goes_on() -> History:
    return history(train(count=40), standing="running")


@border("long-warm-up")
def the_warmup_takes_a_quarter() -> History:
    return history(train(), schedule={"shape": "cosine", "warmup": 150})


@border("long-warm-up")
def a_cycle_rises_for_long() -> History:
    return history(train(), schedule={"shape": "one_cycle", "warmup": 180})


@border("high-rate-at-end")
def the_rate_fell_to_less_than_half() -> History:
    return history(train(lr=lambda place: 1e-3 * (1 - 0.51 * place / (RECORDS - 1))))


@border("still-improving")
def the_last_scores_are_better_by_less_than_2_percent() -> History:
    losses = [2.0 - 0.1 * place for place in range(8)]
    return history(train(), scores([*losses, 1.29, 1.28]))


@border("still-improving")
def the_run_ended_early() -> History:
    losses = [2.0 - 0.1 * place for place in range(10)]
    return history(train(count=40), scores(losses)[:6])
