"""`surefoot change RUN SETTING=VALUE`: change settings of a run that goes on. Imports no torch."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from surefoot.cli.options import RunOption, by_flag, find_run, only_options, target
from surefoot.distributed.environment import placed
from surefoot.errors import ConfigError, Remedy, Setting
from surefoot.tracking.run_reader import is_running, newest_state


@dataclass(frozen=True, kw_only=True)
class BecauseOption:
    """The reason for changes."""

    because: str = ""
    """Why: the reason stands in the journal beside the change."""


@dataclass(frozen=True, kw_only=True)
class Change(BecauseOption, RunOption):
    """Change settings of a run from its newest checkpoint on: its length, batch
    size, clipping, precision, learning rate, weight decay and other numbers of its
    optimizer, its schedule, its average, its dropout, its frozen parameters, its
    data, the weights of a mixture of data sets, or its rules for stopping. Each
    change is a line of changes.jsonl in the run's directory, with the reason, and
    holds from the next step on; the steps before keep their settings. config.toml
    and your program stay as they are. Nothing is trained: surefoot resume goes on,
    or your script. A process that trains the run makes the change at its next
    record, and the answer names the step. What the change does is printed before
    it is written.

    skip_steps=400..420 passes over steps that are to come, both included.

    In an order that cuts whole epochs into steps, such as lanes or batches in
    tokens, another batch size holds from the next epoch on.

      surefoot change latest optimizer.lr=1e-4 --because "the loss spikes"
      surefoot change runs/mine length="30 epochs" batch_size=128
      surefoot change runs/mine schedule.name=wsd schedule.cooldown=10%
      surefoot change runs/mine data="next epoch" --because "more pictures"
      surefoot change runs/mine --from-step 1000 optimizer.lr=1e-4
    """

    from_step: int | None = None
    """Go back to the state after so many steps first, as surefoot resume --from-step does. Changes
    from that step on hold no longer, and no SETTING=VALUE is needed."""
    dry_run: bool = False
    """Print what the change would do, and write nothing."""


def change(arguments: list[str]) -> None:
    """Run `surefoot change`: append changes to the journal of a run."""
    name = target(Change, arguments, verb="change")
    (_, words), *flags = by_flag(arguments)
    assignments = words[1:]
    only_run = [name, *chain.from_iterable(group for _, group in flags)]
    options = only_options(Change, only_run, verb="change")
    run = find_run(options.run)
    if options.from_step is not None:
        go_back(
            run,
            options.from_step,
            assignments,
            because=options.because,
            writes=not options.dry_run,
        )
        return
    if not assignments:
        raise ConfigError(
            "change-without-setting",
            problem="which setting is to change?",
            remedy="write SETTING=VALUE, such as optimizer.lr=1e-4",
        )
    if is_running(run) and not options.dry_run:
        from surefoot.tools.change.change import wish_of
        from surefoot.tools.change.while_training import answer, ask_for_changes

        with naming_assignments():
            wishes = [wish_of(text, because=options.because) for text in assignments]
            changes = ask_for_changes(run, wishes)
        for line in answer(run, changes):
            print(line)
        return
    make_changes(run, assignments, because=options.because, writes=not options.dry_run)


@contextmanager
def naming_assignments() -> Iterator[None]:
    """Let an error name settings as SETTING=VALUE, as far as they can change."""
    try:
        yield
    except ConfigError as problem:
        problem.remedies = tuple(_as_assignment(remedy) for remedy in problem.remedies)
        raise


def _as_assignment(remedy: Remedy) -> Remedy:
    from surefoot.train.changed_settings import can_change, in_words

    if not isinstance(remedy, Setting) or not can_change(remedy.name):
        return remedy
    return (f"{remedy.name}={shlex.quote(in_words(remedy.value))}",)


def make_changes(
    run: Path, assignments: Sequence[str], *, because: str, writes: bool = True
) -> None:
    """Print what changes do to a run, and write them into its journal. In a process of several,
    rank 0 does.
    """
    from surefoot.tools.change.change import plan_changes, wish_of

    if placed(os.environ).rank != 0:
        return
    step = None
    if not writes and is_running(run):
        step, _ = newest_state(run)
    with naming_assignments():
        wishes = [wish_of(text, because=because) for text in assignments]
        plan = plan_changes(run, wishes, step=step)
    for line in plan.lines:
        print(line)
    if not plan.changes:
        print(f"{run} has these values already: nothing changes")
    elif writes:
        plan.write()


def go_back(
    run: Path, step: int, assignments: Sequence[str], *, because: str, writes: bool = True
) -> None:
    """Print what going back to a step does to a run, with changes from there on, and do it. In a
    process of several, rank 0 does.
    """
    from surefoot.tools.change.change import wish_of
    from surefoot.tools.change.go_back import plan_going_back

    if placed(os.environ).rank != 0:
        return
    with naming_assignments():
        wishes = [wish_of(text, because=because) for text in assignments]
        plan = plan_going_back(run, step, wishes, because=because)
    for line in plan.lines:
        print(line)
    if writes:
        plan.write()
