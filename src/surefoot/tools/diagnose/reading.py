"""The history of a run, read from its directory. Torch-free.

The newest checkpoint provides the settings, and config.toml adds further settings. Unreadable
records are skipped.
"""

from dataclasses import replace
from pathlib import Path

from surefoot.config.paths import run_path
from surefoot.config.setting_change import in_effect
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.run_settings import RunDescription, kinds_of_models
from surefoot.tracking.run_reader import (
    SessionEntry,
    is_run,
    missing_run,
    read_run,
    standing_of,
    unreadable_records,
)
from surefoot.tracking.run_records import RunRecords, records_of
from surefoot.train.recorded_settings import recorded_settings


def history_in(path: Path | str) -> History:
    """Read the history of the run in a directory; raise `ConfigError` if the directory has no
    run.
    """
    run = run_path(path, setting="path")
    if not is_run(run):
        raise missing_run(run, run.parent)
    records = RunRecords()
    file = run / "metrics.jsonl"
    if file.is_file():
        try:
            records = records_of(run)
        except OSError as problem:
            raise unreadable_records(file, problem) from problem
    return history_of(run, records)


def history_of(run: Path, records: RunRecords) -> History:
    """Return the history of a run in a directory whose records were read."""
    return History(description_of(run, records.last_step), records)


def description_of(run: Path, step: int = 0) -> RunDescription:
    """Return settings, kinds of models and progress of a run from its files alone; missing files
    leave None. `step` is the last one with a record.
    """
    files = read_run(run)
    config = files.config
    last_session = files.sessions[-1] if files.sessions else SessionEntry()
    description = RunDescription(
        identity=config.of_script,
        # a script has no flags, and its session says how many workers it had
        written={"workers": last_session.get("workers")} if config.script else config.flat,
        program=str(config.program.get("kind", "script")),
        standing=standing_of(run),
        name=str(run),
        processors=last_session.get("processors"),
        memory_bytes=last_session.get("memory_bytes"),
        saved_step=files.step,
        problems=files.problems,
    )
    state = files.state
    if state is None:  # no checkpoint can be read
        return description
    recorded = recorded_settings(files)
    step = max(step, files.step)
    course = recorded.known_course()
    length = None if course is None else course.length.steps
    description = replace(
        description,
        identity=state.identity,
        changes=tuple(each for each in in_effect(files.changes) if each.from_step <= step),
        in_force=recorded.at(step),
        planned_steps=length,
        goes_on=not state.stopped_early and files.step < (length or state.planned_steps),
        kinds=kinds_of_models(state.architecture),
        keeps_best=state.monitor is not None,
    )
    if state.watched is None:
        return description
    return replace(description, monitored=(state.watched["direction"], state.watched["score"]))
