"""What the tools that read runs do for a run: findings while it trains, the checks of its data and of
a diverged step, and the page at its end.

No other file of the core imports a tool. Each function imports its tools when it is called, so that
a run loads what it uses.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config.setting_change import in_effect
from surefoot.config.toml import program
from surefoot.run.components import RunComponents
from surefoot.tracking.commands import diagnose_command
from surefoot.tracking.jsonl import read_records
from surefoot.tracking.record import Record
from surefoot.tracking.run_directory import machine_memory_bytes
from surefoot.tracking.run_reader import REPORT
from surefoot.train.changed_settings import changeable

if TYPE_CHECKING:
    from surefoot.tools.diagnose.live import LiveFindings as LiveFindings  # noqa: PLC0414  for session.py
    from surefoot.tools.replay.on_divergence import DivergenceReport


def look_at_data(train: Any, splits: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
    """Return what a run records of its data before the first step: targets, and training samples in
    a split.
    """
    from surefoot.tools.leakage_check import first_look

    return first_look(train, splits, seed=seed)


def look_at_diverged_step(parts: RunComponents, bad: Sequence[int]) -> "DivergenceReport | str":
    """Inspect the first of the bad steps. Returns the reason as text if that fails. Collective."""
    from surefoot.tools.replay.on_divergence import inspect_diverged_step

    return inspect_diverged_step(parts, bad)


def change_settings(run: Path, setting: str, value: Any, *, because: str, step: int) -> bool:
    """Add a change to the journal of a run that trains, from `step` finished steps on. Return False
    if the setting has the value already.
    """
    from surefoot.tools.change.while_training import change_settings
    from surefoot.train.changed_settings import Wish

    return change_settings(run, Wish(setting, value, because), step=step)


def take_request(run: Path, *, step: int) -> str | None:
    """Make the changes that another process has asked for. Return a line about a request that is
    refused, or None.
    """
    from surefoot.tools.change.while_training import take_request

    return take_request(run, step=step)


def write_page(parts: RunComponents) -> None:
    """Write the report page of a closed session, unless `report` is False. A failure is printed."""
    if parts.directory is None or not parts.settings.report:
        return
    from surefoot.tools.report.write import report_at_end

    report_at_end(parts.directory.path, warn=parts.say)


def page_is_older(parts: RunComponents) -> bool:
    """Return True if a finished run has no page, or one that was written before its last record."""
    directory = parts.directory
    if directory is None:
        return False
    try:
        written_at = directory.metrics.stat().st_mtime_ns
        return (directory.path / REPORT).stat().st_mtime_ns < written_at
    except FileNotFoundError:
        return directory.metrics.exists()


def finish_cell(parts: RunComponents) -> None:
    """Draw the chart of a closed session in its notebook's cell. A failure is printed."""
    from surefoot.tracking.notebook import Notebook

    if isinstance(parts.console, Notebook):
        parts.console.finish(lambda: html_of(parts, chart_only=True) or "")


def html_of(parts: RunComponents, *, chart_only: bool = False) -> str | None:
    """Return a run as HTML for a notebook's cell, or None without records. A run without a
    directory is read from the console.
    """
    from surefoot.tools.report.cell import chart_frame, run_html
    from surefoot.tools.report.series import ReportedRun, read_reported_run
    from surefoot.tracking.notebook import Notebook
    from surefoot.tracking.run_reader import RunFiles, Settings

    console = parts.console
    directory = parts.directory
    if directory is not None and directory.metrics.exists():
        run = read_reported_run(directory.path)
    elif isinstance(console, Notebook) and console.records is not None:
        files = RunFiles(Path("run"), Settings({}, {}, {}, {}), (), (), 0, None, ())
        run = ReportedRun(files, console.records)
    else:
        return None
    return chart_frame(run) if chart_only else run_html(run)


def live_findings_of(
    parts: RunComponents, configuration: str | None, *, resumed: bool
) -> "LiveFindings":
    """Return the live findings of a run that starts or resumes training."""
    from surefoot.tools.diagnose.alert import Alert
    from surefoot.tools.diagnose.live import LiveFindings
    from surefoot.tools.diagnose.run_settings import RunDescription, kinds_of_models

    directory = parts.directory
    earlier: Iterable[Record] = ()
    if resumed and directory is not None and directory.metrics.exists():
        metrics = directory.metrics
        earlier = read_records(metrics, size_bytes=metrics.stat().st_size)
    if configuration is None:
        kind = "script"
    else:
        kind = str(program(configuration, where="config.toml").get("kind"))
    written = parts.settings.train_settings()
    watched = next((each for each in parts.run_state.watches if not each.of_training), None)
    described = RunDescription(
        identity=parts.plan.identity,
        written={name: value for name, value in written.items() if value is not None},
        program=kind,
        kinds=kinds_of_models(parts.architecture),
        standing="running",
        name="RUN" if directory is None else str(directory.shown),
        processors=os.cpu_count(),
        memory_bytes=machine_memory_bytes(),
        keeps_best=parts.run_state.best is not None,
        monitored=None if watched is None else (watched.direction, watched.score),
        changes=tuple(
            each for each in in_effect(parts.changes) if each.from_step <= parts.settings_begin
        ),
        in_force=changeable(parts.settings),
        goes_on=directory is not None,
        planned_steps=parts.length.steps,
    )
    if directory is None:
        _collect_for_cell(parts)
    return LiveFindings(
        described,
        say=parts.say,
        command=None if directory is None else diagnose_command(directory.shown),
        alert=None if parts.alert is None else Alert(parts.alert),
        earlier=earlier,
    )


def _collect_for_cell(parts: RunComponents) -> None:
    """Let a notebook keep the records of all sessions of a run that has no directory."""
    from surefoot.tracking.notebook import Notebook
    from surefoot.tracking.run_records import RunRecords

    if isinstance(parts.console, Notebook) and parts.console.records is None:
        parts.console.records = RunRecords()
