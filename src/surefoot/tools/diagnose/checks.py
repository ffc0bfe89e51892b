"""The list of all checks, their verdicts, and the report."""

from collections.abc import Callable, Sequence
from itertools import chain

from surefoot.errors import visible
from surefoot.tools.diagnose import (
    averages,
    chance,
    divergence,
    generalization,
    gradients,
    layers,
    learning_rate,
    memory,
    schedule,
    throughput,
)
from surefoot.tools.diagnose.finding import (
    SEVERITIES,
    Check,
    Finding,
    Healthy,
    Unknown,
    Verdict,
    worst_first,
    wrapped,
)
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.statistics import FEWEST

CHECKS: Sequence[Check] = (
    divergence.diverged,
    divergence.non_finite_steps,
    generalization.non_finite_scores,
    chance.no_better_than_chance,
    learning_rate.loss_not_falling,
    averages.average_too_slow,
    generalization.constant_targets,
    gradients.loss_contract,
    generalization.overlap,
    layers.dead_units,
    gradients.vanishing_gradient,
    learning_rate.rate_too_high,
    learning_rate.rate_too_low,
    generalization.overfitting,
    divergence.loss_spikes,
    gradients.growing_gradient,
    gradients.often_clipped,
    layers.saturated_units,
    layers.never_updated,
    layers.unusual_updates,
    gradients.noisy_batch,
    generalization.smoothed_perplexity,
    memory.growing_memory,
    throughput.data_bound,
    throughput.evaluating_too_long,
    throughput.saving_too_long,
    throughput.slow_rank,
    throughput.falling_throughput,
    throughput.jittering_throughput,
    schedule.ended_early,
    schedule.long_warmup,
    schedule.high_rate_at_end,
    schedule.still_improving,
)
"""Within one severity, findings are reported in this order. A finding that may explain others comes
first.
"""


def verdicts(
    history: History, *, broken: Callable[[Check, Exception], None] | None = None
) -> list[Verdict]:
    """Return the verdicts of all checks in the order of `CHECKS`.

    An exception in a check is a bug in surefoot. `broken` receives the exception, and the other
    checks run. Without `broken`, the exception propagates.
    """
    all_verdicts = []
    for check in CHECKS:
        try:
            all_verdicts.append(check(history))
        except Exception as problem:
            if broken is None:
                raise
            broken(check, problem)
    return all_verdicts


def findings(history: History) -> list[Finding]:
    """Return the problems and notable facts of a run, errors first. The result depends only on
    records and settings.
    """
    return worst_first(verdicts(history))


def format_findings(history: History, verdicts: Sequence[Verdict], *, every: bool = False) -> str:
    """Format one block per finding, errors first. With `every`, or without findings, also list the
    other checks.
    """
    sorted_findings = worst_first(verdicts)
    unclear = [verdict for verdict in verdicts if isinstance(verdict, Unknown)]
    of_all = f"; too few records for {len(unclear)} of {len(verdicts)} checks" if unclear else ""
    blocks = [
        _headline(history, sorted_findings, else_said=f"no findings{of_all}"),
        *map(str, sorted_findings),
    ]
    if every or not sorted_findings:
        blocks += _rows(
            "healthy", [verdict for verdict in verdicts if isinstance(verdict, Healthy)]
        )
        blocks += _rows("unknown, because too little is recorded", unclear, _more_records(history))
    return visible("\n\n".join(blocks))


def in_a_line(finding: Finding, *, command: str | None) -> str:
    """Format a finding as one line during the run. `command` explains the finding; None if the run
    has no directory.

    >>> finding = Finding("loss-spikes", "warning", "The loss jumped once.", try_=("look",))
    >>> in_a_line(finding, command="surefoot diagnose runs/a")
    'WARNING loss-spikes: The loss jumped once. More: surefoot diagnose runs/a'
    """
    more = (
        f" More: {command}"
        if command is not None
        else f" Try: {finding.try_[0]}"
        if finding.try_
        else ""
    )
    return f"{finding.severity.upper()} {finding.name}: {finding.message}{more}"


def _more_records(history: History) -> list[str]:
    every = history.step // (2 * FEWEST)
    if not history.over or every < 1 or history.train_count >= FEWEST:
        return []
    return [
        f"  for enough records in a run of this length: {history.described.typed('log_every', f'{every} steps')}"
    ]


def _headline(history: History, ranked: Sequence[Finding], *, else_said: str) -> str:
    described, of_all = (
        history.described,
        "" if history.described.steps is None else f" of {history.described.steps:,}",
    )
    standing = (
        "running"
        if described.standing == "running"
        else history.ended_by or ("finished" if history.complete else "not finished")
    )
    counts = [
        (severity, sum(finding.severity == severity for finding in ranked))
        for severity in SEVERITIES
    ]
    summary = (
        ", ".join(f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts if count)
        or else_said
    )
    times = len(history.resumed)
    resumed = f", resumed {'once' if times == 1 else f'{times} times'}" if times else ""
    return f"{described.name}: {history.last_step:,}{of_all} steps, {standing}{resumed}\n{summary}"


def _rows(
    title: str, verdicts: Sequence[Healthy | Unknown], after: Sequence[str] = ()
) -> list[str]:
    wide = max((len(verdict.name) for verdict in verdicts), default=0)
    rows = [
        wrapped(verdict.message, f"  {verdict.name:<{wide}}  ", wide + 4) for verdict in verdicts
    ]
    return ["\n".join([title, *chain.from_iterable(rows), *after])] if rows else []
