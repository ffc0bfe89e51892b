"""Settings, environment and times of a run as table rows."""

import json
from collections.abc import Sequence
from typing import Any

from surefoot.tools.report.charts import format_value
from surefoot.tools.report.headline import Headline, State, headline
from surefoot.tools.report.series import ReportedRun
from surefoot.tracking.record import PHASES
from surefoot.tracking.run_reader import SessionEntry
from surefoot.train.recorded_settings import Values, recorded_settings, values_by_step

_LONGEST = 400  # characters of a value
_MOST = 300  # rows


def settings(run: ReportedRun, *, limit: int, max_length: int) -> list[tuple[str, str, str]]:
    """Return each setting as (dotted name, value, origin). The origin is "" if it is unknown. One
    that was changed has its value in force, and in parentheses those before and after.
    """
    config = run.files.config
    changed = _changed(run)
    rows: list[tuple[str, str, str]] = []
    for name in {**config.flat, **changed}:
        value = config.flat.get(name)
        if name in changed:
            text = _with_other_values(changed[name], run.last_step, max_length=max_length)
            row = (name, text, "changed")
        elif value is not None:
            text = format_setting(value, max_length=max_length)
            row = (name, text, config.origins.get(name, ""))
        else:
            continue
        if len(rows) < limit:
            rows.append(row)
    return rows


def _changed(run: ReportedRun) -> dict[str, Values]:
    """Return the values of the settings that were changed, by their names in config.toml."""
    changed = {}
    for name, values in values_by_step(run.files.changes).items():
        # a script's configuration has the name of its schedule as `to_dict` has it
        is_shape = name == "schedule.name" and "schedule.shape" in run.files.config.flat
        changed["schedule.shape" if is_shape else name] = values
    return changed


def _with_other_values(values: Values, step: int, *, max_length: int) -> str:
    """Return the value of a changed setting after `step` steps, with its other values.

    >>> _with_other_values([(0, 0.1), (300, 0.01), (500, None)], 400, max_length=80)
    '0.01 (0.1 until step 300, – from step 500)'
    """
    in_force = ""
    others = []
    for place, (begin, value) in enumerate(values):
        text = format_setting(value, max_length=max_length)
        end = values[place + 1][0] if place + 1 < len(values) else None
        if begin > step:
            others.append(f"{text} from step {begin:,}")
        elif end is not None and end <= step:
            others.append(f"{text} until step {end:,}")
        else:
            in_force = text
    return f"{in_force} ({', '.join(others)})"


def differing_settings(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Return each setting that differs between runs, with its value in each run. The run's
    directory is omitted.
    """
    settings_of_all = []
    changed_names = {name for run in runs for name in _changed(run)}
    for run in runs:
        of_run = {name: format_setting(value) for name, value in run.files.config.flat.items()}
        chosen = recorded_settings(run.files).of_program
        for name in changed_names & chosen.keys():
            if run.files.config.flat.get(name) is None:  # the program has chosen it
                of_run[name] = format_setting(chosen[name])
        for name, history in _changed(run).items():
            of_run[name] = _with_other_values(history, run.last_step, max_length=_LONGEST)
        settings_of_all.append(of_run)
    names: dict[str, None] = {}
    for of_run in settings_of_all:
        names |= dict.fromkeys(of_run)
    rows = []
    for name in names:
        values = [of_run.get(name, format_setting(None)) for of_run in settings_of_all]
        if len(set(values)) > 1 and name not in ("out", "preset"):
            rows.append((name, values))
    return rows[:_MOST]


def format_setting(value: Any, *, max_length: int = _LONGEST) -> str:
    """Format a setting as one line.

    >>> [format_setting(value) for value in (3e-4, True, None, ["a", 1], "5%")]
    ['0.0003', 'true', '–', 'a, 1', '5%']
    """
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        text = ", ".join(format_setting(item) for item in value)
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= max_length else f"{text[:max_length]} \u2026"


def shares(run: ReportedRun) -> list[tuple[str, float, float, str]]:
    """Return the time of all sessions by phase: name, seconds, fraction of the total, and color on
    the page.
    """
    spent = run.records.spent_s
    total = sum(spent.values()) or 1.0
    rows = []
    for index, (phase, seconds) in enumerate(spent.items()):
        if seconds / total >= 0.0005:
            rows.append((PHASES[phase], seconds, seconds / total, f"k{index}"))
    return rows


def tiles(run: ReportedRun, state: State) -> list[tuple[str, str, str]]:
    """Return name, value and remark of each tile in the page's first row, such as the main metric,
    loss, steps and time.
    """
    records = run.records
    main = headline(run)
    main_name = "" if main is None else main.name
    row = []
    if main is not None:
        row.append(_headline_tile(main))
    loss = run.train.get("loss")
    if loss is not None and loss.last is not None and main_name != "training loss":
        step, value = loss.last
        row.append(("training loss", format_value(value), f"at step {step:,}"))
    at_end = "evaluated once, at the end"
    if records.at_end_of_step is not None:
        at_end = f"evaluated at the end, weights of step {records.at_end_of_step:,}"
    for name, value in list(records.at_end.items())[:3]:
        if name != main_name:
            row.append((name, format_value(value), at_end))
    remarks = []
    planned = run.files.planned_steps
    if planned is not None and state != "finished":
        remarks.append(f"of {planned:,}")
    if records.last_step < run.last_step:
        remarks.append(f"the records end at step {records.last_step:,}")
    row.append(("steps", f"{run.last_step:,}", "; ".join(remarks)))
    spent = records.spent_s
    total = sum(spent.values())
    if total > 0:
        remark = f"{spent['training'] / total:.0%} training"
        row.append(("time", format_value(total, "seconds"), remark))
    trained = spent["training"] + spent["data_wait"]
    if records.targets > 0 and trained > 0:
        speed = float(f"{records.targets / trained:.3g}")
        name = f"{run.count_unit} per second"
        row.append((name, format_value(speed), "mean, while training"))
    resumed = sum(event.resumed for event in records.events)
    if resumed:
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
    rows: list[tuple[str, Any]] = [("began", _time(first))]
    if later:
        rows.append(("last resumed", _time(last)))
        rows.append(("sessions", str(1 + len(later))))
    rows += [(name, machine.get(name)) for name in ("surefoot", "torch")]
    rows += [(name, last.get(name)) for name in ("python", "numpy", "platform")]
    devices = [machine.get(name) for name in ("device", "hardware", "cpu")]
    rows += [
        ("device", ", ".join(str(device) for device in devices if device)),
        ("processors", last.get("processors")),
        ("threads", machine.get("threads")),
    ]
    if machine.get("ranks") != 1:
        rows.append(("ranks", machine.get("ranks")))
    if machine.get("deterministic"):
        rows.append(("deterministic", "yes"))
    rows.append(("git commit", last.get("git_commit")))
    data = []
    for name, value in (last.get("data") or {}).items():
        if isinstance(value, str | int | float) and name != "seed":
            data.append(f"{name} {str(value)[:16] if name == 'sha256' else value}")
    rows.append(("data", ", ".join(data)))
    return [(name, format_setting(value)) for name, value in rows if value not in (None, "")]


def _headline_tile(main: Headline) -> tuple[str, str, str]:
    if main.name == "training loss":
        return main.name, format_value(main.last), f"at step {main.last_step:,}"
    if main.best_is_last:
        return main.name, format_value(main.last), f"best, at step {main.best_step:,}"
    return (
        f"best {main.name}",
        format_value(main.best),
        f"at step {main.best_step:,}; last {format_value(main.last)}",
    )


def _time(session: SessionEntry) -> str:
    return session.get("time", "").replace("T", " ", 1)
