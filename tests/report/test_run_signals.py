"""The buttons of the page: a real run saves and stops with the same bits, and no other process is
signaled; 5 seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rank_processes import Ranks
from refused import refused
from small_runs import build, loss, train
from surefoot.errors import ConfigError
from surefoot.tools.report import run_signals
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tools.report.run_signals import signal_run
from surefoot.tracking.run_directory import RunDirectory
from surefoot.tracking.run_reader import lock_holder
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the buttons need Linux")


SETTINGS = {
    "length": "4000 steps",
    "save_every": "100000 steps",
    "splits": None,
    "early_stopping": None,
}


def slow_run(run_dir: str) -> None:
    def slow(model, batch):
        time.sleep(0.02)
        return loss(model, batch)

    train(build(run_dir, loss=slow, console=True, **SETTINGS))


def saved(run: Path) -> list[int]:
    return sorted(
        int(path.name[5:])
        for path in run.glob("checkpoints/step-*")
        if (path / "manifest.json").exists()
    )


def weights(run: Path, step: int) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in run.glob(f"checkpoints/step-{step:08}/*.safetensors")
    }


def test_the_buttons_save_and_stop_a_run_and_change_no_bit(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "runs" / "a"
    place = ranks.start(1, slow_run, run_dir=str(run))
    watch = DirectoryWatch(tmp_path / "runs")

    def recorded() -> bool:
        watch.look()
        watch.work()
        return any(each.row is not None and each.row["step"] >= 6 for each in watch.runs.values())

    assert wait_until(lambda: recorded() or (place / "status-0").exists())
    (key,) = watch.runs
    pid = int((place / "pid-0").read_text())
    assert lock_holder(run) == pid
    assert f"process {pid} " in watch.request(key, "save")
    assert wait_until(lambda: len(saved(run)) == 2)
    assert not (place / "status-0").exists()
    asked = max(saved(run))
    assert wait_until(lambda: recorded() and watch.runs[key].row["step"] > asked + 3)  # it goes on
    assert f"process {pid} " in watch.request(key, "stop")
    with pytest.raises(ConfigError) as error:
        watch.request(key, "stop")  # a second signal would lose the last steps
    assert error.value.code in {
        "stop-already-requested",
        "run-not-training",
        "run-starting-or-ending",
    }
    (ended,) = ranks.outcomes(place)
    assert ended.status == 130
    assert max(saved(run)) > asked
    watch.look()
    watch.work()
    assert watch.runs[key].state == "stopped"
    with refused("run-not-training", path=run):
        watch.request(key, "stop")
    last = max(saved(run))
    unwatched = build(tmp_path / "unwatched", stop_after=f"{last} steps", **SETTINGS)
    train(unwatched)
    assert len(weights(run, last)) == 4
    assert weights(run, last) == weights(tmp_path / "unwatched", last)


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Forks processes that do something, say so, and sleep."""
    pids: list[int] = []

    def fork(call: Callable[[], object]) -> int:
        ready, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for number in (signal.SIGUSR1, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                call()
                os.write(write, b"1")
                time.sleep(600)
            finally:
                os._exit(1)
        os.close(write)
        assert os.read(ready, 1) == b"1"
        os.close(ready)
        pids.append(pid)
        return pid

    yield fork
    for pid in pids:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # nobody ended it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def handling() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(3))
    signal.signal(signal.SIGINT, lambda *_: os._exit(3))


def test_a_process_that_handles_no_signals_yet_is_left_alone(tmp_path: Path, forked) -> None:
    run = RunDirectory(tmp_path / "run")
    pid = forked(run.open)
    assert lock_holder(run.path) == pid
    for request in ("save", "stop"):
        with refused("run-starting-or-ending", path=run.path):
            signal_run(run.path, request)


def test_nobody_is_signaled_for_a_run_without_a_lock(tmp_path: Path, forked) -> None:
    (tmp_path / "run").mkdir()
    forked(handling)
    for content in (None, b"", b"4711"):
        if content is not None:
            (tmp_path / "run" / ".lock").write_bytes(content)
        with refused("run-not-training"):
            signal_run(tmp_path / "run", "stop")


def test_a_process_with_the_number_of_one_on_another_machine_is_left_alone(
    tmp_path: Path, forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    pid = forked(handling)
    monkeypatch.setattr(
        run_signals, "lock_holder", lambda _: pid
    )  # as a network file system answers
    with refused("run-trained-elsewhere"):
        signal_run(tmp_path / "run", "stop")
    monkeypatch.setattr(run_signals, "lock_holder", lambda _: -1)
    with refused("run-trained-elsewhere"):
        signal_run(tmp_path / "run", "stop")


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that other users may enter, as they may not enter `tmp_path`."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user"
)
def test_a_process_of_another_user_is_left_alone_and_the_message_says_why(
    forked, open_to_all: Path
) -> None:
    run = RunDirectory(open_to_all / "run")
    pid = forked(lambda: (handling(), run.open()))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            signal_run(run.path, "stop")
        except ConfigError as error:
            os.write(write, json.dumps(error.to_dict()).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        described = json.load(answer)
    assert described["code"] == "run-not-signaled"
    assert described["fields"] == {"path": str(run.path), "pid": pid}
    assert "Permission denied" in described["problem"]


def test_a_number_that_was_given_to_another_process_is_noticed(
    tmp_path: Path, forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    pid = forked(lambda: (handling(), os.open(tmp_path / "run" / ".lock", os.O_CREAT)))
    answers = [
        pid,
        0,
    ]  # the run ends between the two questions, and the number belongs to somebody else
    monkeypatch.setattr(run_signals, "lock_holder", lambda _: answers.pop(0))
    with refused("run-starting-or-ending"):
        signal_run(tmp_path / "run", "stop")
    assert answers == []
