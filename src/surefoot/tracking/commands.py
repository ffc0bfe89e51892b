"""What a run says in words: its header, its end, how it is to be gone on with, why it diverged."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.tracking.run_directory import RunDirectory  # imports torch
    from surefoot.tracking.run_reader import RunFiles


def resume_command(directory: RunDirectory) -> str:
    """What to type to go on with the run in a directory; for code that no command can start again, just that."""
    if by_command():
        return f"{typed(Path(sys.argv[0]))} resume {shlex.quote(str(directory.path))}"
    program = Path(sys.argv[0]).name
    if program in ("", "-", "-c", "ipykernel_launcher.py"):  # typed in, or a notebook
        return "the same code again"
    interpreter = typed(Path(sys.executable), "python")
    return f"{interpreter} {shlex.join(sys.orig_argv[1:])}"  # unlike sys.argv it has the interpreter's -m


def replay_command(directory: RunDirectory, step: int) -> str:
    """What to type to have a step made again and shown."""
    if by_command():
        return f"{typed(Path(sys.argv[0]))} replay {shlex.quote(str(directory.path))} --step {step}"
    return f"print(surefoot.load(run).replay({step})) where this run is built, in place of training it"


def diagnose_command(directory: RunDirectory) -> str:
    """What to type to have what is wrong with a run explained."""
    command = typed(Path(sys.argv[0]) if by_command() else Path(sys.executable).with_name("surefoot"))
    return f"{command} diagnose {shlex.quote(str(directory.path))}"


def typed(program: Path, name: str | None = None) -> str:
    """What to type for a program: its name where that finds it, else its path from here."""
    found = shutil.which(name or program.name)
    if (
        found is not None
        and Path(found).resolve() == program.resolve()
        and Path(found).parent == program.absolute().parent
    ):
        return name or program.name
    here = program.absolute()
    if not here.is_file():
        return name or program.name
    return shlex.quote(str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here))


def by_command() -> bool:
    """Whether this process is the command `surefoot`, and no script."""
    return Path(sys.argv[0]).name == "surefoot"


_TYPED_IN = {"", "-", "-c", "ipykernel_launcher.py"}


@dataclass(frozen=True)
class Command:
    """What a command is for, and the lines to type."""

    what: str
    lines: str


def commands(run: RunFiles, *, finished: bool) -> list[Command]:
    """The commands that work for a run; none if no file says how it was made."""
    first = run.sessions[0] if run.sessions else {}
    began = _words(first.get("command"))
    path = shlex.quote(str(run.path))
    found = []
    if began:
        found.append(Command("Make it again", _with_place(_again(began), first)))
    by_verb = bool(began) and began[0] == "surefoot" and not run.config.script
    if not finished:
        if by_verb:
            found.append(Command("Go on from the newest checkpoint", f"surefoot resume {path}"))
        elif began:
            last = run.sessions[-1]
            again = _again(_words(last.get("command")) or began)
            found.append(Command("Go on from the newest checkpoint", _with_place(again, last)))
    if by_verb:
        found.append(Command("Score it again", f"surefoot evaluate {path} --checkpoint best"))
    return found


def _again(words: list[str]) -> str:
    """The command of a first start, as it is typed."""
    if words[0] in _TYPED_IN:
        return "# typed in, or a notebook: the same code again"
    if words[0] == "surefoot":
        return shlex.join(_without_out(words))
    return shlex.join(["python", *words] if words[0].endswith(".py") else words)


def _without_out(words: list[str]) -> list[str]:
    """The same into another directory: where the run's own is, it would go on with that."""
    found, skip = list[str](), False
    for word in words:
        if not skip and not re.fullmatch(r"--out(=.*)?", word):
            found.append(word)
        skip = word == "--out"
    return [*found, "--out", "DIR"] if len(found) < len(words) else found


def _with_place(line: str, sitting: object) -> str:
    """A command with the directory and the commit that it was given in."""
    held = sitting if isinstance(sitting, dict) else {}
    directory, commit = held.get("directory"), held.get("git_commit")
    lines = [f"cd {shlex.quote(str(directory))}"] if isinstance(directory, str) and directory else []
    if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{7,64}", commit):
        lines.append(f"git checkout {commit}  # where it is another")
    return "\n".join([*lines, line])


def _words(held: object) -> list[str]:
    return [str(word) for word in held] if isinstance(held, list) and held else []
