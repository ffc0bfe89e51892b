"""The shell commands that resume, replay, diagnose or repeat a run."""

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from surefoot.tracking.change_journal import CHANGES
from surefoot.tracking.run_reader import RunFiles, SessionEntry

# program names of an interactive session or a notebook
_TYPED_IN = {"", "-", "-c", "ipykernel_launcher.py", "colab_kernel_launcher.py"}
_SCRIPT = '# in the script that builds the run:\nprint(sf.load(run).evaluate(checkpoint="best"))'


def resume_command(directory: Path, *, numbered: str | None = None, stops: bool = False) -> str:
    """Return the command that resumes a run, or a sentence if no command can restart the code of
    the run. `numbered` is the run_dir with {n} for which the same code would choose another number.
    `stops`: this session has a `stop_after`, where the same code would stop again.
    """
    if by_command():
        return f"{typed(Path(sys.argv[0]))} resume {shlex.quote(str(directory))}"
    words = without_flag(sys.orig_argv[1:], "stop_after")  # sys.argv omits the interpreter's -m
    stops_in_code = stops and words == sys.orig_argv[1:]
    remark = ", without stop_after" if stops_in_code else ""
    if numbered is not None:
        with_number = [word.replace(numbered, str(directory)) for word in words]
        if with_number == words:
            return f'the same code, with run_dir="{directory}"{remark}'
        words = with_number
    elif Path(sys.argv[0]).name in _TYPED_IN:
        return f"the same code again{remark}"
    command = f"{typed(Path(sys.executable), 'python')} {shlex.join(words)}"
    return f"{command}  # without stop_after" if stops_in_code else command


def replay_command(directory: Path, step: int) -> str:
    """Return what a user can type, in a shell or in a script, to replay a step."""
    if by_command():
        return f"{typed(Path(sys.argv[0]))} replay {shlex.quote(str(directory))} --step {step}"
    return f"print(sf.load(run).replay({step})) in the code that builds the run, instead of training it"


def diagnose_command(directory: Path) -> str:
    """Return the shell command that diagnoses a run, as this installation is called."""
    program = Path(sys.argv[0]) if by_command() else Path(sys.executable).with_name("surefoot")
    return f"{typed(program)} diagnose {shlex.quote(str(directory))}"


def script_command(run: Path, words: list[str]) -> str:
    """Return the recorded command of a script as it works from here: with its directory and this
    interpreter.
    """
    from surefoot.tracking.run_directory import directory_of_start  # which imports torch

    if words[:1] == ["python"] and shutil.which("python") != sys.executable:
        words = [sys.executable, *words[1:]]
    command = shlex.join(words)
    started_in = directory_of_start(run)
    if started_in is None or started_in == str(Path.cwd()):
        return command
    return f"cd {shlex.quote(started_in)} && {command}"


def typed(program: Path, name: str | None = None) -> str:
    """Return a program as command-line text: its name if the shell finds the name, else its
    relative path.
    """
    name = name or program.name
    file = program.absolute()
    if not file.is_file():
        return name
    on_path = Path(shutil.which(name) or "")
    if on_path.resolve() == program.resolve() and on_path.parent == file.parent:
        return name
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return shlex.quote(str(file))


def by_command() -> bool:
    """Return True if this process is the command `surefoot`, and not a user's script."""
    return Path(sys.argv[0]).name == "surefoot"


def commands(run: RunFiles, *, finished: bool) -> dict[str, str]:
    """Return the shell commands for a run by purpose, or {} if the first command of the run is
    unknown.
    """
    if not run.sessions or not run.sessions[0].get("command"):
        return {}
    first = run.sessions[0]
    last = run.sessions[-1]
    # a session's stop_after is no part of the run
    first_command = without_flag(first["command"], "stop_after")
    last_command = without_flag(last.get("command") or first_command, "stop_after")
    path = shlex.quote(str(run.path))
    is_of_subcommand = first_command[0] == "surefoot" and not run.config.script
    again = first_command if "numbered" in first else _without_out(first_command)
    if run.changes:
        again = without_flag(again, "changes")
    texts = {"Train it again": _with_place(_with_journal(_again(again), run, again), first)}
    if not finished and is_of_subcommand:
        texts["Continue from the newest checkpoint"] = f"surefoot resume {path}"
    elif not finished:
        resume = _with_place(_resume_line(last_command, last, run.path), last)
        texts["Continue from the newest checkpoint"] = resume
    if is_of_subcommand:
        texts["Evaluate it again"] = f"surefoot evaluate {path} --checkpoint best"
    elif run.config.script:
        texts["Evaluate it again"] = _SCRIPT
    return texts


def _again(words: list[str]) -> str:
    if words[0] in _TYPED_IN:
        return "# an interactive session or a notebook: run the same code again"
    if words[0].endswith(".py"):
        words = ["python", *words]
    return shlex.join(words)


def _with_journal(line: str, run: RunFiles, words: list[str]) -> str:
    """Return the command of a run with which its settings change at the same steps."""
    if not run.changes:
        return line
    journal = shlex.quote(str((run.path / CHANGES).absolute()))
    if words[0] == "surefoot":
        return f"{line} --changes {journal}"
    return f"# first copy {journal} into its new run_dir\n{line}"


def _resume_line(words: list[str], session: SessionEntry, run: Path) -> str:
    """Return the command that continues a script's run. Unchanged, one with {n} in its run_dir
    would begin another run.
    """
    numbered = session.get("numbered")
    if numbered is None:
        return _again(words)
    with_number = [word.replace(numbered, str(run)) for word in words]
    if with_number != words:
        return _again(with_number)
    return f'{_again(words)}  # with run_dir="{run}"'


def _without_out(words: list[str]) -> list[str]:
    # the original run directory would resume the run
    if words[0] != "surefoot" or without_directory(words) == words:
        return words
    return [*without_directory(words), "--run-dir", "DIR"]


def without_directory(words: Sequence[str]) -> list[str]:
    """Return the words of a command without --run-dir and its value."""
    return without_flag(words, "run_dir")


def without_flag(words: Sequence[str], name: str) -> list[str]:
    """Return the words of a command without a flag and its value.

    >>> without_flag(["gpt", "--run-dir", "runs/a", "--seed", "1", "--run_dir=b"], "run_dir")
    ['gpt', '--seed', '1']
    """
    kept = []
    is_value = False
    for word in words:
        flag, equals, _ = word.partition("=")
        is_flag = flag.startswith("--") and flag[2:].replace("-", "_") == name
        if not is_flag and not is_value:
            kept.append(word)
        is_value = is_flag and not equals
    return kept


def _with_place(line: str, session: SessionEntry) -> str:
    lines = []
    directory = session.get("directory")
    if directory:
        lines.append(f"cd {shlex.quote(directory)}")
    commit = session.get("git_commit")
    if commit and re.fullmatch(r"[0-9a-f]{7,64}", commit):
        lines.append(f"git checkout {commit}  # if HEAD differs")
    return "\n".join([*lines, line])
