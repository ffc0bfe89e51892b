"""All findings of a run: which there are, what each comes to, and what was looked at."""

from collections.abc import Callable, Sequence

from surefoot.diagnose import (
    activations,
    divergence,
    generalization,
    gradients,
    learning_rate,
    memory,
    schedule,
    throughput,
    weights,
)
from surefoot.diagnose.finding import Check, Finding, Verdict, worst_first
from surefoot.diagnose.history import History

CHECKS: Sequence[Check] = (
    divergence.diverged,
    divergence.non_finite_steps,
    learning_rate.loss_not_falling,
    generalization.constant_targets,
    generalization.overlap,
    activations.dead_units,
    gradients.vanishing_gradient,
    learning_rate.rate_too_high,
    learning_rate.rate_too_low,
    generalization.overfitting,
    divergence.loss_spikes,
    gradients.growing_gradient,
    gradients.often_clipped,
    activations.saturated_units,
    weights.never_updated,
    weights.unusual_updates,
    gradients.noisy_batch,
    generalization.smoothed_perplexity,
    memory.growing_memory,
    throughput.data_bound,
    throughput.evaluating_too_long,
    throughput.saving_too_long,
    throughput.falling_throughput,
    throughput.jittering_throughput,
    schedule.ended_early,
    schedule.long_warmup,
    schedule.high_rate_at_end,
    schedule.still_improving,
)
"""In the order in which they are told, within one severity: what would explain others comes first."""


def verdicts(history: History, *, broken: Callable[[Check, Exception], None] | None = None) -> list[Verdict]:
    """What every check comes to, in the order of `CHECKS`.

    A check that fails is a fault of ours: it is handed to `broken`, and the others are made; without that it raises.
    """
    found = []
    for check in CHECKS:
        try:
            found.append(check(history))
        except Exception as problem:
            if broken is None:
                raise
            broken(check, problem)
    return found


def findings(history: History) -> list[Finding]:
    """What is wrong with a run, or worth knowing: errors first. A pure function of its records and settings."""
    return worst_first([verdict for verdict in verdicts(history) if isinstance(verdict, Finding)])
