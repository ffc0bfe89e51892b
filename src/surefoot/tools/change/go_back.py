"""Going back of a saved run to an earlier step, from which it goes on in a new branch: a line of its
journal, and what the run leaves behind. Nothing of the run's author is executed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.checkpoint.state_json import SavedState
from surefoot.config.batch_size import batching
from surefoot.config.ramps import ramps_of
from surefoot.config.setting_change import SettingChange, going_back, in_effect, left_by
from surefoot.errors import CheckpointError, ConfigError, first_line
from surefoot.tools.change.change import changes_no_rate, plan_from, planned_before, write_lines
from surefoot.tracking.branches import BRANCHES, leave_branches
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.run_reader import is_running, newest_state
from surefoot.train.changed_settings import Wish, changes_of, described
from surefoot.train.recorded_settings import RecordedSettings, values_of_program, with_auto
from surefoot.train.skipped_steps import SKIP_STEPS, changes_of_skips, end_of_range


@dataclass(frozen=True)
class BackPlan:
    """What will go back, and is not yet written: lines of the journal, the one that goes back first
    if there is one, and lines of text about what they will do.
    """

    run: Path
    changes: list[SettingChange]
    lines: list[str]
    journal: tuple[SettingChange, ...]  # for which it was planned
    newest: int  # step of the newest checkpoint then

    def write(self) -> None:
        """Add the lines to the journal of the run, and move what it leaves behind. Raises
        `CheckpointError` if a file cannot be written, and `ConfigError` if the run trains or has
        gone on since this was planned.
        """
        from surefoot.tracking.run_directory import RunDirectory  # imports torch

        directory = RunDirectory(self.run)
        directory.open()
        try:
            is_as_planned = read_changes(self.run) == self.journal
            if not is_as_planned or newest_state(self.run)[0] != self.newest:
                raise planned_before(self.run, step=self.newest)
            write_lines(self.run, self.changes)
            leave_branches(self.run)
        finally:
            directory.close()


def plan_going_back(
    run: Path, step: int, wishes: Sequence[Wish] = (), *, because: str = ""
) -> BackPlan:
    """Return what makes a run go back to a step, and go on from there as the wishes say. Nothing is
    written.

    A run that is back at this step already, for the same reason and with these settings, does not
    go back again: so a command may be repeated. Raises `ConfigError` for a run that trains and for
    a step that it does not have, and `CheckpointError` if no checkpoint up to the step is intact.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(
            "from-step-not-a-step",
            problem=f"from_step = {step!r} is not a number of finished steps, from 0 on",
            setting="from_step",
            value=step,
        )
    if is_running(run):
        raise ConfigError(
            "going-back-of-training-run",
            problem=f"a process is training {run}",
            reason="its next checkpoint would be of steps that the run has left",
            remedy="stop it with Ctrl-C or SIGTERM, and go back then",
            run=str(run),
        )
    journal = read_changes(run)
    newest, state = newest_state(run)
    if state is not None and _is_back(run, step, wishes, journal, state=state, because=because):
        text = f"{run} is back at step {step} already, and goes on from step {newest}"
        return BackPlan(run, [], [text], journal, newest)
    if state is not None and step > newest:
        raise ConfigError(
            "from-step-ahead",
            problem=f"from_step = {step}, and the newest checkpoint of {run} is of step {newest}",
            remedy="go back to that step or an earlier one",
            setting="from_step",
            value=step,
            run=str(run),
            step=newest,
        )
    line = going_back(journal, was=newest, now=step, because=because)
    saved_step, saved = _checkpoint_up_to(run, step, (*journal, line))
    changes = [line, *_still_to_come(journal, step)]
    plan = plan_from(run, wishes, step=step, state=saved, earlier=(*journal, *changes))
    lines = [described(line) for line in changes]
    where = f"the run goes on from step-{saved_step:08d}"
    if saved_step < step:
        where += f", until step {step} with the settings that it had"
    lines.append(where)
    if step < newest:
        lines.append(
            f"the steps after {step} are kept in {run / BRANCHES / str(line.number)}; their"
            f" checkpoints, until the run has passed step {newest}"
        )
    return BackPlan(run, [*changes, *plan.changes], [*lines, *plan.lines], journal, newest)


def _still_to_come(journal: Sequence[SettingChange], step: int) -> list[SettingChange]:
    """Return what was to come of ramps, and of a range of skipped steps that had begun, when the run
    was at a step: it is written again behind the line that goes back, which supersedes it.
    """
    to_come = end_of_range(journal, step=step)
    then = [line for line in journal if line.from_step < step or ramps_of(line)]
    for line in in_effect(then):
        if line.from_step >= step and ramps_of(line):
            to_come.append(line)
    first_number = len(journal) + 2
    return [
        replace(line, number=number, when="", sha256="")
        for number, line in enumerate(to_come, start=first_number)
    ]


def _is_back(
    run: Path,
    step: int,
    wishes: Sequence[Wish],
    changes: tuple[SettingChange, ...],
    *,
    state: SavedState,
    because: str,
) -> bool:
    """Return True if the run has gone back to the step for the same reason, and has the wished
    settings from there on.
    """
    backs = [change for change in in_effect(changes) if change.goes_back]
    if not backs or (backs[-1].from_step, backs[-1].because) != (step, because):
        return False
    recorded = RecordedSettings(values_of_program(run, state.identity), changes, state.identity)
    present = recorded.at(step)
    micro_batch_size = present["micro_batch_size"] or state.identity["micro_batch_size"]
    sizes = batching(present["batch_size"], micro_batch_size)
    for wish in wishes:
        steps = state.planned_steps
        if wish.setting == SKIP_STEPS and changes_of_skips(
            wish.value, changes, step=step, steps=steps
        ):
            return False
    others = [wish for wish in with_auto(run, wishes) if wish.setting != SKIP_STEPS]
    other_changes = changes_of(present, others, from_step=step, sizes=sizes, earlier=changes)
    return not other_changes or changes_no_rate(recorded, other_changes, step=step)


def _checkpoint_up_to(
    run: Path, step: int, journal: Sequence[SettingChange]
) -> tuple[int, SavedState]:
    """Return the step and the state of the newest intact checkpoint up to a step, of those that the
    run has by its journal. Every byte is checked.
    """
    from surefoot.checkpoint.store import Store  # imports torch

    store = Store(run / "checkpoints")
    up_to = step
    reason = None
    while up_to >= 0:
        try:
            intact = store.newest_intact(up_to=up_to)
        except CheckpointError as problem:
            reason = first_line(problem)
            break
        if intact is None:
            break
        checkpoint, _ = intact
        if left_by(checkpoint.saved.changes, checkpoint.step, journal) is None:
            _refuse_dropped_rows(run, step, checkpoint.step, checkpoint.saved)
            return checkpoint.step, checkpoint.saved
        up_to = checkpoint.step - 1
    raise CheckpointError(
        "no-checkpoint-to-go-back-to",
        problem=f"no checkpoint of {run} is intact up to step {step}",
        reason=reason,
        run=str(run),
        step=step,
    )


def _refuse_dropped_rows(run: Path, step: int, saved_step: int, state: SavedState) -> None:
    """Raise `CheckpointError` if the tape of a stream has dropped rows that the run would need."""
    if state.tape is None:
        return
    from surefoot.data.streams.shards import Shards

    shards = Shards(run / "tape")
    shards.look()
    first = shards.first_kept()
    if first > int(state.tape["rows"]):
        raise CheckpointError(
            "rows-before-step-dropped",
            problem=f"{run} cannot go back to step {step}: its tape has dropped rows of the stream"
            f" behind step {saved_step}",
            reason=f"tape_size was too small for the rows before row {first}",
            remedy="go back to a later step",
            run=str(run),
            step=step,
            row=first,
        )
