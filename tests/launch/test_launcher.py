"""The launcher with ranks that are toys: who is told what, who is left, and with which status it
ends. Real processes. (12 s)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forked import Forked
from stated import numbers_in
from surefoot.distributed.launcher import launch
from surefoot.distributed.process_count import Sizes, Slots, parse_nproc
from waiting import wait_until

TOYS = Path(__file__).with_name("toys.py")


@dataclass
class Launched:
    """A launcher that runs."""

    process: Forked
    directory: Path

    def told(self, rank: int, attempt: int = 0) -> dict[str, str]:
        """What a rank found in its environment, as soon as it has started."""
        path = self.directory / f"rank-{rank}-{attempt}.json"
        assert wait_until(path.exists)
        return json.loads(path.read_text())

    def wait_until_ready(self, rank: int) -> None:
        """Wait until a rank that saves or is deaf answers signals so."""
        assert wait_until((self.directory / f"ready-{rank}").exists)

    def wait(self) -> int:
        """Its exit status, when no process that it started is left."""
        assert wait_until(lambda: self.process.poll() is not None)
        assert self.process.returncode is not None
        assert wait_until(lambda: not self.left())
        return self.process.returncode

    def left(self) -> list[int]:
        """Processes of ranks that are there, and no mere entries of what has ended."""
        found = [json.loads(path.read_text())["pid"] for path in self.directory.glob("rank-*.json")]
        found += [int(path.read_text()) for path in self.directory.glob("child")]
        return [pid for pid in found if alive(pid)]

    @property
    def said(self) -> str:
        return (self.directory / "stderr").read_text()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    running: list[Forked] = []

    def start(*deeds: str, nproc: str = "2", max_restarts: int = 0) -> Launched:
        (tmp_path / "tmp").mkdir()

        def call() -> None:
            os.environ["TOYS"] = str(tmp_path)
            tempfile.tempdir = str(tmp_path / "tmp")
            places = Slots(parse_nproc(nproc), sizes=lambda: Sizes(12, 2), gpus=None)
            sys.exit(
                launch(lambda _: [str(TOYS), *deeds], places=places, max_restarts=max_restarts)
            )

        with (tmp_path / "stderr").open("w") as said:
            running.append(Forked(call, stdout=said, stderr=subprocess.STDOUT))
        return Launched(running[0], tmp_path)

    yield start
    for process in running:
        with process:
            process.kill()


def test_each_rank_is_told_its_place_as_torchrun_does(launched: Callable[..., Launched]) -> None:
    group = launched()
    assert group.wait() == 0
    told = [group.told(rank) for rank in range(2)]
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in told] == [("0", "0"), ("1", "1")]
    same = {
        (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"], one["store"])
        for one in told
    }
    assert same == {("2", "2", "127.0.0.1", "True")}
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]
    assert group.said == ""
    assert list((group.directory / "tmp").iterdir()) == []


@pytest.mark.fast("1:exit 3-3", "all:exit 4-4")
@pytest.mark.parametrize(("deeds", "status"), [("1:exit 3", 3), ("0:exit 3", 3), ("all:exit 4", 4)])
def test_the_status_is_that_of_the_rank_that_caused_the_end(
    launched: Callable[..., Launched], deeds: str, status: int
) -> None:
    assert launched(deeds).wait() == status


@pytest.mark.parametrize(
    ("deeds", "lines"),
    [
        (["all:refuse no lr"], ["error: no lr"]),
        (
            ["0:refuse no lr", "1:refuse no data", "2:refuse no data"],
            ["error: no lr", "error: ranks 1 to 2: no data"],
        ),
        (["1:refuse no data", "0:sleep 0.5", "0:exit 7"], ["error: rank 1: no data"]),
        (["0:refuse no lr", "1:sleep 0.5", "1:exit 7"], ["error: no lr"]),
    ],
)
def test_errors_of_ranks_are_one_list_that_says_who_met_which(
    launched: Callable[..., Launched], deeds: list[str], lines: list[str]
) -> None:
    group = launched(*deeds, nproc="3")
    assert group.wait() == 2
    assert group.said.splitlines() == lines
    assert list((group.directory / "tmp").iterdir()) == []


def test_status_7_never_hides_the_cause(launched: Callable[..., Launched]) -> None:
    assert launched("0:sleep 0.3", "0:exit 7", "1:exit 3").wait() == 3


def test_the_last_lines_of_a_rank_that_was_killed_are_told_and_its_file_is_removed(
    launched: Callable[..., Launched],
) -> None:
    group = launched("1:say looking at sample 7", "1:kill 9", "0:hold", "0:exit 0")
    assert wait_until(lambda: "SIGKILL" in group.said.partition("error: rank 1 (")[2])
    assert group.process.poll() is None, "it is said at once"
    (group.directory / "go-on").touch()
    assert group.wait() == 137
    assert ":\n  looking at sample 7" in group.said
    assert list((group.directory / "tmp").iterdir()) == []


def test_what_is_not_in_the_error_is_kept_and_named_after_it(
    launched: Callable[..., Launched],
) -> None:
    group = launched(*(f"1:say line {number}" for number in range(5)), "1:kill 9", "0:sleep 0.5")
    assert group.wait() == 137
    kept = next((group.directory / "tmp").glob("surefoot-*/rank-1.stderr"))
    assert group.said.splitlines()[-1].endswith(f" {kept.parent}")
    assert kept.read_text().startswith("line 0\n")


def test_one_error_is_said_where_another_rank_dies_while_the_group_is_ended(
    launched: Callable[..., Launched],
) -> None:
    group = launched("1:kill 9", "0:hear ending the other ranks", "0:kill 11")
    assert group.wait() == 137
    assert [line.split()[:3] for line in group.said.splitlines() if "error" in line] == [
        ["error:", "rank", "1"]
    ]


def test_one_that_does_not_end_with_the_others_is_killed(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._TERMINATED_S", 0.3)
    monkeypatch.setattr("surefoot.distributed.launcher._KILLED_S", 0.6)
    assert launched("0:deaf", "1:sleep 0.3", "1:kill 9").wait() == 137


def test_a_rank_that_is_stopped_before_it_has_met_the_others_is_named(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._STOPPED_S", 0.5)
    monkeypatch.setattr("surefoot.distributed.launcher._TERMINATED_S", 0.3)
    group = launched("1:kill 19", "0:sleep")
    assert group.wait() == 7
    assert "error: rank 1 (" in group.said
    assert numbers_in(group.said.partition("error: rank 1 (")[2])[1] == 0  # s that it is stopped


@pytest.mark.slow
def test_a_rank_that_is_stopped_and_goes_on_is_left_alone(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._STOPPED_S", 10.0)
    group = launched("all:sleep 2")
    os.kill(pid := int(group.told(1)["pid"]), signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(pid, signal.SIGCONT)
    assert group.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_its_status_kept(
    launched: Callable[..., Launched], number: int
) -> None:
    group = launched("all:save", nproc="3")
    for rank in range(3):
        group.wait_until_ready(rank)
    group.process.send_signal(number)
    assert group.wait() == 128 + number
    assert [(group.directory / f"saved-{rank}").read_text() for rank in range(3)] == ["once\n"] * 3
    assert "nothing was started" in group.said.splitlines(), "none of them has opened a run"
    assert list((group.directory / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(launched: Callable[..., Launched]) -> None:
    group = launched("0:deaf", "1:save")
    group.wait_until_ready(0), group.wait_until_ready(1)
    group.process.send_signal(signal.SIGTERM)
    assert wait_until((group.directory / "saved-1").exists)
    group.process.send_signal(signal.SIGTERM)
    assert group.wait() == 143


def test_a_launcher_that_is_killed_leaves_no_rank_behind_running_or_stopped(
    launched: Callable[..., Launched],
) -> None:
    group = launched("all:deaf", nproc="3")
    pids = [int(group.told(rank)["pid"]) for rank in range(3)]
    os.kill(pids[2], signal.SIGSTOP)
    group.process.kill()
    assert group.wait() == -signal.SIGKILL
    assert group.left() == []


@pytest.mark.slow
def test_what_a_rank_has_started_ends_with_it(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._TERMINATED_S", 0.3)
    group = launched("1:child", "0:sleep 0.6", "0:kill 9")
    assert wait_until((group.directory / "child").exists)
    assert group.wait() == 137


def test_a_group_is_started_again_with_another_store(launched: Callable[..., Launched]) -> None:
    group = launched("1.0:kill 9", "0.0:sleep 0.5", "0.0:exit 7", "0.1:exit 7", max_restarts=2)
    assert group.wait() == 0
    assert len({group.told(0, attempt)["MASTER_PORT"] for attempt in range(3)}) > 1
    assert [line for line in group.said.splitlines() if line.startswith("restarting")] == [
        "restarting with 2 processes (restart 1 of 2)",
        "restarting with 2 processes (restart 2 of 2)",
    ]


@pytest.mark.fast("2", "143")
@pytest.mark.parametrize("status", [2, 4, 5, 130, 143])
def test_what_was_decided_is_not_tried_again(
    launched: Callable[..., Launched], status: int
) -> None:
    group = launched(f"all:exit {status}", max_restarts=3)
    assert group.wait() == status
    assert not list(group.directory.glob("rank-*-1.json"))


def test_fewer_ranks_go_on_where_a_range_was_asked_for(launched: Callable[..., Launched]) -> None:
    group = launched("2.0:kill 9", "1.1:kill 9", nproc="1:4", max_restarts=2)
    assert group.wait() == 0
    counts = [group.told(0, attempt)["WORLD_SIZE"] for attempt in range(3)]
    assert counts == ["4", "3", "2"], "any number can share 6 micro-batches"
