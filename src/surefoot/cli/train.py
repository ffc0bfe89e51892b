"""`surefoot train RECIPE|FILE.py:build`: start a run, or resume it from its newest checkpoint."""

import atexit
import dataclasses
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.diagnose import AlertOption, alert_of
from surefoot.cli.options import ProgramOptions, without
from surefoot.cli.processes import Several, program_options, settled, start_several
from surefoot.cli.settings import program_settings
from surefoot.config.accepted_changes import change_names
from surefoot.config.paths import unusable_path
from surefoot.config.train_settings import TrainSettings
from surefoot.config.tree import flatten
from surefoot.distributed.environment import placed
from surefoot.errors import Command, ConfigError, Remedy, Setting, SurefootError
from surefoot.program import Program, build_run
from surefoot.tracking.commands import without_directory
from surefoot.tracking.numbered import choose_directory, free_directory, give_back, is_numbered

if TYPE_CHECKING:
    from surefoot.run.run import Run


@dataclass(frozen=True, kw_only=True)
class AcceptChange:
    """Program changes to accept on a resume."""

    accept_change: str | None = None
    """Resume although the program's loss, model, collate, data or optimizer has changed. Name one
    change, or several as "loss,data".
    """


@dataclass(frozen=True, kw_only=True)
class ChangesOption:
    """The option of a run that is to change on the way."""

    changes: str | None = None
    """Begin with the journal of another run, its changes.jsonl: the same settings change at the
    same steps.
    """


@dataclass(frozen=True, kw_only=True)
class Train(ChangesOption, AcceptChange, AlertOption, Several, ProgramOptions):
    """Train a run, or resume it if --run-dir holds its checkpoint. Recipes are
    gpt, translation, images and finetune. Every setting is a flag and a key of a
    TOML file: surefoot train gpt --help shows ten, and --help-all shows all. Flags
    override --config, --config overrides --preset, and --preset overrides defaults.
    Ctrl-C saves and stops; the same command resumes. In FILE.py, build() may take
    one dataclass argument; its fields become settings.

      surefoot train gpt --data.path my.txt --run-dir runs/mine
      surefoot train gpt --preset gpt2-124m --data.path shards/ --nproc 8
      surefoot train images --preset fashion-mnist --data.path DIR
    """


def train(arguments: list[str]) -> None:
    """Run `surefoot train`: start the run of a recipe or program."""
    program, options, flags = program_options(Train, arguments, verb="train")
    config, origins = program_settings(program, options, flags, verb="train")
    with ExitStack() as until_begun, whole_commands(arguments, config):
        if options.changes is not None:
            run_dir = getattr(config, "run_dir", None)
            until_begun.enter_context(_journal_of_another(Path(options.changes), run_dir))
        start(
            program,
            config,
            origins,
            flags,
            command=["train", *arguments],
            several=options,
            accepted=options.accept_change,
            alerts=options,
        )


@contextmanager
def _journal_of_another(file: Path, run_dir: str | Path | None) -> Iterator[None]:
    """Write the changes of another run's journal into a directory, in which no run has begun or
    which has them. They are removed if no run begins there. In a process of several, rank 0 does.
    """
    from surefoot.tracking.change_journal import CHANGES, append_changes, read_changes, read_journal
    from surefoot.train.changed_settings import described

    if run_dir is None or is_numbered(run_dir):
        raise ConfigError(
            "journal-without-directory",
            problem="--changes needs a directory of a run, with a fixed name",
            reason="only a setting run_dir of the program names one before it is executed",
            remedy=[
                Setting("run_dir", "DIR"),
                f"copy {file} to {CHANGES} in the new directory before the run begins",
            ],
            setting="run_dir",
        )
    if placed(os.environ).rank != 0:
        yield
        return
    try:
        changes = read_journal(file)
    except OSError as problem:
        raise unusable_path(file, problem, setting="changes") from problem
    directory = Path(run_dir)
    present = read_changes(directory)
    if present[: len(changes)] == changes:
        yield
        return
    if present or any(directory.glob("checkpoints/step-*")):
        raise ConfigError(
            "journal-of-begun-run",
            problem=f"a run has begun in {directory}, without the changes of {file}",
            remedy=[Setting("run_dir", str(free_directory(directory))), "leave out --changes"],
            setting="run_dir",
            value=str(directory),
        )
    directory.mkdir(parents=True, exist_ok=True)
    append_changes(directory, changes)
    for change in changes:
        print(described(change))
    try:
        yield
    finally:
        if not any(directory.glob("checkpoints/step-*")):
            (directory / CHANGES).unlink(missing_ok=True)


@contextmanager
def whole_commands(words: Sequence[str], config: Any) -> Iterator[None]:
    """Let an error that names a free directory name the whole command: `surefoot train` with
    `words`, in that directory. A setting of runs that the program does not take is named as its
    code would have it.
    """
    try:
        yield
    except SurefootError as problem:
        others = without_directory(without(words, ["alert", "alert_test"]))
        names = {field.name for field in dataclasses.fields(TrainSettings)}
        if config is not None:
            names -= flatten(config).keys()
        remedies: list[Remedy] = []
        for remedy in problem.remedies:
            known = _in_program(remedy, names)
            match known:
                case Setting(name="run_dir", value=str(directory)):
                    line = ["surefoot", "train", *others, "--run-dir", directory]
                    remedies.append(Command(shlex.join(line)))
                case _:
                    remedies.append(known)
        problem.remedies = tuple(remedies)
        raise


def _in_program(remedy: Remedy, names: Collection[str]) -> Remedy:
    """Return a remedy with the settings in `names` as keywords, because they are no flags here."""
    if isinstance(remedy, Setting) and remedy.name in names:
        return f"in the program: {remedy.as_keyword()}"
    if not isinstance(remedy, tuple):
        return remedy
    parts: list[str | Setting | Command] = []
    for part in remedy:
        if isinstance(part, Setting) and part.name in names:
            parts.append(part.as_keyword())
        else:
            parts.append(part)
    if tuple(parts) == remedy:
        return remedy
    return ("in the program,", *parts)


def in_numbered_directory(config: Any) -> tuple[Any, Path | None]:
    """Return the configuration with a number for {n} in run_dir, and the chosen directory; rank 0
    chooses it. Returns None for a fixed directory, and where the program's Run chooses. Collective.
    """
    run_dir = getattr(config, "run_dir", None)
    if not is_numbered(run_dir):
        return config, None
    if placed(os.environ).world_size == 1:
        directory = choose_directory(run_dir)
        atexit.register(give_back, directory.absolute())  # if nothing was written
    elif isinstance(config, TrainSettings):
        from surefoot.distributed.world import joined  # imports torch

        world = joined(config.device)
        chosen = None
        if world.is_main:
            chosen = str(choose_directory(run_dir))
        directory = Path(world.from_main(chosen))
    else:
        return config, None
    return dataclasses.replace(config, run_dir=str(directory)), directory


def start(
    program: Program,
    config: Any,
    origins: Mapping[str, str],
    flags: Sequence[str],
    *,
    command: list[str],
    several: Several,
    accepted: str | None,
    alerts: AlertOption,
    only: Path | None = None,
) -> None:
    """Build and train a run, or run `command` in several processes. `only` is the required
    directory of a resumed run.
    """
    if only is not None:
        program.refuse_changed_files(config, run=only, resuming=True)
    run_dir = getattr(config, "run_dir", None)
    alert_of(alerts, run=only or run_dir or Path())  # refused before anything is read
    program.check(config)
    accept_change = change_names(accepted)
    config, directory = in_numbered_directory(config)
    if directory is not None:
        command = [*without_directory(command), "--run-dir", str(directory)]
    start_several(
        command,
        settled(several, config),
        config=config,
        flags=flags,
        out=only,
        numbered=directory,
    )
    run = build_run(program, config, of=only)
    run.configuration = program.config_text(
        config or NoSettings(), origins, program.described | several.recorded()
    )
    if only is not None:
        _refuse_other_directory(run, only)
    if directory is not None and run.parts.directory is not None:
        run.parts.directory.numbered = str(run_dir)
    example = run.parts.example
    if example is None and {"predict", "Predict"} <= program.names.keys():
        example = "INPUT"
    run.parts = dataclasses.replace(
        run.parts,
        example=example,
        alert=alerts.alert,
        accept_change=(*run.parts.accept_change, *accept_change),
    )
    run.train()


def _refuse_other_directory(run: "Run", only: Path) -> None:
    directory = run.parts.directory
    if directory is not None and directory.path.resolve() == only.resolve():
        return
    now = "no directory" if directory is None else directory.shown
    raise ConfigError(
        "run-of-another-directory",
        problem=f"resuming {only}, but its program now has the run in {now}",
        reason="was run_dir changed, or is it relative to another directory?",
        setting="run_dir",
        value=str(now),
        path=only,
    )


@dataclass(frozen=True)
class NoSettings:
    """The configuration of a program without settings."""
