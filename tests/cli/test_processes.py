"""`--nproc` and `--max-restarts` as they are typed: what is refused before anything starts, and
what is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refused import refused
from surefoot.cli.main import main
from surefoot.cli.processes import Several, sizes_of
from surefoot.cli.train import NoSettings
from surefoot.config.toml import to_toml
from surefoot.distributed import launcher
from surefoot.distributed.process_count import ProcessCount, Sizes, Slots, parse_nproc
from surefoot.program import find_program
from written_runs import state_json

Typed = Callable[..., "tuple[int, str]"]
GPT = ["train", "gpt", "--batch-size", "64", "--micro-batch-size", "16", "--device", "cpu"]
BUILD = """
import surefoot as sf

def build():
    raise sf.ConfigError("built")
"""


@pytest.fixture
def typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Typed:
    """A command with its exit status and what it says; nothing is started, but 99 and the command
    told in its place.
    """

    def launch(
        command: Callable[[float], list[str]],
        *,
        places: Slots,
        max_restarts: int = 0,
        again: str = "",
    ) -> int:
        print(json.dumps([places.size(), max_restarts, command(0.0), command(60.0)]))
        return 99

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return call


def test_the_same_command_is_run_in_so_many_processes(typed: Typed) -> None:
    status, said = typed(*GPT, "--nproc", "4", "--max-restarts", "2", "--time-limit", "10 min")
    assert status == 99
    size, restarts, first, later = json.loads(said)
    assert (size, restarts) == (4, 2)
    assert first == [
        "-P",
        "-m",
        "surefoot",
        *GPT,
        "--nproc",
        "4",
        "--max-restarts",
        "2",
        "--time-limit",
        "10 min",
    ]
    assert later[-2:] == ["--time-limit", "540 s"], "what is left of it"


def test_the_options_are_no_settings_of_a_file_that_has_none(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BUILD)
    status, said = typed("train", "mine.py", "--nproc", "2")
    assert status == 99
    assert json.loads(said)[2] == ["-P", "-m", "surefoot", "train", "mine.py", "--nproc", "2"]


def test_a_run_of_such_a_file_goes_on_in_as_many(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BUILD)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    described = find_program("mine.py").described | Several(nproc=2, max_restarts=1).recorded()
    (run / "config.toml").write_text(to_toml(NoSettings(), {}, described))
    assert typed("resume", "run")[0] == 99
    size, restarts, _, _ = json.loads(typed("resume", "run")[1])
    assert (size, restarts) == (2, 1)
    assert json.loads(typed("resume", "run", "--nproc", "3")[1])[0] == 3


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_help_of_such_a_file_names_the_options(typed: Typed, tmp_path: Path, verb: str) -> None:
    (tmp_path / "mine.py").write_text(BUILD)
    status, said = typed(verb, "mine.py", "--help-all")
    assert status == 0
    assert "--nproc INT|TEXT" in said
    assert "--max-restarts INT" in said


@pytest.mark.parametrize("length", [10, 1_000_000])
def test_a_reader_that_has_gone_is_no_error(length: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = f"from surefoot.cli import main; main.verb_function = lambda _: lambda _: print('x' * {length}); main.main(['plan'])"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_rank_starts_no_others(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(BUILD)
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "SUREFOOT_LAUNCHER": str(os.getppid()),
    }.items():
        monkeypatch.setenv(name, value)
    status, said = typed("train", "mine.py", "--nproc", "2")
    assert status == 2
    assert "built" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*GPT, "--nproc", "5"], "[more-ranks-than-micro-batches]"),
        ([*GPT[:4], "--nproc", "3"], "[batch-size-not-divisible]"),
        ([*GPT, "--nproc", "0"], "[not-a-number-of-processes]"),
        ([*GPT, "--nproc", "4:2"], "[not-a-number-of-processes]"),
        ([*GPT, "--nproc", "all"], "[not-a-number-of-processes]"),
        ([*GPT, "--nproc", "5:7"], "[more-ranks-than-micro-batches]"),
        ([*GPT, "--nproc", "2", "--max-restarts", "-1"], "[setting-out-of-range]"),
        (["train", "mine.py", "--nproc", "1:4"], "[processes-without-batch-size]"),
        (["plan", *GPT[1:], "--nproc", "5"], "[more-ranks-than-micro-batches]"),
        (["plan", "mine.py", "--nproc", "1:4"], "[processes-without-batch-size]"),
        (["find-lr", *GPT[1:], "--nproc", "5"], "[more-ranks-than-micro-batches]"),
        (["profile", *GPT[1:], "--nproc", "0"], "[not-a-number-of-processes]"),
        (["find-batch-size", "gpt", "--nproc", "2"], "[one-process-only]"),
        (["compare", "gpt", "--vary", "seed=1,2", "--nproc", "2"], "[one-process-only]"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    typed: Typed, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "mine.py").write_text(BUILD)
    status, said = typed(*arguments)
    assert status == 2, said
    assert words in said
    assert len(said.splitlines()) <= 5


def test_nproc_under_another_launcher_is_refused(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    status, said = typed(*GPT, "--nproc", "2")
    assert status == 2
    assert "[nproc-under-launcher]" in said


def test_more_processes_than_gpus_are_refused() -> None:
    with refused("more-processes-than-gpus", processes=4, gpus=2):
        Slots(parse_nproc(4), sizes=lambda: Sizes(64, 16), gpus=["0", "1"]).size()


def test_places_of_ranks_that_died_are_not_used_again() -> None:
    places = Slots(
        ProcessCount(1, 4, "1:4"), sizes=lambda: Sizes(64, 16), gpus=["0", "1", "2", "3"]
    )
    assert places.size() == 4
    places.died([0])
    assert (places.size(), places.environment()["CUDA_VISIBLE_DEVICES"]) == (3, "1,2,3")
    places.died([1])
    assert (places.size(), places.environment()["CUDA_VISIBLE_DEVICES"]) == (2, "1,3")


def test_a_fixed_number_is_started_again_as_it_was() -> None:
    places = Slots(parse_nproc(4), sizes=lambda: Sizes(64, 16), gpus=None)
    places.died([0, 1])
    assert places.size() == 4


def test_fewer_than_the_least_are_refused() -> None:
    places = Slots(parse_nproc("2:4"), sizes=lambda: Sizes(64, 16), gpus=None)
    assert places.size() == 4
    places.died([0, 1, 2])
    with refused("processes-lost", left=1):
        places.size()


def test_a_run_that_is_there_keeps_its_micro_batches(tmp_path: Path) -> None:
    state = tmp_path / "checkpoints" / "step-00000004" / "state.json"
    state.parent.mkdir(parents=True)
    held = state_json()
    held["identity"] |= {"batch_size": 64, "micro_batch_size": 16}
    state.write_text(json.dumps(held))
    assert sizes_of(64, None, run_dir=tmp_path) == Sizes(64, 16, is_resumed=True)
    with refused("more-ranks-than-micro-batches", micro_batches=4) as caught:
        sizes_of(64, None, run_dir=tmp_path).refuse(5)
    assert len(caught.value.remedies) == 1
    sizes_of(64, None, run_dir=tmp_path).refuse(3)
    assert sizes_of(32, None, run_dir=tmp_path) == Sizes(32, None)
    assert sizes_of(64, 32, run_dir=tmp_path) == Sizes(64, 32, is_resumed=True)


def test_python_m_surefoot_is_the_command_line() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "surefoot", "--help"], capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith("surefoot trains PyTorch models")
