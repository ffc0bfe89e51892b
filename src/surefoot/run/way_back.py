"""Changes of settings on record with which a run cannot go on: the line to type that takes them
back.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surefoot.checkpoint.module_state import OtherModelError
from surefoot.config.setting_change import SettingChange, began_since, in_effect
from surefoot.errors import Command, ConfigError, first_line
from surefoot.run.history import SettingsHistory
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.run_reader import newest_state
from surefoot.train.changed_settings import assignments

_OF_MODEL = "model."
_OF_PROGRAM = "changed-setting-differs"  # the program has another value than the journal


def name_way_back(problem: BaseException, shown: str | Path | None) -> None:
    """Let the error of a session name the line that takes back a change, if it is about a setting that
    changes at its start, and no saved step has had the change. `shown` is the run's directory.
    """
    if shown is None or not isinstance(problem, ConfigError | OtherModelError):
        return
    setting = problem.fields.get("setting")
    whole = str(setting).partition(".")[0]
    if isinstance(problem, OtherModelError) or setting == "model_settings":
        whole = "model"
    elif setting is None or problem.code == _OF_PROGRAM:
        return
    taking_back: list[str] = []
    for change in _changes_at_start(Path(shown)):
        if any(name.partition(".")[0] == whole for name in change.names):
            taking_back += assignments({change.setting: change.now}, {change.setting: change.was})
    if taking_back:
        line = f"surefoot change {shlex.quote(str(shown))} {shlex.join(taking_back)}"
        problem.remedies = (("to take its change back:", Command(line)),)


def _changes_at_start(run: Path) -> list[SettingChange]:
    """Return the changes that hold in the next step of a run, and in no saved step."""
    with suppress(Exception):  # the problem is another one
        step, state = newest_state(run)
        recorded = None if state is None else state.changes
        since = began_since(recorded, step, read_changes(run))
        return [change for change in since if change.from_step <= step]
    return []


@contextmanager
def naming_changed_model(history: SettingsHistory, *, step: int) -> Iterator[None]:
    """Let the error of a function that builds a model name the settings of the model that change at
    the present step.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as problem:
        names: set[str] = set()
        for change in in_effect(history.changes):
            if change.from_step == step:
                names |= {name for name in change.names if name.startswith(_OF_MODEL)}
        if not names:
            raise
        present = history.settings.model_settings or {}
        values = [f"{name} = {present[name.removeprefix(_OF_MODEL)]!r}" for name in sorted(names)]
        raise ConfigError(
            "changed-model-not-built",
            problem=f"no model can be built with {', '.join(values)}, from step {step} on",
            reason=f"{type(problem).__name__}: {first_line(problem)}",
            setting="model_settings",
            value=dict(present),
            step=step,
        ) from problem
