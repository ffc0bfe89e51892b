"""All findings of a run: which there are, what each comes to, and what was looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surefoot.diagnosis import breaking, generalising, gradients, learning, length, memory, timing, units, weights
from surefoot.diagnosis.finding import Finding, Verdict, worst_first
from surefoot.diagnosis.history import History

Check = Callable[[History], Verdict]
CHECKS: Sequence[Check] = (
    breaking.diverged,
    breaking.non_finite_steps,
    learning.loss_not_falling,
    generalising.constant_targets,
    generalising.overlap,
    units.dead_units,
    gradients.vanishing_gradient,
    learning.rate_too_high,
    learning.rate_too_low,
    generalising.overfitting,
    breaking.loss_spikes,
    gradients.growing_gradient,
    gradients.often_clipped,
    units.saturated_units,
    weights.never_updated,
    weights.unusual_updates,
    gradients.noisy_batch,
    generalising.smoothed_perplexity,
    memory.growing_memory,
    timing.data_bound,
    timing.evaluating_too_long,
    timing.saving_too_long,
    timing.falling_throughput,
    timing.jittering_throughput,
    length.ended_early,
    length.long_warmup,
    length.high_rate_at_end,
    length.still_improving,
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
