"""The list of all checks, their verdicts, and the report."""

from collections import Counter
from collections.abc import Callable, Sequence

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
from surefoot.tracking.format import counted
from surefoot.train.changed_settings import described as change_in_words

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


def findings(
    history: History, *, broken: Callable[[Check, Exception], None] | None = None
) -> list[Finding]:
    """Return the problems and notable facts of a run, errors first. The result depends only on
    records and settings. `broken` is that of `verdicts`.
    """
    return worst_first(verdicts(history, broken=broken))


def format_findings(history: History, verdicts: Sequence[Verdict], *, every: bool = False) -> str:
    """Format one block per finding, errors first. With `every`, or without findings, also list the
    other checks.
    """
    sorted_findings = worst_first(verdicts)
    healthy = [verdict for verdict in verdicts if isinstance(verdict, Healthy)]
    unknown = [verdict for verdict in verdicts if isinstance(verdict, Unknown)]
    if sorted_findings:
        summary = _count_by_severity(sorted_findings)
    else:
        summary = "no findings"
        if unknown:
            summary += f"; too few records for {len(unknown)} of {len(verdicts)} checks"
    changes = [change_in_words(change) for change in history.described.changes]
    blocks = ["\n".join([_headline(history), *changes, summary])]
    blocks += [str(finding) for finding in sorted_findings]
    if every or not sorted_findings:
        if healthy:
            blocks.append("\n".join(["healthy", *_rows(healthy)]))
        if unknown:
            title = "unknown, because too little is recorded"
            blocks.append("\n".join([title, *_rows(unknown), *_more_records(history)]))
    return visible("\n\n".join(blocks))


def in_a_line(finding: Finding, *, command: str | None) -> str:
    """Format a finding as one line during the run. `command` explains the finding; None if the run
    has no directory.

    >>> finding = Finding("loss-spikes", "warning", "The loss jumped once.", try_=("look",))
    >>> in_a_line(finding, command="surefoot diagnose runs/a")
    'WARNING loss-spikes: The loss jumped once. More: surefoot diagnose runs/a'
    """
    line = f"{finding.severity.upper()} {finding.name}: {finding.message}"
    if command is not None:
        return f"{line} More: {command}"
    if finding.try_:
        return f"{line} Try: {finding.try_[0]}"
    return line


def _headline(history: History) -> str:
    described = history.described
    steps = f"{history.last_step:,}"
    if described.steps is not None:
        steps += f" of {described.steps:,}"
    if described.standing == "running":
        standing = "running"
    elif history.ended_by:
        standing = history.ended_by
    else:
        standing = "finished" if history.complete else "not finished"
    times = len(history.resumed)
    if times == 1:
        standing += ", resumed once"
    elif times > 1:
        standing += f", resumed {times} times"
    return f"{described.name}: {steps} steps, {standing}"


def _count_by_severity(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(
        counted(counts[severity], severity) for severity in SEVERITIES if counts[severity]
    )


def _rows(verdicts: Sequence[Healthy | Unknown]) -> list[str]:
    width = max(len(verdict.name) for verdict in verdicts)
    lines = []
    for verdict in verdicts:
        lines += wrapped(verdict.message, f"  {verdict.name:<{width}}  ", width + 4)
    return lines


def _more_records(history: History) -> list[str]:
    """Return the setting with which a run of this length has enough records."""
    every = history.step // (2 * FEWEST)
    if not history.over or every < 1 or history.train_count >= FEWEST:
        return []
    setting = history.described.typed("log_every", f"{every} steps")
    return [f"  for enough records in a run of this length: {setting}"]
