"""Settings, environment and times of a run as table rows."""

import json
from collections.abc import Sequence
from typing import Any

from surefoot.tools.report.charts import format_value
from surefoot.tools.report.headline import Headline, State, headline
from surefoot.tools.report.series import ReportedRun
from surefoot.tracking.record import PHASES
from surefoot.tracking.run_reader import Session

_LONGEST = 400  # characters of a value
_MOST = 300  # rows


def settings(run: ReportedRun, *, limit: int, max_length: int) -> list[tuple[str, str, str]]:
    """Return each setting as (dotted name, value, origin). The origin is "" if it is unknown."""
    config = run.files.config
    there = [(name, value) for name, value in config.flat.items() if value is not None][:limit]
    return [
        (name, format_setting(value, max_length=max_length), config.origins.get(name, ""))
        for name, value in there
    ]


def differing_settings(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Return each setting that differs between runs, with its value in each run. The run's
    directory is omitted.
    """
    settings = [run.files.config.flat for run in runs]
    names = dict.fromkeys(
        name for each in settings for name in each if name not in ("out", "preset")
    )
    rows = [(name, [format_setting(each.get(name)) for each in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1][:_MOST]


def format_setting(value: Any, *, max_length: int = _LONGEST) -> str:
    """Format a setting as one line.

    >>> (
    ...     format_setting(3e-4),
    ...     format_setting(True),
    ...     format_setting(None),
    ...     format_setting(["a", 1]),
    ...     format_setting("5%"),
    ... )
    ('0.0003', 'true', '–', 'a, 1', '5%')
    """
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        text = ", ".join(format_setting(part) for part in value)
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= max_length else f"{text[:max_length]} \u2026"


def shares(run: ReportedRun) -> list[tuple[str, float, float, str]]:
    """Return the time of all sessions by phase: name, seconds, fraction of the total, and color on
    the page.
    """
    spent = run.records.spent_s
    total = sum(spent.values()) or 1.0
    rows = [
        (PHASES[phase], seconds, seconds / total, f"k{index}")
        for index, (phase, seconds) in enumerate(spent.items())
    ]
    return [row for row in rows if row[2] >= 0.0005]


def tiles(run: ReportedRun, state: State) -> list[tuple[str, str, str]]:
    """Return name, value and remark of each tile in the page's first row, such as the main metric,
    loss, steps and time.
    """
    records, main, loss = run.records, headline(run), run.train.get("loss")
    row = [] if main is None else [_headline_tile(main)]
    if (
        loss is not None
        and loss.last is not None
        and (main is None or main.name != "training loss")
    ):
        row.append(("training loss", format_value(loss.last[1]), f"at step {loss.last[0]:,}"))
    step = records.at_end_of_step
    row += [
        (
            name,
            format_value(value),
            "evaluated once, at the end"
            if step is None
            else f"evaluated at the end, weights of step {step:,}",
        )
        for name, value in list(records.at_end.items())[:3]
        if main is None or name != main.name
    ]
    planned = run.files.planned_steps
    remarks = []
    if planned is not None and state != "finished":
        remarks.append(f"of {planned:,}")
    if records.last_step < run.last_step:
        remarks.append(f"the records end at step {records.last_step:,}")
    row.append(("steps", f"{run.last_step:,}", "; ".join(remarks)))
    spent, total = records.spent_s, sum(records.spent_s.values())
    if total > 0:
        row.append(
            ("time", format_value(total, "seconds"), f"{spent['training'] / total:.0%} training")
        )
    trained = spent["training"] + spent["data_wait"]
    if records.targets > 0 and trained > 0:
        row.append(
            (
                f"{run.count_unit} per second",
                format_value(float(f"{records.targets / trained:.3g}")),
                "mean, while training",
            )
        )
    if resumed := sum(event.resumed for event in records.events):
        row.append(("resumed", "once" if resumed == 1 else f"{resumed:,} times", ""))
    if records.skipped:
        row.append(("steps skipped", f"{records.skipped:,}", "not finite"))
    return row


def surroundings(run: ReportedRun) -> list[tuple[str, str]]:
    """Return a run's start time, and the versions and hardware of its last session."""
    if not run.files.sessions:
        return []
    first, *later = run.files.sessions
    last = later[-1] if later else first
    machine = last.get("machine", {})
    data = [
        f"{name} {str(value)[:16] if name == 'sha256' else value}"
        for name, value in (last.get("data") or {}).items()
        if isinstance(value, str | int | float) and name != "seed"
    ]
    rows = [
        ("began", _time(first)),
        ("last resumed", _time(last) if later else None),
        ("sessions", str(1 + len(later)) if later else None),
        *((name, machine.get(name)) for name in ("surefoot", "torch")),
        *((name, last.get(name)) for name in ("python", "numpy", "platform")),
        (
            "device",
            ", ".join(
                str(machine[name]) for name in ("device", "hardware", "cpu") if machine.get(name)
            ),
        ),
        ("processors", last.get("processors")),
        ("threads", machine.get("threads")),
        ("ranks", machine.get("ranks") if machine.get("ranks") not in (None, 1) else None),
        ("deterministic", "yes" if machine.get("deterministic") else None),
        ("git commit", last.get("git_commit")),
        ("data", ", ".join(data)),
    ]
    return [(name, format_setting(value)) for name, value in rows if value not in (None, "")]


def _headline_tile(main: Headline) -> tuple[str, str, str]:
    if main.name == "training loss":
        return main.name, format_value(main.last), f"at step {main.last_step:,}"
    if main.best_is_last:
        return main.name, format_value(main.last), f"best, at step {main.last_step:,}"
    return (
        f"best {main.name}",
        format_value(main.best),
        f"at step {main.best_step:,}; last {format_value(main.last)}",
    )


def _time(session: Session) -> str:
    return session.get("time", "").replace("T", " ", 1)
