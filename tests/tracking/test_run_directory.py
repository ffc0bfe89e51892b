"""A run's directory that somebody else has been in: links planted, files torn, deleted or of
another shape. (15 s)
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import forged
import small_runs
import surefoot as sf
from fake_slurm import weights
from rank_processes import Ranks
from refused import refused
from surefoot.checkpoint import Store
from surefoot.checkpoint.format import Checkpoint, DamageError, write
from surefoot.cli.report import _could_have_panels
from surefoot.config.paths import open_no_follow, read_regular, write_whole
from surefoot.distributed.heartbeat import Heartbeat
from surefoot.distributed.liveness import LostRank
from surefoot.errors import Command
from surefoot.tools.compare.trained import read_run as read_trained
from surefoot.tools.compare.trials import Trials
from surefoot.tools.report.series import read_reported_run
from surefoot.tools.verify.files import check_files
from surefoot.tracking.console import RankLog
from surefoot.tracking.jsonl import JsonLines, records
from surefoot.tracking.logger import Journal
from surefoot.tracking.run_directory import RunDirectory, directory_of_start
from surefoot.tracking.tensorboard import TensorBoard
from waiting import wait_until

STEPS = 14
A_LINK = rf"^\[Errno {errno.ELOOP}\]"  # the error of a link in the place of a file


def build(run_dir: Path, **changes: Any) -> sf.Run:
    # looking for hidden state is no claim of these tests, and takes a tenth of their time
    settings = {"length": f"{STEPS} steps", "check_state": False} | changes
    return small_runs.build(run_dir, **settings)


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def recorded_steps(run_dir: Path) -> list[int]:
    """The steps of its records of training."""
    lines = records(run_dir / "metrics.jsonl")
    return [record["step"] for record in lines if record["kind"] == "train"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    build(run_dir).train()
    return run_dir


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    build(run_dir, stop_after="8 steps").train()
    return run_dir


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A run that has 8 of its steps."""
    return Path(shutil.copytree(stopped_once, tmp_path / "run"))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Somebody's files; they are the same when the test is over."""
    directory = tmp_path / "outside"
    (directory / "deep").mkdir(parents=True)
    (directory / "thesis.txt").write_text("years of work\n")
    (directory / "deep" / "data.bin").write_bytes(bytes(100))
    before = contents(directory)
    yield directory
    assert contents(directory) == before


# --- links: nothing outside of the directory is written or removed --------------------------------


def test_what_a_kill_left_is_unlinked_where_it_is_a_link(
    stopped: Path, outside: Path, whole: Path
) -> None:
    names = (".deleted-step-00000001", ".partial-step-00000012", ".replaced-step-00000004")
    links = [stopped / "checkpoints" / name for name in names]
    for link in links:
        link.symlink_to(outside, target_is_directory=True)

    build(stopped).train()

    assert not any(link.is_symlink() for link in links)
    assert weights(stopped) == weights(whole)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (".lock", "thesis.txt"),
        ("metrics.jsonl", "thesis.txt"),
        ("checkpoints", "deep"),
        ("tensorboard", "deep"),
        ("logs", "deep"),
        ("crash", "deep"),
        ("trackers", "deep"),
    ],
)
def test_a_link_where_a_run_writes_is_refused_by_name(
    name: str, target: str, stopped: Path, outside: Path
) -> None:
    link = stopped / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(outside / target)
    with refused("run-directory-with-strange-file", path=link.absolute()) as error:
        build(stopped).train()
    assert str(outside / target) in str(error.value.problem)


def test_a_link_in_the_place_of_a_small_file_is_replaced(stopped: Path, outside: Path) -> None:
    # the settings of a run are not written again, and so their partial file stays a link
    links = {".config.toml.partial"}
    written = {
        "environment.json",
        ".environment.json.partial",
        "report.html",
        ".report.html.partial",
    }
    (stopped / "report.html").symlink_to(outside / "thesis.txt")
    for name in ("config.toml", "environment.json", "report.html"):
        (stopped / f".{name}.partial").symlink_to(outside / "thesis.txt")

    build(stopped, report=True).train()

    assert not any((stopped / name).is_symlink() for name in written)
    assert {path.name for path in stopped.iterdir() if path.is_symlink()} == links


def test_a_checkpoint_that_is_a_link_is_let_go_and_what_it_leads_to_stays(
    stopped: Path, outside: Path
) -> None:
    link = stopped / "checkpoints" / "step-00000004"
    target = outside.parent / "elsewhere"
    link.rename(target)
    link.symlink_to(target)
    contents_before = contents(target)

    build(stopped, keep_last=1).train()

    assert contents(target) == contents_before
    assert not link.is_symlink()


def test_an_export_into_a_link_is_refused(stopped: Path, outside: Path) -> None:
    (stopped / "export").symlink_to(outside / "deep")
    with refused("export-through-link"):
        sf.load(stopped).export()


def test_an_export_writes_no_file_through_a_link(stopped: Path, outside: Path) -> None:
    (stopped / "own").mkdir()
    (stopped / "own" / ".model.safetensors.partial").symlink_to(outside / "thesis.txt")
    sf.load(stopped).export(stopped / "own")
    assert (stopped / "own" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["logs/rank-1.log", "trackers/wandb.log", "trackers/wandb.lock"])
def test_a_link_in_the_place_of_a_log_is_refused_by_name(
    name: str, stopped: Path, outside: Path
) -> None:
    (stopped / name).parent.mkdir(exist_ok=True)
    (stopped / name).symlink_to(outside / "thesis.txt")
    with refused("run-directory-with-strange-file", path=(stopped / name).absolute()):
        build(stopped).train()


def test_a_log_of_a_rank_is_not_appended_to_through_a_link(tmp_path: Path, outside: Path) -> None:
    log = RankLog()
    log.open(tmp_path / "rank-1.log")
    (tmp_path / "rank-1.log").unlink()
    (tmp_path / "rank-1.log").symlink_to(outside / "thesis.txt")
    log.at_once("a line that finds no place")
    log.write("x")
    with pytest.raises(OSError, match=A_LINK):
        log.flush()


@pytest.mark.parametrize("name", ["pipe", "."])
def test_nothing_but_a_regular_file_is_opened_and_nobody_waits_for_a_pipe(
    name: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"Is a directory|regular|device"):
        os.close(open_no_follow(tmp_path / name, os.O_RDWR))


def test_where_the_system_refuses_no_link_by_itself_it_is_found_after_opening(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.config.paths._FOLLOWS_NO_LINK", 0)
    (tmp_path / "link").symlink_to(outside / "thesis.txt")
    with pytest.raises(OSError, match=A_LINK):
        open_no_follow(tmp_path / "link", os.O_WRONLY | os.O_APPEND)


def test_a_file_cut_off_while_it_is_written_is_not_there(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", pieces())
    assert list(tmp_path.iterdir()) == []


# --- pipes and devices: nobody waits for them -----------------------------------------------------


READ_BY_TOOLS = [
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "panels.json",
    "crash/step-00000003.json",
    ".lock",
    "tensorboard",
    "checkpoints/step-00000008/state.json",
    "checkpoints/step-00000008/manifest.json",
]


def put_in_place(run: Path, name: str, kind: str) -> None:
    """Put a pipe, a directory, or a link to a device in the place of a file."""
    place = run / name
    place.parent.mkdir(exist_ok=True)
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero")


def call_in_time(act: Callable[[], Any]) -> Any:
    """What a call returns; the test fails if it waits for 20 s."""

    def fail(*_: Any) -> None:
        pytest.fail("waits for a file")  # no Exception: a reader would answer an OSError

    handler = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    try:
        return act()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
@pytest.mark.parametrize("name", READ_BY_TOOLS)
def test_a_tool_that_reads_a_run_waits_for_no_file_of_it(
    name: str, kind: str, stopped: Path
) -> None:
    put_in_place(stopped, name, kind)
    call_in_time(lambda: sf.load(stopped).report())
    call_in_time(lambda: sf.load(stopped).diagnose())
    call_in_time(lambda: check_files(stopped))
    call_in_time(lambda: read_trained(stopped))
    call_in_time(lambda: directory_of_start(stopped))
    call_in_time(lambda: _could_have_panels(stopped))


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("environment.json", "pipe", "regular file"),
        ("environment.json", "device", "regular file"),
        ("environment.json", "directory", "regular file"),
        ("metrics.jsonl", "pipe", "regular file"),
        ("metrics.jsonl", "directory", "regular file"),
        (".lock", "pipe", "regular file"),
        ("panels.json", "directory", "regular file"),
        ("logs/rank-0.log", "pipe", "regular file"),
        ("trackers/wandb.log", "pipe", "regular file"),
        ("crash", "pipe", "directory"),
        ("tensorboard", "pipe", "directory"),
    ],
)
def test_a_run_with_a_pipe_device_or_directory_in_the_place_of_a_file_is_not_resumed(
    name: str, kind: str, expected: str, stopped: Path
) -> None:
    put_in_place(stopped, name, kind)
    with refused("run-directory-with-strange-file", path=(stopped / name).absolute()) as error:
        call_in_time(lambda: build(stopped).train())
    assert expected in str(error.value.problem)


def test_the_error_of_a_pipe_or_a_directory_that_is_read_names_it(stopped: Path) -> None:
    put_in_place(stopped, "environment.json", "pipe")
    with pytest.raises(OSError, match=r"\bpipe\b"):
        call_in_time(lambda: read_regular(stopped / "environment.json"))
    with pytest.raises(OSError, match=r"\bdirectory\b"):
        read_regular(stopped)


def test_the_error_of_a_file_that_is_too_large_names_the_limit(stopped: Path) -> None:
    with pytest.raises(OSError, match=r"\b10\b"):
        read_regular(stopped / "metrics.jsonl", limit=10)


def test_a_page_names_a_pipe_in_the_place_of_a_file(stopped: Path) -> None:
    put_in_place(stopped, "environment.json", "pipe")
    problems = read_reported_run(stopped).problems
    (problem,) = [text for text in problems if text.startswith("environment.json ")]
    assert " pipe, " in problem


def test_the_check_of_files_names_a_device_in_the_place_of_one(stopped: Path) -> None:
    put_in_place(stopped, "environment.json", "device")
    texts = [problem.text for problem in check_files(stopped).problems]
    assert any(text.startswith("environment.json ") and " device, " in text for text in texts)


# --- files of somebody else where a run begins ------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "report.html",
        "metrics.jsonl",
        "environment.json",
        "panels.json",
        "tokens.json",  # a small file of the recipe
        ".lock",
        "crash/step-00000003.json",
        "tape/end.json",
        "tapes/split-val",
        "trackers/wandb.log",
    ],
)
def test_a_run_that_begins_overwrites_no_file_of_somebody_else(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text("{}\n")
    files = {"tokens.json": "of the run"}
    with refused("directory-has-other-files", setting="run_dir", files=[name]):
        build(tmp_path, extra_files=files, length="2 steps").train()
    assert contents(tmp_path) == {name: b"{}\n"}


def test_other_files_stay_beside_a_run(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("train.py", "logs/app.log", "tensorboard/events")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("theirs\n")
    build(tmp_path, length="2 steps").train()
    assert [file.read_text() for file in files] == ["theirs\n"] * 3
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_a_copy_of_a_run_without_its_lock_is_resumed(stopped: Path, whole: Path) -> None:
    (stopped / ".lock").unlink()
    build(stopped).train()
    assert weights(stopped) == weights(whole)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(
    tmp_path: Path, whole: Path
) -> None:
    for name in (".lock", "config.toml", "metrics.jsonl", "report.html"):
        (tmp_path / name).touch()
    build(tmp_path).train()
    assert weights(tmp_path) == weights(whole)


# --- links that appear while a run trains ---------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory that looks like the checkpoints of a run; it is the same, names and all, when the
    test is over.
    """
    directory = tmp_path / "elsewhere"
    names = (
        ".deleted-step-00000001",
        ".partial-step-00000012",
        ".replaced-step-00000004",
        "step-00000004",
    )
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "thesis.txt").write_text("years of work\n")
    paths = sorted(directory.rglob("*"))
    yield directory
    assert sorted(directory.rglob("*")) == paths


def plant(run_dir: Path, name: str, target: Path) -> None:
    """Put a link in the place of one of a run's own names, which moves aside."""
    link = run_dir / name
    if link.exists():
        link.rename(run_dir.parent / f"moved-{link.name}")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)


@pytest.mark.fast("checkpoints", "tensorboard", "metrics.jsonl", "logs")
@pytest.mark.parametrize(
    "name",
    [
        "checkpoints",
        "tensorboard",
        "crash",
        "logs",
        "trackers",
        "metrics.jsonl",
        ".lock",
    ],
)
def test_a_link_that_appears_while_a_run_trains_fails_its_saves_and_is_not_followed(
    name: str, tmp_path: Path, elsewhere: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    target = outside / "thesis.txt" if "." in name else elsewhere
    with refused("checkpoint-not-saved", sf.CheckpointError, step=STEPS) as caught:
        train_and_act_at(run_dir, 9, lambda: plant(run_dir, name, target))
    assert caught.value.reason == str(run_dir / name)
    assert caught.value.remedies == (Command(f"rm {run_dir / name}"),)
    assert "NOT SAVED" in capsys.readouterr().out


def test_when_the_link_is_gone_the_run_is_saved_again(
    tmp_path: Path, elsewhere: Path, whole: Path
) -> None:
    run_dir = tmp_path / "run"
    with build(run_dir) as run:
        for step in run:
            if step.index == 9:
                assert run.parts.checkpointing is not None
                run.parts.checkpointing.writer.wait()
                plant(run_dir, "checkpoints", elsewhere)
            elif step.index == STEPS - 1:
                run.parts.checkpointing.writer.wait()
                (run_dir / "checkpoints").unlink()
                (tmp_path / "moved-checkpoints").rename(run_dir / "checkpoints")
    assert weights(run_dir) == weights(whole)


def test_a_link_that_appears_while_a_checkpoint_is_written_is_not_followed(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    store = Store(directory.checkpoints, guard=directory.refuse_links)

    def write_and_plant(contents: Checkpoint, **more: Any) -> None:
        write(contents, **more)
        plant(tmp_path, "checkpoints", elsewhere)

    monkeypatch.setattr("surefoot.checkpoint.store.write", write_and_plant)
    with refused("checkpoint-not-saved", sf.CheckpointError, step=12):
        store.save(Checkpoint(12, {"model": {"weight": torch.ones(2)}}))


def test_a_run_that_dies_writes_no_report_through_a_link(
    tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    def die() -> None:
        plant(run_dir, "crash", elsewhere)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train_and_act_at(run_dir, 2, die)
    assert f"[Errno {errno.ELOOP}]" in capsys.readouterr().out


def test_records_are_not_written_again_through_a_link(tmp_path: Path, elsewhere: Path) -> None:
    journal = Journal(None)
    directory = RunDirectory(tmp_path)
    journal.open(directory, step=0, saved=None, unit="targets", tensorboard=True)
    plant(tmp_path, "tensorboard", elsewhere)
    shutil.rmtree(tmp_path / "moved-tensorboard", ignore_errors=True)
    with pytest.raises(OSError, match=A_LINK):
        journal.make_again(directory)
    journal.close()


def test_a_log_of_a_rank_whose_directory_became_a_link_is_not_written(
    tmp_path: Path, elsewhere: Path
) -> None:
    log = RankLog()
    log.open(tmp_path / "logs" / "rank-1.log")
    plant(tmp_path, "logs", elsewhere)
    log.at_once("a line that finds no place")
    log.write("x")
    with pytest.raises(OSError, match=A_LINK):
        log.flush()


def test_a_heartbeat_writes_of_a_lost_rank_through_no_link(tmp_path: Path, elsewhere: Path) -> None:
    plant(tmp_path, "logs", elsewhere)
    heart = Heartbeat(HashStore(), rank=2, size=3, host="here")
    heart.opened(logs=tmp_path / "logs", fresh_line="")
    heart._say(LostRank(0, "rank 0 is lost"))


@pytest.mark.parametrize(
    "open_logs",
    [
        pytest.param(lambda logs: RankLog().open(logs / "rank-3.log"), id="rank"),
        pytest.param(lambda logs: TensorBoard(logs, from_step=0), id="TensorBoard"),
        pytest.param(
            lambda logs: Trials(
                RunDirectory(logs.parent), lambda _: ["true"], threads=1, cwd="."
            ).start("a"),
            id="trials",
        ),
    ],
)
def test_logs_are_not_opened_in_a_directory_that_is_a_link(
    open_logs: Callable[[Path], object], tmp_path: Path, elsewhere: Path
) -> None:
    plant(tmp_path, "logs", elsewhere)
    with pytest.raises(OSError, match=A_LINK):
        open_logs(tmp_path / "logs")


# --- deleted while a run trains -------------------------------------------------------------------


def train_and_act_at(run_dir: Path, index: int, act: Callable[[], None], **changes: Any) -> None:
    """Train, and do something in the step with this index, when nothing is being saved."""
    with build(run_dir, console=True, **changes) as run:
        for step in run:
            if step.index == index:
                assert run.parts.checkpointing is not None
                run.parts.checkpointing.writer.wait()
                act()


@pytest.mark.fast("in the middle-False", "after the last save-True")
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("step", [9, STEPS - 1], ids=["in the middle", "after the last save"])
def test_a_directory_that_was_deleted_is_made_again_and_the_run_saved_whole(
    step: int, resumed: bool, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    if resumed:
        build(run_dir, stop_after="6 steps").train()

    train_and_act_at(run_dir, step, lambda: shutil.rmtree(run_dir))

    assert capsys.readouterr().out.count(f"WARNING: {run_dir}, ") == 1
    assert weights(run_dir) == weights(whole)
    files = {"config.toml", "environment.json", "metrics.jsonl", "tensorboard", ".lock"}
    assert files <= set(os.listdir(run_dir))
    assert recorded_steps(run_dir) == [*range(3, STEPS, 3), STEPS]
    finished = build(run_dir)
    finished.train()  # finds nothing left to do, and no damage
    assert finished.state.step == STEPS


@pytest.mark.fast("checkpoints", "metrics.jsonl")
@pytest.mark.parametrize("part", ["checkpoints", "metrics.jsonl", "tensorboard", ".lock"])
def test_a_part_that_was_deleted_is_made_again(
    part: str, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    def delete() -> None:
        if (run_dir / part).is_dir():
            shutil.rmtree(run_dir / part)
        else:
            (run_dir / part).unlink()

    train_and_act_at(run_dir, 9, delete)

    assert f"WARNING: {run_dir}, " in capsys.readouterr().out
    assert weights(run_dir) == weights(whole)
    assert recorded_steps(run_dir) == [*range(3, STEPS, 3), STEPS]


def keep_open(run_dir: str, opened: str, over: str) -> None:
    """What another process does: the directory is its own from when the one file is there, until
    the other is.
    """
    directory = RunDirectory(Path(run_dir))
    directory.open()
    Path(opened).touch()
    assert wait_until(Path(over).exists)


def test_of_two_trainers_in_one_directory_the_first_saves_no_more(
    tmp_path: Path, ranks: Ranks
) -> None:
    """Its lock was removed, so another process could start; the two would delete each other's
    checkpoints.
    """
    run_dir = tmp_path / "run"
    opened = tmp_path / "opened"
    over = tmp_path / "over"
    others: list[Path] = []

    def start_another() -> None:
        (run_dir / ".lock").unlink()
        other = ranks.start(1, keep_open, run_dir=str(run_dir), opened=str(opened), over=str(over))
        others.append(other)
        assert wait_until(opened.exists)

    with refused("run-directory-taken-over", sf.CheckpointError):
        train_and_act_at(run_dir, 9, start_another)
    assert Store(run_dir / "checkpoints").steps()[-1] <= 9
    over.touch()
    (outcome,) = ranks.outcomes(others[0])
    assert outcome.status == 0


# --- torn, of another shape, not finite -----------------------------------------------------------


def test_a_torn_line_does_not_outlive_a_resume(stopped: Path, whole: Path) -> None:
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "train", "step": 9, "lo')

    build(stopped).train()

    lines = (stopped / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    assert weights(stopped) == weights(whole)
    assert "WRONG" not in str(sf.load(build(stopped)).verify(windows=0))


def test_a_torn_line_that_a_checkpoint_has_noted_stays(stopped: Path, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b"')
    lines = JsonLines(path, noted_bytes=12)
    lines.write({"kind": "x", "step": 1})
    lines.close()
    assert path.read_bytes().splitlines()[1:] == [b'{"b"', b'{"kind": "x", "step": 1}']


WRONG_SHAPES: list[tuple[str, Any]] = [
    ("clock", 3),
    ("clock/total_s", None),
    ("clock/window_s", {"training": [1]}),
    ("clock/first_steps", "x"),
    ("clock/total_s", {"training": "x"}),
    ("identity/length", "x"),
    ("identity/schedule_of_steps", None),
    ("identity/identity", []),
    ("extra", None),
    ("extra/model", {"x": 3}),
    ("fingerprints", {}),
    ("fingerprints/accepted", [{"step": 3}]),
    ("fingerprints/loss", "x"),
    ("fingerprints/sources", {}),
    ("param_groups/model", {"list": [{"dict": {"lr": {"float": "x"}}}]}),
    ("optimizer", {}),
    ("optimizer/model", {"dict": {"own": {"dict": {"state": {"value": 3}}}}}),
    ("trainable/frozen", [3]),
    ("skipped_in_a_row", None),
    ("skipped_in_a_row", ["x"]),
    ("eval_mode", []),
    ("eval_mode/model", 5),
    ("aliases/model", ["x"]),
    ("optimizer/model", 7),
    ("param_groups", None),
    ("param_groups/model", {"list": 3}),
    ("identity", "x"),
    ("identity/precision", 3),
    ("identity/data", None),
    ("machine", []),
    ("machine/torch", 2),
    ("architecture/model", None),
    ("splits", 1),
    ("user_state", []),
    ("monitor", {"value": 3}),
    ("monitor", 1),
    ("seen", {"a": 1}),
    ("first_scores", None),
    ("evaluation_due", "x"),
]


def edit_of(where: str, value: Any) -> forged.Edit:
    """The edit that gives state.json another value at a path."""

    def edit(state: dict[str, Any]) -> None:
        *above, last = where.split("/")
        for name in above:
            state = state[name]
        state[last] = value

    return edit


@pytest.mark.fast(
    "clock=3",
    "clock/window_s={'training': [1]}",
    "identity/length=x",
    "extra/model={'x': 3}",
    "fingerprints/accepted=[{'step': 3}]",
    "param_groups/model={'list': [{'dict': {'lr': {'float': 'x'}}}]}",
    "optimizer/model={'dict': {'own': {'dict': {'state': {'value': 3}}}}}",
    "trainable/frozen=[3]",
    "skipped_in_a_row=None",
    "machine/torch=2",
    "monitor={'value': 3}",
    "first_scores=None",
    "evaluation_due=x",
)
@pytest.mark.parametrize(
    ("where", "value"), WRONG_SHAPES, ids=[f"{where}={value}" for where, value in WRONG_SHAPES]
)
def test_a_state_of_the_wrong_shape_is_damage_and_the_one_before_is_taken(
    where: str, value: Any, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged.state_changed(forged.checkpoint(stopped, 8), edit_of(where, value))
    with build(stopped, console=True, report=False) as run:
        assert run.state.step == 5
    printed = capsys.readouterr().out
    (damage,) = re.findall(r"step-00000008 is damaged \(state\.json: (.*)", printed)
    _, _, name = where.rpartition("/")
    assert name in damage


WRONG_VALUES: tuple[Any, ...] = (None, 3, "x", [], {}, ["x"], {"a": 1}, "absent")
JsonPath = tuple[str | int, ...]


def json_paths(value: Any, path: JsonPath = ()) -> Iterator[JsonPath]:
    """Every leaf and node of JSON; of lists the first item alone."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from json_paths(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from json_paths(value[0], (*path, 0))


def edit_of_path(path: JsonPath, value: Any) -> forged.Edit:
    """The edit that gives state.json another value at a path, or none."""
    *above, last = path

    def edit(state: dict[str, Any]) -> None:
        node: Any = state
        for key in above:
            node = node[key]
        if value == "absent":
            del node[last]
        else:
            node[last] = value

    return edit


@pytest.mark.parametrize(
    "most", [8, pytest.param(10**6, marks=pytest.mark.slow)], ids=["a few", "all"]
)
def test_whatever_state_json_says_a_resume_and_verify_end_in_an_error_of_ours_or_in_none(
    most: int, stopped: Path
) -> None:
    checkpoint = forged.checkpoint(stopped, 8)
    untouched = stopped.parent / "untouched"
    shutil.copytree(stopped, untouched)
    state = json.loads((checkpoint / "state.json").read_text())
    _, *paths = json_paths(state)  # all but the whole
    cases = list(product(paths, WRONG_VALUES))
    random.Random(5).shuffle(cases)

    for path, value in cases[:most]:
        shutil.rmtree(stopped)
        shutil.copytree(untouched, stopped)
        forged.state_changed(checkpoint, edit_of_path(path, value))
        try:
            with suppress(sf.SurefootError):
                sf.load(build(stopped)).verify(steps=1, windows=1)
            with suppress(sf.SurefootError):
                build(stopped, report=False, stop_after="9 steps").train()
        except Exception as problem:
            name = "/".join(map(str, path))
            raise AssertionError(f"state.json with {name} = {value!r}") from problem


@pytest.mark.parametrize("value", [None, {}, {"step": 3}, ["x"]])
def test_verify_calls_a_state_of_the_wrong_shape_damaged(value: Any, stopped: Path) -> None:
    forged.state_changed(forged.checkpoint(stopped, 8), edit_of("fingerprints", value))
    verification = str(sf.load(build(stopped)).verify(windows=0))
    assert "checkpoint step-00000008 is damaged: state.json: fingerprints" in verification


def test_what_no_shape_forbids_is_damage_when_it_is_restored_and_its_cause_is_kept(
    stopped: Path,
) -> None:
    edit = edit_of("aliases/model", {"other": "nothing"})
    forged.state_changed(forged.checkpoint(stopped, 8), edit)
    with refused("checkpoint-damaged", DamageError) as caught:
        build(stopped).train()
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_out_of_the_users_own_code_is_not_called_damage(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, state: Any) -> None:
        raise KeyError("a fault of the user's own")

    # a function of this file, which is not surefoot's
    monkeypatch.setattr("surefoot.train.patience.ScoreWatch.load_state", refuse)
    with pytest.raises(KeyError, match="a fault of the user's own"):
        build(stopped).train()


def test_what_is_no_number_of_an_optimizer_is_refused_by_name(stopped: Path) -> None:
    def edit(state: dict[str, Any]) -> None:
        state["param_groups"]["model"]["list"][0]["dict"]["betas"] = {"tuple": []}

    forged.state_changed(forged.checkpoint(stopped, 8), edit)
    with refused("optimizer-value-differs", sf.CheckpointError, name="betas", saved=()):
        build(stopped).train()


def test_weights_that_are_not_finite_are_named_at_a_resume(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["0.weight"][0, 0] = torch.nan
        tensors["4.bias"][0] = torch.inf

    forged.tensors_changed(forged.checkpoint(stopped, 8), edit)
    with pytest.raises(sf.DivergedError):
        build(stopped, console=True).train()
    printed = capsys.readouterr().out
    assert re.search(r"WARNING: step-00000008 .*: 0\.weight and 1 more", printed)


def test_tensorboard_on_a_full_disk_is_one_line_and_written_when_there_is_room(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class FullDisk:
        """A file on a disk that is full for the first ten tries."""

        def __init__(self, file: Any) -> None:
            self.file = file
            self.tries = 0

        def write(self, content: bytes) -> int:
            self.tries += 1
            if self.tries <= 10:
                raise OSError(28, "No space left on device")
            return int(self.file.write(content[:50]))

        def fileno(self) -> int:
            return int(self.file.fileno())

        def close(self) -> None:
            self.file.close()

    with build(tmp_path / "run", console=True) as run:
        assert run.session is not None
        board = next(sink for sink in run.session.journal.sinks if isinstance(sink, TensorBoard))
        board.appended.file = FullDisk(board.appended.file)  # type: ignore[assignment]
        for _ in run:
            pass

    printed = "".join(capfd.readouterr())
    assert printed.count("tensorboard: No space left on device") == 1
    assert "Traceback" not in printed
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == [*range(3, STEPS, 3), STEPS]


def test_a_relative_directory_stays_where_it_was_when_the_run_was_built(tmp_path, monkeypatch):
    before = tmp_path / "before"
    after = tmp_path / "after"
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    run = sf.Run(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train_data=(torch.ones(8, 1),),
        batch_size=4,
        length="4 steps",
        save_every="1 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        run_dir="runs/a",
        console=False,
    )
    os.chdir(after)
    with run:
        for step in run:
            os.chdir(before if step.index % 2 else after)
    run_dir = before / "runs" / "a"
    assert list(after.iterdir()) == []
    assert max((run_dir / "checkpoints").iterdir()).name == "step-00000004"
    assert (run_dir / "report.html").is_file()
    assert run.parts.directory.shown == Path("runs/a")  # as it was typed, in messages
