"""The launcher with ranks that are toys: what their environment says, which are left, and with
which status it ends. Real processes. (12 s)
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

    def place_of(self, rank: int, attempt: int = 0) -> dict[str, str]:
        """What the environment of a rank says, as soon as it has started."""
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
        pids = [json.loads(path.read_text())["pid"] for path in self.directory.glob("rank-*.json")]
        pids += [int(path.read_text()) for path in self.directory.glob("child")]
        return [pid for pid in pids if is_alive(pid)]

    @property
    def output(self) -> str:
        return (self.directory / "stderr").read_text()

    @property
    def temporary_files(self) -> list[Path]:
        return list((self.directory / "tmp").iterdir())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists():  # a system without /proc
            return True
        _, _, fields = stat.read_text().rpartition(")")
        return fields.split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a launcher of ranks that do these things, as toys.py says."""
    processes: list[Forked] = []

    def start(*deeds: str, nproc: str = "2", max_restarts: int = 0) -> Launched:
        (tmp_path / "tmp").mkdir()

        def launch_toys() -> None:
            os.environ["TOYS"] = str(tmp_path)
            tempfile.tempdir = str(tmp_path / "tmp")
            places = Slots(parse_nproc(nproc), sizes=lambda: Sizes(12, 2), gpus=None)
            command = [str(TOYS), *deeds]
            sys.exit(launch(lambda _: command, places=places, max_restarts=max_restarts))

        with (tmp_path / "stderr").open("w") as output:
            process = Forked(launch_toys, stdout=output, stderr=subprocess.STDOUT)
        processes.append(process)
        return Launched(process, tmp_path)

    yield start
    for process in processes:
        with process:
            process.kill()


def test_the_environment_of_a_rank_says_its_place_as_that_of_torchrun_does(
    start_ranks: Callable[..., Launched],
) -> None:
    group = start_ranks()
    assert group.wait() == 0
    places = [group.place_of(rank) for rank in range(2)]
    for rank, place in enumerate(places):
        assert place["RANK"] == str(rank)
        assert place["LOCAL_RANK"] == str(rank)
        assert place["WORLD_SIZE"] == "2"
        assert place["LOCAL_WORLD_SIZE"] == "2"
        assert place["MASTER_ADDR"] == "127.0.0.1"
        assert place["store"] == "True"
    assert places[0]["MASTER_PORT"] == places[1]["MASTER_PORT"]
    assert group.output == ""
    assert group.temporary_files == []


@pytest.mark.fast("1:exit 3-3", "all:exit 4-4")
@pytest.mark.parametrize(("deeds", "status"), [("1:exit 3", 3), ("0:exit 3", 3), ("all:exit 4", 4)])
def test_the_status_is_that_of_the_rank_that_caused_the_end(
    start_ranks: Callable[..., Launched], deeds: str, status: int
) -> None:
    assert start_ranks(deeds).wait() == status


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
    start_ranks: Callable[..., Launched], deeds: list[str], lines: list[str]
) -> None:
    group = start_ranks(*deeds, nproc="3")
    assert group.wait() == 2
    assert group.output.splitlines() == lines
    assert group.temporary_files == []


def test_status_7_never_hides_the_cause(start_ranks: Callable[..., Launched]) -> None:
    assert start_ranks("0:sleep 0.3", "0:exit 7", "1:exit 3").wait() == 3


def test_the_last_lines_of_a_rank_that_was_killed_are_printed_and_its_file_is_removed(
    start_ranks: Callable[..., Launched],
) -> None:
    group = start_ranks("1:say looking at sample 7", "1:kill 9", "0:hold", "0:exit 0")
    assert wait_until(lambda: "SIGKILL" in group.output.partition("error: rank 1 (")[2])
    assert group.process.poll() is None, "the error comes before the end of the other rank"
    (group.directory / "go-on").touch()
    assert group.wait() == 137
    assert ":\n  looking at sample 7" in group.output
    assert group.temporary_files == []


def test_what_is_not_in_the_error_is_kept_and_named_after_it(
    start_ranks: Callable[..., Launched],
) -> None:
    lines = [f"1:say line {number}" for number in range(5)]
    group = start_ranks(*lines, "1:kill 9", "0:sleep 0.5")
    assert group.wait() == 137
    (file,) = (group.directory / "tmp").glob("surefoot-*/rank-1.stderr")
    assert group.output.splitlines()[-1].endswith(f" {file.parent}")
    assert file.read_text().startswith("line 0\n")


def test_there_is_one_error_where_another_rank_dies_while_the_group_is_ended(
    start_ranks: Callable[..., Launched],
) -> None:
    group = start_ranks("1:kill 9", "0:hear ending the other ranks", "0:kill 11")
    assert group.wait() == 137
    (error,) = [line for line in group.output.splitlines() if "error" in line]
    assert error.startswith("error: rank 1 ")


def test_one_that_does_not_end_with_the_others_is_killed(
    start_ranks: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._TERMINATED_S", 0.3)
    monkeypatch.setattr("surefoot.distributed.launcher._KILLED_S", 0.6)
    assert start_ranks("0:deaf", "1:sleep 0.3", "1:kill 9").wait() == 137


def test_a_rank_that_is_stopped_before_it_has_met_the_others_is_named(
    start_ranks: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._STOPPED_S", 0.5)
    monkeypatch.setattr("surefoot.distributed.launcher._TERMINATED_S", 0.3)
    group = start_ranks("1:kill 19", "0:sleep")
    assert group.wait() == 7
    (_, error) = group.output.split("error: rank 1 (")
    _, stopped_s, *_ = numbers_in(error)
    assert stopped_s == 0


@pytest.mark.slow
def test_a_rank_that_is_stopped_and_goes_on_is_left_alone(
    start_ranks: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._STOPPED_S", 10.0)
    group = start_ranks("all:sleep 2")
    pid = int(group.place_of(1)["pid"])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(pid, signal.SIGCONT)
    assert group.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_its_status_kept(
    start_ranks: Callable[..., Launched], number: int
) -> None:
    group = start_ranks("all:save", nproc="3")
    for rank in range(3):
        group.wait_until_ready(rank)

    group.process.send_signal(number)

    assert group.wait() == 128 + number
    for rank in range(3):
        assert (group.directory / f"saved-{rank}").read_text() == "once\n"
    assert "nothing was started" in group.output.splitlines(), "none of them has opened a run"
    assert group.temporary_files == []


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(start_ranks: Callable[..., Launched]) -> None:
    group = start_ranks("0:deaf", "1:save")
    group.wait_until_ready(0)
    group.wait_until_ready(1)
    group.process.send_signal(signal.SIGTERM)
    assert wait_until((group.directory / "saved-1").exists)
    group.process.send_signal(signal.SIGTERM)
    assert group.wait() == 143


def test_a_launcher_that_is_killed_leaves_no_rank_behind_running_or_stopped(
    start_ranks: Callable[..., Launched],
) -> None:
    group = start_ranks("all:deaf", nproc="3")
    pids = [int(group.place_of(rank)["pid"]) for rank in range(3)]
    os.kill(pids[2], signal.SIGSTOP)
    group.process.kill()
    assert group.wait() == -signal.SIGKILL
    assert group.left() == []


@pytest.mark.slow
def test_what_a_rank_has_started_ends_with_it(
    start_ranks: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.distributed.launcher._TERMINATED_S", 0.3)
    group = start_ranks("1:child", "0:sleep 0.6", "0:kill 9")
    assert wait_until((group.directory / "child").exists)
    assert group.wait() == 137


def test_a_group_is_started_again_with_another_store(start_ranks: Callable[..., Launched]) -> None:
    group = start_ranks("1.0:kill 9", "0.0:sleep 0.5", "0.0:exit 7", "0.1:exit 7", max_restarts=2)
    assert group.wait() == 0
    ports = {group.place_of(0, attempt)["MASTER_PORT"] for attempt in range(3)}
    assert len(ports) > 1
    restarts = [line for line in group.output.splitlines() if line.startswith("restarting")]
    assert restarts == [
        "restarting with 2 processes (restart 1 of 2)",
        "restarting with 2 processes (restart 2 of 2)",
    ]


@pytest.mark.fast("2", "143")
@pytest.mark.parametrize("status", [2, 4, 5, 130, 143])
def test_what_was_decided_is_not_tried_again(
    start_ranks: Callable[..., Launched], status: int
) -> None:
    group = start_ranks(f"all:exit {status}", max_restarts=3)
    assert group.wait() == status
    assert list(group.directory.glob("rank-*-1.json")) == []


def test_fewer_ranks_go_on_where_a_range_was_asked_for(
    start_ranks: Callable[..., Launched],
) -> None:
    group = start_ranks("2.0:kill 9", "1.1:kill 9", nproc="1:4", max_restarts=2)
    assert group.wait() == 0
    counts = [group.place_of(0, attempt)["WORLD_SIZE"] for attempt in range(3)]
    assert counts == ["4", "3", "2"], "any number can share 6 micro-batches"
