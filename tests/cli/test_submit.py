"""`surefoot submit`: what the job is, what is refused before there is one, and that it goes on.
(about 4 s; slow ones 30 s)
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import surefoot as sf
from command_line import error_of, output_of
from fake_slurm import PROGRAM, Job, installed, submitted, weights
from rank_processes import forks, on_ranks
from surefoot.cli import main as command_line
from surefoot.cli import submit
from surefoot.cli.main import main
from surefoot.cli.submit import Training
from waiting import wait_until

TWO = ["--hours", "1", "--nodes", "2", "--run-dir", "run"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where there is a Slurm; the test is there too, with a program."""
    for name, value in installed(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(cluster: Path, said: str) -> str:
    """The batch script of the job that is said to be submitted."""
    job = submitted(cluster / "slurm", said)
    job.wait()
    return (cluster / "slurm" / f"{job.number}.sh").read_text()


def error_of_submit(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    message = error_of(capsys, "submit", *arguments)
    assert len(message.splitlines()) <= 5
    return message


def test_the_job_is_signalled_early_and_is_requeued(cluster: Path, monkeypatch, capsys) -> None:
    # what the job starts is another test's claim
    (cluster / "slurm" / "bin" / "srun").write_text("#!/bin/sh\nexit 0\n")
    Path("mine.toml").write_text("seed = 3\n")
    flags = [
        *TWO,
        "--gpus-per-node=4",
        "--cpus-per-task=6",
        "--partition=long",
        "--sbatch=account=lab",
        "--sbatch=exclusive",
        "--keep-last=2",
    ]
    output = output_of(capsys, "submit", "gpt", *flags, "--config", "mine.toml")
    text = script(cluster, output)
    monkeypatch.setenv("PATH", "/nowhere")  # a dry run needs no Slurm
    assert output_of(capsys, "submit", "gpt", *flags, "--dry-run") == text
    assert len(list((cluster / "slurm").glob("*.job"))) == 1
    options = [
        "nodes=2",
        "ntasks-per-node=4",
        "gpus-per-node=4",
        "cpus-per-task=6",
        "time=60",
        "partition=long",
        "account=lab",
        "exclusive",
        "requeue",
        "signal=TERM@120",
        "open-mode=append",
    ]
    for option in options:
        assert f"#SBATCH --{option}\n" in text
    assert "--kill-on-bad-exit=0" in text
    assert "surefoot train gpt --run-dir run --keep-last=2 --config mine.toml" in output
    assert "tail -f slurm/901593/901593_0_log.out" in output
    assert "scancel 901593" in output
    assert "2 x 4 processes, 1 hour, " in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "[argument-missing]"),
        (["gpt", "--run-dir", "run"], "[setting-out-of-range]"),
        (["gpt", "--run-dir", "run", "--hours", "0.01"], "[setting-out-of-range]"),
        (["gpt", "--run-dir", "run", "--hours", "long"], "[flags-not-understood]"),
        (
            ["gpt", "--run-dir", "run", "--hours", "1", "--nodes", "0"],
            "[setting-out-of-range]",
        ),
        (["gpt", "--hours", "1", "--run-dir", "None"], "[option-missing]"),
        (
            ["gpt", "--hours", "1", "--run-dir", "run", "--config", "missing.toml"],
            "[path-not-usable]",
        ),
        (["gpt", "--hours", "1", "--run-dir", "run", "--optimizer.lrr", "1"], "[setting-unknown]"),
        (
            ["gpt", "--hours", "1", "--run-dir", "run", "--partitio", "1"],
            "[setting-unknown]",
        ),
        (
            ["gpt", *TWO, "--tasks-per-node", "3"],
            "[batch-size-not-divisible]",
        ),
        (["gpt", *TWO, "--nproc", "2"], "[one-process-only]"),
        (
            ["gpt", "--hours", "1", "--run-dir", "run", "--local", "--sbatch", "account=lab"],
            "[option-excluded]",
        ),
        (["gpd", "--hours", "1"], "did you mean gpt?"),
        (["gpt", *TWO, "--local", "--dry-run"], "[option-excluded]"),
        (
            ["gpt", "--hours", "1", "--run-dir", "run", "--local", "--nodes", "2"],
            "[job-not-submitted]",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_there_is_a_job(
    arguments: list[str], reason: str, cluster, capsys
) -> None:
    assert reason in error_of_submit(arguments, capsys)
    assert list(cluster.glob("slurm/*.job")) == []


def test_a_machine_without_slurm_is_told(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "[job-not-submitted]" in error_of_submit(["gpt", *TWO], capsys)


def test_the_extra_is_named_where_submitit_is_missing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "[package-not-usable]" in error_of_submit(["gpt", *TWO], capsys)


@pytest.mark.parametrize("words", [["gpt"], ["program.py:build"], []], ids=" ".join)
def test_help_shows_each_option_of_the_job_once(words: list[str], cluster: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["submit", *words, "--help-all"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    headings = re.findall(r"(?m)^(\w.*):$", text)
    flags = re.findall(r"(?m)^  (--\S+)", text)
    assert {"arguments", "options of submit"} <= set(headings)
    assert len(headings) == len(set(headings))
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(("status", "requeued"), [(143, True), (5, False), (130, False)])
def test_a_process_that_has_saved_and_only_such_a_one_has_submitit_requeue(
    status: int, requeued: bool, monkeypatch
) -> None:
    def ends(arguments: list[str]) -> None:
        sys.exit(status)

    heard: list[int] = []
    monkeypatch.setattr(command_line, "main", ends)
    monkeypatch.setattr(sys, "argv", sys.argv)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(SystemExit) as left:
            Training(("train", "gpt"))()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == status
    assert bool(heard) == requeued


def test_what_is_called_after_a_requeue_is_the_same_command() -> None:
    training = Training(("train", "gpt"))
    assert training.checkpoint().function == training


@pytest.mark.parametrize("restarts", ["0", "1"])  # of the job that submits another job
def test_a_number_is_chosen_once_when_the_job_is_submitted(
    restarts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    calls: list[tuple[str, ...]] = []

    def submitted_here(training: Training, *_: object) -> object:
        calls.append(training.arguments)
        if len(calls) > 2:
            raise sf.ConfigError("no machine")
        paths = SimpleNamespace(stdout=tmp_path / "log")
        return SimpleNamespace(job_id="1", paths=paths)

    monkeypatch.setattr(submit, "_submitted", submitted_here)
    words = ["submit", "gpt", "--run-dir", "runs/a-{n}", "--hours", "1", "--keep-last", "2"]
    main([*words, "--dry-run"])
    assert not Path("runs").exists()
    for _ in range(2):
        main(words)
    with pytest.raises(SystemExit):
        main(words)
    assert calls == [
        ("train", "gpt", "--keep-last", "2", "--run-dir", f"runs/a-{number}")
        for number in (1, 2, 3)
    ]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a-1", "a-2"]


def of_two(rank: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": 29517,
    }
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


@forks
@pytest.mark.slow
def test_a_job_that_is_pre_empted_goes_on_to_the_same_bits(cluster: Path, capsys) -> None:
    main(["submit", "program.py:build", *TWO, "--pause-s", "0.05"])
    job = submitted(cluster / "slurm", capsys.readouterr().out)
    assert on_ranks(
        2,
        lambda _: main(["train", "program.py:build", "--run-dir", "left-alone"]),
        environment=of_two,
    ) == [
        0,
        0,
    ]
    assert wait_until(lambda: Path("run/metrics.jsonl").exists())
    job.signal_tasks(signal.SIGTERM)
    job.wait()
    log = Path(f"slurm/{job.number}/{job.number}_0_log.out").read_text()
    assert len(job.statuses) == 2, log
    assert job.statuses[1] == 0
    assert '"kind": "resume"' in Path("run/metrics.jsonl").read_text()
    assert weights(Path("run")) == weights(Path("left-alone"))


@forks
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # submitit leaves the job to itself
def test_on_this_machine_a_job_goes_on_too(cluster: Path, capsys) -> None:
    main(
        [
            "submit",
            "program.py:build",
            "--local",
            "--tasks-per-node",
            "2",
            "--hours",
            "1",
            "--run-dir",
            "run",
            "--pause-s",
            "0.05",
        ]
    )
    job = Job(cluster, int(capsys.readouterr().out.split()[2].rstrip(":")))
    assert on_ranks(
        2,
        lambda _: main(["train", "program.py:build", "--run-dir", "left-alone"]),
        environment=of_two,
    ) == [
        0,
        0,
    ]
    assert wait_until(lambda: Path("run/metrics.jsonl").exists())
    os.kill(job.number, signal.SIGTERM)
    assert wait_until(lambda: os.waitpid(job.number, os.WNOHANG)[0] != 0)
    log = Path(f"slurm/{job.number}/{job.number}_0_log.out").read_text()
    assert '"kind": "resume"' in Path("run/metrics.jsonl").read_text(), log
    assert weights(Path("run")) == weights(Path("left-alone"))
