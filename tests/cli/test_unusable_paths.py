"""No path that the system does not let us look at ends a command in a traceback.

One process trains a small run, becomes another user, and calls every subcommand with every kind of
path: of another user, of a name with 300 letters, of links that lead to each other, and empty.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.cli.main import VERBS, main
from waiting import HANG_S
from written_runs import falling, written

SMALL = (
    "--model.layers 1 --model.width 16 --model.heads 1 --model.context 16"
    " --batch-size 2 --sample-tokens 0 --report False --length 1steps"
)
GPT = f"gpt --data.path text.txt --data.tokenizer bytes {SMALL}"
COMMANDS = [
    f"train gpt --data.path PATH --run-dir new {SMALL}",
    f"train {GPT} --run-dir PATH",
    f"train gpt --data.path text.txt --data.tokenizer PATH --run-dir new {SMALL}",
    f"train {GPT} --run-dir new --init-from PATH",
    f"train {GPT} --multiple-choice a=PATH --run-dir new",
    "train gpt --config PATH",
    "train images --data.path PATH --run-dir new",
    "train images --model.name PATH/net.py:build --run-dir new",
    "train translation --data.path PATH --run-dir new",
    "train PATH/program.py:build",
    "plan gpt --data.path PATH",
    "plan images --data.path PATH",
    "plan --schedules linear --out PATH",
    f"find-lr gpt --data.path PATH {SMALL}",
    "find-lr PATH",
    f"find-lr {GPT} --steps 10 --out PATH",
    f"find-batch-size gpt --data.path PATH {SMALL}",
    "find-batch-size PATH",
    f"profile gpt --data.path PATH {SMALL}",
    f"profile {GPT} --out PATH",
    "resume PATH",
    "change PATH clip=off",
    f"submit {GPT} --hours 1 --logs PATH",
    "evaluate PATH",
    "evaluate run --data.path PATH",
    "evaluate run --questions a=PATH",
    "predict PATH text",
    "predict run --file PATH",
    f"compare {GPT} --vary seed=1,2 --out PATH",
    "compare PATH run",
    "compare PATH",
    "diagnose PATH",
    "report PATH",
    "report run --out PATH",
    "report --watch PATH missing",
    "replay PATH --step 0",
    "verify PATH",
    "export PATH",
    "export run --out PATH",
    "data prepare PATH text.txt --tokenizer bytes",
    "data prepare new PATH --tokenizer bytes",
    "data prepare new text.txt --tokenizer PATH",
    "data look PATH",
]
PARTS = ("config.toml", "metrics.jsonl", "environment.json", "checkpoints")  # of a run
PERMISSIONS = {
    "a directory of another user": "closed",
    "below a directory of another user": "closed/below",
    "a file of another user": "closed.txt",
    "a file to make in a directory of another user": "kept/out",
}
CLOSED_PARTS = {f"a run with a closed {part}": f"run-{part}" for part in PARTS}
OF_RUNS = ("resume", "evaluate", "diagnose", "report", "verify", "export")
KINDS = {
    "300 letters": "x" * 300,
    "a loop of links": "loop",
    "nothing": "",
}
# names that cannot be printed in a line and written to files, of runs and of what is made of them
NAMES = ("a\x1b[31m", "a\nb", os.fsdecode(b"a\xff"))
OF_NAMES = [
    f"train {GPT} --run-dir PATH",
    f"compare {GPT} --vary seed=1,2 --out PATH",
    f"submit {GPT} --hours 1 --logs PATH",
    f"find-lr {GPT} --steps 10 --out PATH",
    f"profile {GPT} --out PATH",
    *(f"{verb} PATH" for verb in (*OF_RUNS, "compare", "find-lr")),
    *("predict PATH text", "replay PATH --step 0", "compare PATH run", "report --watch PATH run"),
    *("report run --out PATH", "export run --out PATH"),
]
NOT_IMPORTED = -1  # where another user may not read Python's own files
Answers = dict[str, tuple[int, str]]
CHILD = """
import json, os, sys
sys.path[:0] = sys.argv[1:]
from test_unusable_paths import calls
print(json.dumps(calls()))
"""


def calls() -> Answers:
    """Call every subcommand in this process; return the exit status and the end of what it says."""
    call(f"train {GPT} --run-dir run")
    answers = answers_to(
        COMMANDS, KINDS
    )  # first, because another user may not read Python's own files
    shutil.rmtree("new", ignore_errors=True)
    for part in PARTS:
        shutil.copytree("run", f"run-{part}")
        os.chmod(f"run-{part}/{part}", 0)
    for name in ("closed", "closed.txt", "texts/closed"):
        os.chmod(name, 0)
    os.chmod("kept", 0o555)
    os.chmod(".", 0o777)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    answers |= answers_to(COMMANDS, PERMISSIONS)
    of_runs = [f"{verb} PATH" for verb in OF_RUNS]
    return answers | answers_to(
        [*of_runs, "predict PATH text", "replay PATH --step 0"], CLOSED_PARTS
    )


def answers_to(commands: list[str], kinds: dict[str, str]) -> Answers:
    return {
        f"{command} ({kind})": call(command, path)
        for command in commands
        for kind, path in kinds.items()
    }


def call(command: str, path: str = "") -> tuple[int, str]:
    words = [word.replace("PATH", path) for word in command.split()]
    words = [word.replace("1steps", "1 steps") for word in words]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as end:
            return int(str(end.code or 0)), said.getvalue()[-600:]
        except Exception as problem:
            causes = [problem, problem.__cause__, problem.__context__]
            if any(isinstance(cause, ImportError) for cause in causes):
                return NOT_IMPORTED, str(problem)
            return 1, "".join(traceback.format_exception(problem)[-4:])
    return 0, said.getvalue()[-600:]


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    with tempfile.TemporaryDirectory() as place:  # pytest's own is closed to other users
        here = Path(place)
        (here / "text.txt").write_text("hello there\n" * 200)
        (here / "a.toml").write_text("[one]\nname = 'linear'\n")
        (here / "closed").mkdir()
        (here / "kept").mkdir()
        (here / "texts" / "closed").mkdir(parents=True)
        (here / "texts" / "a.txt").write_text("hello\n" * 200)
        (here / "closed.txt").write_text("hello\n")
        (here / "loop").symlink_to("back")
        (here / "back").symlink_to("loop")
        child = subprocess.run(
            [sys.executable, "-c", CHILD, *map(str, Path(__file__).parents[:2])],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=HANG_S,
            env=dict(os.environ, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(here / "cache")),
        )
        assert child.returncode == 0, child.stderr
        yield json.loads(child.stdout.splitlines()[-1])


def test_every_subcommand_is_called() -> None:
    called = {command.split()[0] for command in COMMANDS}
    assert called == {*VERBS} - {"completion"}


@pytest.mark.slow
def test_a_path_that_no_user_can_use_is_refused_by_name(answers: Answers) -> None:
    for command in COMMANDS:
        for kind in KINDS:
            status, said = answers[f"{command} ({kind})"]
            is_empty = kind == "nothing"
            if is_empty and "PATH" not in command.split():  # NAME=, or a file of the root directory
                code = "error: "
            else:
                code = "[path-empty]" if is_empty else "[path-not-usable]"
            assert status in (2, 3, 4), (command, kind, said)
            assert code in said, (command, kind, said)


@pytest.mark.parametrize("command", OF_NAMES)
def test_a_name_that_cannot_be_printed_is_refused_in_a_clean_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    Path("text.txt").write_text("hello there\n" * 200)
    written(tmp_path / "run", falling(20), config="seed = 0\n")
    for name in NAMES:
        status, said = call(command, name)
        assert (status, "[path-not-printable]" in said) == (2, True), (name, said)
        assert name not in said
        assert len(said.splitlines()) == 4  # problem, reason, cure and code
    assert sorted(os.listdir()) == ["run", "text.txt"]


@pytest.mark.slow
def test_a_path_of_another_user_ends_in_an_error_without_a_traceback(answers: Answers) -> None:
    for called, (status, said) in answers.items():
        assert status != 1, (called, said)
        assert "Traceback" not in said, (called, said)
    for command in COMMANDS:
        for kind in PERMISSIONS:
            status, said = answers[f"{command} ({kind})"]
            assert status in (2, 3, 4, NOT_IMPORTED), (command, kind, said)
            if kind == "below a directory of another user" and status != NOT_IMPORTED:
                assert "[path-not-usable]" in said, (command, said)
                assert "/closed\n" in said or "ls -ld closed\n" in said, (command, said)
