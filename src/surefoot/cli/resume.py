"""`surefoot resume RUN`: resume a run from its newest intact checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from surefoot.program import read_program
from surefoot.tracking.run_reader import read_sessions


@dataclass(frozen=True, kw_only=True)
class Resume(AcceptChange, AlertOption, Several, RunOption):
    """Resume a run from its newest intact checkpoint, with the same bits as if it had
    never stopped. Settings that do not affect results may change: --workers,
    --log-every, --save-every, --keep-last, --stop-after, --time-limit,
    --max-restarts. --length may change if the schedule allows it. With another
    --nproc or --parallel, the samples and their order are the same, and results
    are equal up to rounding.

      surefoot resume latest
      surefoot resume runs/mine --time-limit "2 h"
    """


def resume(arguments: list[str]) -> None:
    """Run `surefoot resume`: continue a run from its newest intact checkpoint."""
    run = find_run(target(Resume, arguments, verb="resume"))
    program, before = read_program(run, resuming=True)
    if not (run / "checkpoints").is_dir():
        from surefoot.checkpoint.store import without_checkpoint

        raise without_checkpoint(run)
    options, flags = verb_options(
        Resume, arguments, verb="resume", but=among_settings(program), help_goes_on=True
    )
    of_recipes = (
        ("preset", "init_from")
        if program.config is not None and issubclass(program.config, TrainSettings)
        else ()
    )
    for name in of_recipes:
        if flag_text(flags, name) is not None:
            raise not_of(name, "new runs", run)
    saved = {
        name: value
        for name, value in before.items()
        if name not in names_of(TrainSettings, "one_session")
    }
    saved |= {"run_dir": str(run)} if "run_dir" in saved or of_recipes else {}
    config, origins = read_settings(
        program, [("file", saved)], flags, verb="resume RUN", own=[Resume]
    )
    text = file_text(run / "config.toml")
    before = toml.origins(text)
    with whole_commands([*_beginning(run, but=flags), *flags], config):
        start(
            program,
            config,
            {
                name: before.get(name, origin) if origin == "file" else origin
                for name, origin in origins.items()
            },
            flags,
            command=["resume", *arguments],
            several=as_before(options, arguments, toml.program(text)),
            accepted=options.accept_change,
            alerts=options,
            only=run,
        )


def _beginning(run: Path, *, but: Sequence[str]) -> list[str]:
    """Return the words behind `surefoot train` that began a run, without the flags in `but`."""
    try:
        command = read_sessions(run)[0]["command"]
    except (OSError, ValueError, LookupError):
        command = []
    if command[:2] != ["surefoot", "train"]:
        return ["..."]
    return without(command[2:], [name for name, _ in by_flag(but) if name])
