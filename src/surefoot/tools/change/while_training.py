"""Changes of settings of a run that trains: by its own process, or at the request of another one.
Imports no torch.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from surefoot.config.setting_change import SettingChange, in_effect
from surefoot.errors import ConfigError, SurefootError, first_line
from surefoot.tools.change.change import plan_changes
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.change_request import end_request, request_changes, requested_changes
from surefoot.tracking.run_reader import is_running, newest_state, read_sessions
from surefoot.train.changed_settings import Wish, described
from surefoot.train.recorded_settings import settings_at

_POLL_S = 0.2


# --- in the process that trains -------------------------------------------------------------------


def change_settings(run: Path, wish: Wish, *, step: int) -> bool:
    """Add what a body wishes to the journal, from `step` finished steps on. Return False if the
    setting has the value already. Raises `ConfigError` if it has another one since the same step.
    """
    plan = plan_changes(run, [wish], step=step)
    made = {line.setting: line for line in in_effect(plan.earlier) if line.from_step == step}
    changes = []
    for change in plan.changes:
        line = made.get(change.setting)
        if line is None:
            changes.append(change)
            continue
        if (line.now, line.stretches) != (change.now, change.stretches):
            raise _changed_otherwise(line, change)
    return bool(replace(plan, changes=changes).write())


def _changed_otherwise(line: SettingChange, change: SettingChange) -> ConfigError:
    reason = "a body that is repeated changes what it changed the first time"
    if line.because:  # it may be of another body, of a command, or of a setting with several values
        reason = f"the reason of its line is: {line.because}"
    return ConfigError(
        "changed-otherwise-already",
        problem=f"{line.setting} is {line.now} from step {line.from_step} on by the journal, and"
        f" run.change() wants {change.now}",
        reason=reason,
        remedy="call run.change() with the same value, or in another step",
        setting=line.setting,
        value=change.now,
        step=line.from_step,
        because=line.because,
    )


def take_request(run: Path, *, step: int) -> str | None:
    """Add what another process has asked for to the journal, from `step` finished steps on. Return
    a line about a request that is refused, or None. The process waits until the request is ended.
    """
    try:
        wishes = [Wish(**values) for values in requested_changes(run)]
        if wishes:
            plan_changes(run, wishes, step=step).write()
        return None
    except (SurefootError, OSError, TypeError, ValueError) as problem:
        return f"a change of settings was asked for, and is refused: {first_line(problem)}"


# --- in another process ---------------------------------------------------------------------------


def ask_for_changes(run: Path, wishes: Sequence[Wish]) -> tuple[SettingChange, ...]:
    """Ask a run that trains for changes, wait until it has made them, and return them. If it ends
    before it takes them, they are made as those of a run that nobody trains.

    Raises `ConfigError` for what `plan_changes` refuses, for a run whose process cannot build it
    again, and for one that has refused them.
    """
    earlier = read_changes(run)
    if not request(run, wishes):
        return ()
    try:
        while requested_changes(run):
            if not is_running(run):
                if end_request(run):
                    return plan_changes(run, wishes).write()
                break
            time.sleep(_POLL_S)
    except BaseException:
        end_request(run)  # the user has no answer, so nothing is to happen
        raise
    changes = read_changes(run)[len(earlier) :]
    if not changes:
        raise ConfigError(
            "change-refused-by-run",
            problem=f"the process that trains {run} has refused the change",
            reason="its console says why",
            run=str(run),
        )
    return changes


def request(run: Path, wishes: Sequence[Wish]) -> bool:
    """Ask a run that trains for changes, and do not wait. Return False if its settings have the
    values already. Raises `ConfigError` as `ask_for_changes` does.
    """
    if not _takes_changes(run):
        raise ConfigError(
            "change-of-model-in-training",
            problem=f"a process is training {run}, and cannot build its model again",
            reason="the model was passed as an object",
            remedy="stop it with Ctrl-C or SIGTERM, change it, and resume it",
            run=str(run),
        )
    step, _ = newest_state(run)
    if not plan_changes(run, wishes, step=step).changes:
        return False
    request_changes(run, [asdict(wish) for wish in wishes])
    return True


def request_half_rates(run: Path) -> str:
    """Ask a run that trains for half of its learning rates, as a button of its page does, and
    return a line about it.
    """
    step, _ = newest_state(run)
    wishes = []
    lines = []
    for name, value in settings_at(run, step).items():
        if name.endswith("lr") and value is not None:
            wishes.append(Wish(name, value / 2, "rate x 0.5 on the page"))
            lines.append(f"{name} {value:g} -> {value / 2:g}")
    if not wishes:
        raise ConfigError(
            "run-without-rates-to-change",
            problem=f"{run} has no learning rate that its journal can name",
            reason="its program builds the optimizer",
            run=str(run),
        )
    request(run, wishes)
    return f"{', '.join(lines)} is asked for, from the next record on"


def _takes_changes(run: Path) -> bool:
    with suppress(OSError, ValueError, LookupError):
        return bool(read_sessions(run)[-1]["takes_changes"])
    return False


def answer(run: Path, changes: Sequence[SettingChange]) -> list[str]:
    """Return lines about changes that a run has made while it trains."""
    if not changes:
        return [f"{run} has these values already: nothing changes"]
    return [described(change) for change in changes]
