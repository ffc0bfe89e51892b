"""`surefoot resume RUN`: resume a run from its newest intact checkpoint."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import UseAppendAction

from surefoot.cli.change import BecauseOption, go_back, make_changes
from surefoot.cli.diagnose import AlertOption
from surefoot.cli.options import (
    RunOption,
    by_flag,
    find_run,
    flag_text,
    not_of,
    target,
    verb_options,
    without,
)
from surefoot.cli.processes import Several, among_settings, as_before
from surefoot.cli.settings import read_settings
from surefoot.cli.train import AcceptChange, start, whole_commands
from surefoot.config import toml
from surefoot.config.paths import file_text
from surefoot.config.setting import names_of
from surefoot.config.train_settings import TrainSettings
from surefoot.errors import Command, ConfigError
from surefoot.program import read_program
from surefoot.tracking.run_reader import read_sessions
from surefoot.train.skipped_steps import SKIP_STEPS


@dataclass(frozen=True, kw_only=True)
class Resume(BecauseOption, AcceptChange, AlertOption, Several, RunOption):
    """Resume a run from its newest intact checkpoint, with the same bits as if it had
    never stopped. Settings that do not affect results may change: --workers,
    --log-every, --save-every, --keep-last, --stop-after, --time-limit,
    --max-restarts. --change SETTING=VALUE changes one that does, on record, as
    surefoot change does; --length X is --change length=X. --from-step N goes back
    to an earlier step first. With another --nproc or --parallel, the samples and
    their order are the same, and results are equal up to rounding.

      surefoot resume latest
      surefoot resume runs/mine --time-limit "2 h"
      surefoot resume runs/mine --change optimizer.lr=1e-4 --because "it spikes"
      surefoot resume runs/mine --from-step 1000 --change optimizer.lr=1e-4
    """

    change: UseAppendAction[tuple[str, ...]] = ()
    """Change a setting from here on: SETTING=VALUE. Repeat the flag for several."""
    skip_steps: str | None = None
    """Pass over steps, such as 400..420, both included, as records number them: no data are read and
    nothing is updated, and the index and the schedule go on. On record, as --change is."""
    from_step: int | None = None
    """Go back to the state after so many steps, and go on from there. Changes of settings from that
    step on hold no longer. The steps after it are kept until the run has passed them."""


def resume(arguments: list[str]) -> None:
    """Run `surefoot resume`: continue a run from its newest intact checkpoint."""
    run = find_run(target(Resume, arguments, verb="resume"))
    with _naming_changes_of_script(run, arguments):
        program, in_file = read_program(run, resuming=True)
    if not (run / "checkpoints").is_dir():
        from surefoot.checkpoint.store import without_checkpoint

        raise without_checkpoint(run)
    options, flags = verb_options(
        Resume, arguments, verb="resume", but=among_settings(program), help_goes_on=True
    )
    assignments = list(options.change)
    skipped = flag_text(arguments, SKIP_STEPS)  # "None" is a value here
    if skipped is not None:
        assignments.append(f"{SKIP_STEPS}={skipped}")
    length = flag_text(flags, "length")
    if length is not None:
        assignments.append(f"length={length}")
        flags = without(flags, ["length"])
    is_of_recipe = program.config is not None and issubclass(program.config, TrainSettings)
    if is_of_recipe:
        for name in ("preset", "init_from"):
            if flag_text(flags, name) is not None:
                raise not_of(name, "new runs", run)
    one_session = names_of(TrainSettings, "one_session")
    saved = {name: value for name, value in in_file.items() if name not in one_session}
    if is_of_recipe or "run_dir" in saved:
        saved["run_dir"] = str(run)
    config, origins = read_settings(
        program, [("file", saved)], flags, verb="resume RUN", option_classes=[Resume]
    )
    if options.from_step is not None:
        go_back(run, options.from_step, assignments, because=options.because)
    elif assignments:
        make_changes(run, assignments, because=options.because)
    text = file_text(run / "config.toml")
    # what config.toml says keeps the origin that it had
    earlier_origins = toml.origins(text)
    for name, origin in origins.items():
        if origin == "file":
            origins[name] = earlier_origins.get(name, origin)
    with whole_commands([*_beginning(run, but=flags), *flags], config):
        start(
            program,
            config,
            origins,
            flags,
            command=["resume", *arguments],
            several=as_before(options, arguments, toml.program(text)),
            accepted=options.accept_change,
            alerts=options,
            only=run,
        )


@contextmanager
def _naming_changes_of_script(run: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Let the refusal of a script's run first name the command that changes it as the arguments
    say.
    """
    try:
        yield
    except ConfigError as problem:
        if problem.code == "run-of-script":
            problem.remedies = (*_before_script(run, arguments), *problem.remedies)
        raise


def _before_script(run: Path, arguments: Sequence[str]) -> list[Command]:
    """Return the command that does what the arguments want with a run of a script, before the script
    is started again.
    """
    assignments: list[str] = []
    for flag, (typed, *words) in by_flag(arguments)[1:]:
        _, equals, value = typed.partition("=")
        values = [value] if equals else words
        if flag == "change":
            assignments += values
        elif flag in (SKIP_STEPS, "length"):
            assignments.append(f"{flag}={' '.join(values)}")
    line = ["surefoot", "change", str(run), *assignments]
    for name in ("from_step", "because"):
        text = flag_text(arguments, name)
        if text:
            line += [f"--{name.replace('_', '-')}", text]
    if not assignments and "--from-step" not in line:
        return []
    return [Command(shlex.join(line))]


def _beginning(run: Path, *, but: Sequence[str]) -> list[str]:
    """Return the words behind `surefoot train` that began a run, without the flags in `but`, and
    without the stop of its first session.
    """
    try:
        command = read_sessions(run)[0]["command"]
    except (OSError, ValueError, LookupError):
        command = []
    if command[:2] != ["surefoot", "train"]:
        return ["..."]
    return without(command[2:], ["stop_after", *(name for name, _ in by_flag(but) if name)])
