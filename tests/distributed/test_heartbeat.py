"""Hearts of several ranks over a real store, in one process: what would end a process is noted
instead.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from surefoot.distributed.heartbeat import SPEAKER, VERDICT, Heartbeat
from surefoot.distributed.liveness import Beat, LostRank, RankConnections
from surefoot.errors import DataError, RankLostError
from waiting import HANG_S, wait_until

EVERY_S = 0.05
BROKEN = RuntimeError(
    "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
)


class Ranks:
    """Hearts that beat twenty times as fast as those of a run, and how each of them ended."""

    def __init__(
        self, size: int, *, silent_s: float = HANG_S, grace_s: float = 5 * EVERY_S
    ) -> None:
        self.store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=HANG_S),
        )
        self.ended: dict[int, int] = {}
        self.over = threading.Event()
        self.logs: Path | None = None
        self.silent_s = silent_s
        self.grace_s = grace_s
        self.hearts = [self._heart(rank, size) for rank in range(size)]

    def _heart(self, rank: int, size: int) -> Heartbeat:
        client = TCPStore(
            "127.0.0.1", self.store.port, is_master=False, timeout=timedelta(seconds=HANG_S)
        )
        return Heartbeat(
            PrefixStore("heartbeat", client),
            rank=rank,
            size=size,
            host="here",
            every_s=EVERY_S,
            silent_s=self.silent_s,
            grace_s=self.grace_s,
            end=lambda status: self.ended.__setitem__(rank, status),
        )

    def start(self) -> None:
        for heart in self.hearts:
            heart.start()
            heart.opened(logs=self.logs, fresh_line="")
            heart.at(3, "training")


@pytest.fixture
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    for heart in ranks.hearts:
        heart.stop()


def error_lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]


def test_a_rank_that_falls_silent_ends_the_others_with_status_7_and_its_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    three = Ranks(3, silent_s=2.0)
    silent = three.hearts[2]
    three.start()
    assert wait_until(lambda: silent.rounds > 2)
    # as if it were stopped: neither does it speak, nor does it say that it goes
    silent.stopping.set()
    silent._tell = lambda: three.over.wait(HANG_S)  # type: ignore[method-assign, assignment]
    assert wait_until(lambda: len(three.ended) == 2)
    three.over.set()
    assert three.ended == {0: 7, 1: 7}
    errors = error_lines(capfd)
    assert len(errors) == 2, "one short message on each rank that is left"
    assert all("rank 2 (here, process" in line for line in errors)
    assert all(re.search(r"\b2 s, .* at step 3, training$", line) for line in errors)
    for heart in three.hearts:
        heart.stop()


def test_where_a_run_has_a_directory_one_rank_says_it_and_the_others_write_it(
    three: Ranks, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    three.logs = tmp_path
    three.start()
    three.hearts[1].failed(DataError("sample 7 is broken"))
    assert wait_until(lambda: {0, 2} <= three.ended.keys())
    assert len(error_lines(capfd)) == 1
    assert "DataError: sample 7 is broken" in (tmp_path / "rank-2.log").read_text()
    assert not (tmp_path / "rank-0.log").exists()


def test_where_rank_0_is_lost_rank_1_says_it(
    three: Ranks, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    three.logs = tmp_path
    three.start()
    three.hearts[0].failed(DataError("sample 7 is broken"))
    assert wait_until(lambda: {1, 2} <= three.ended.keys())
    assert len(error_lines(capfd)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rank-2.log"]


def test_of_an_error_that_all_ranks_meet_rank_0_speaks(three: Ranks) -> None:
    three.start()
    alike = DataError("no such file")
    own = DataError("no such file on this machine")
    three.hearts[0].failed(alike)
    assert three.hearts[0].speaks_of(alike)
    assert not three.hearts[1].speaks_of(alike)
    assert three.hearts[2].speaks_of(own)


def test_an_error_after_the_end_of_a_run_is_told_and_ends_nobody(three: Ranks) -> None:
    three.start()
    for heart in three.hearts:
        heart.goodbye()
        heart.closed()
        heart.failed(DataError("later"))
    assert not three.hearts[1].speaks_of(DataError("later"))
    time.sleep(10 * EVERY_S)
    assert three.ended == {}


def test_who_builds_another_run_after_one_that_could_not_be_is_waited_for(three: Ranks) -> None:
    three.start()
    three.hearts[2].failed(DataError("no such file"))
    three.hearts[2].building()
    time.sleep(10 * EVERY_S)
    assert three.ended == {}


def test_ranks_that_end_as_they_should_are_not_missed(three: Ranks) -> None:
    three.start()
    for heart in three.hearts:
        heart.goodbye()
        heart.closed()
        heart.stop()
    time.sleep(10 * EVERY_S)
    assert three.ended == {}


def test_a_rank_that_fails_is_named_by_the_others_with_its_error(
    three: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    three.start()
    three.hearts[1].failed(DataError("sample 7 is broken"))
    assert wait_until(lambda: {0, 2} <= three.ended.keys())
    assert 1 not in three.ended, "it says itself what it failed of"
    error, *_ = error_lines(capfd)
    assert "rank 1 (here, process" in error
    assert error.endswith(" at step 3, training: DataError: sample 7 is broken")


def test_an_error_that_all_ranks_meet_ends_each_of_them_by_itself() -> None:
    three = Ranks(3, grace_s=1.0)
    three.start()
    for heart in three.hearts:
        heart.failed(DataError("no such file"))
    time.sleep(2 * three.grace_s)
    assert three.ended == {}
    for heart in three.hearts:
        heart.stop()


def test_a_broken_connection_is_explained_by_the_rank_that_broke_it(three: Ranks) -> None:
    three.start()
    three.hearts[2].failed(DataError("sample 7 is broken"))
    found = three.hearts[1].cause(BROKEN)
    assert isinstance(found, RankLostError)
    assert (found.code, found.fields["rank"]) == ("rank-lost", 2)
    assert "sample 7 is broken" in str(found)


def test_an_error_of_this_ranks_own_is_no_broken_connection(three: Ranks) -> None:
    three.start()
    assert three.hearts[1].cause(ValueError("mine")) is None


def test_the_launcher_may_name_a_rank_at_once(
    three: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    three.start()
    PrefixStore("heartbeat", three.store).set(VERDICT, LostRank(1, "rank 1 died").written())
    assert wait_until(lambda: len(three.ended) == 3)
    assert all("rank 1 died" in line for line in error_lines(capfd))


def test_a_store_that_is_gone_ends_a_rank_that_runs(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(2)
    ranks.start()
    heart = ranks.hearts[1]
    assert wait_until(lambda: heart.rounds > 2)
    del ranks.store
    assert wait_until(lambda: ranks.ended == {0: 7, 1: 7})
    assert " the launcher " in error_lines(capfd)[0]
    for each in ranks.hearts:
        each.stop()


def test_a_store_that_does_not_answer_ends_a_rank_that_runs() -> None:
    ended: list[int] = []
    store = HashStore()
    heart = Heartbeat(
        store, rank=0, size=2, host="here", every_s=EVERY_S, silent_s=1.0, end=ended.append
    )
    over = threading.Event()
    heart._listen = lambda elapsed_s: over.wait(HANG_S)  # type: ignore[method-assign, assignment]
    heart.start()
    assert wait_until(lambda: ended == [7])
    over.set()
    heart.stop()


def test_of_a_long_error_the_first_lines_are_told(
    three: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    three.start()
    three.hearts[1].failed(
        DataError("sample 7 is broken\n  to see it alone: dataset[7]\n\nthird\nfourth\nfifth")
    )
    assert wait_until(lambda: {0, 2} <= three.ended.keys())
    said = capfd.readouterr().err
    assert (
        "DataError: sample 7 is broken\n  to see it alone: dataset[7]\n  third\n  fourth\n" in said
    )
    assert "fifth" not in said


def test_ranks_whose_launcher_speaks_write_to_their_logs_only(
    three: Ranks, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    three.logs = tmp_path
    PrefixStore("heartbeat", three.store).set(SPEAKER, "launcher")
    three.start()
    three.hearts[1].failed(DataError("sample 7 is broken"))
    found = three.hearts[0].cause(BROKEN)
    assert isinstance(found, RankLostError)
    assert not three.hearts[0].speaks_of(found)
    assert wait_until(lambda: 2 in three.ended)
    assert error_lines(capfd) == []
    assert "sample 7 is broken" in (tmp_path / "rank-2.log").read_text()


def test_a_rank_that_ends_tells_how_far_it_was(three: Ranks) -> None:
    three.start()
    assert wait_until(lambda: three.hearts[0].rounds > 1)
    three.hearts[0].every_s = 60.0
    time.sleep(3 * EVERY_S)
    three.hearts[0].at(9, "training")
    three.hearts[0]._end(LostRank(1, "rank 1 was killed", step=3, doing="training"))
    assert Beat.read(PrefixStore("heartbeat", three.store).get("0")).step == 9
    assert three.hearts[0].lost == LostRank(1, "rank 1 was killed", step=9, doing="training")
    three.hearts[0].wake.set()


# --- lines ----------------------------------------------------------------------------------------


def line_between(three: Ranks, rank: int) -> socket.socket:
    """The end that `rank` holds of a line to rank 0, which follows the other."""
    lines, other = to_rank_0("nonce", rank)
    three.hearts[0].follow(lines)
    return other


def to_rank_0(nonce: str, rank: int) -> tuple[RankConnections, socket.socket]:
    """Rank 0's lines, and the other end of one of them."""
    lines = RankConnections(nonce)
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        other.sendall(f"{nonce} {rank}".encode())
        lines.accept(server)
    assert other.recv(64) == nonce.encode()
    return lines, other


def test_a_closed_line_ends_the_others_and_no_silence_is_needed(
    three: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    for heart in three.hearts:
        heart.watch.silent_s = heart.silent_s = 1e9
    line = line_between(three, 2)
    three.start()
    assert wait_until(
        lambda: (
            2 in three.hearts[0].watch.known and three.hearts[0].watch.known[2].stage == "running"
        )
    )
    three.hearts[2].stopping.set()  # as if it were killed: it says no goodbye
    three.hearts[2]._tell = lambda: three.over.wait(HANG_S)  # type: ignore[method-assign, assignment]
    line.close()
    assert wait_until(lambda: {0, 1} <= three.ended.keys())
    three.over.set()
    assert (three.ended[0], three.ended[1]) == (7, 7)
    error, *_ = error_lines(capfd)
    assert "rank 2 (here, process" in error
    assert " at step 3, training" in error
    assert not re.search(r"\d s\b", error), "it was not silent"


def test_a_line_that_is_closed_after_a_goodbye_ends_nobody(three: Ranks) -> None:
    line = line_between(three, 2)
    three.start()
    for heart in three.hearts:
        heart.goodbye()
        heart.closed()
    three.hearts[2].stop()
    line.close()
    assert wait_until(lambda: 2 in three.hearts[0].dead)
    time.sleep(10 * EVERY_S)
    assert three.ended == {}


def test_a_line_that_the_network_breaks_proves_nothing(three: Ranks) -> None:
    line = line_between(three, 2)
    three.start()
    line.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
    )  # close() resets the connection
    line.close()
    time.sleep(10 * EVERY_S)
    assert three.ended == {}


def test_a_stranger_that_connects_is_no_rank() -> None:
    lines, rank = RankConnections("nonce"), RankConnections("nonce")
    with socket.create_server(("127.0.0.1", 0)) as server:
        strangers = [socket.create_connection(server.getsockname()) for _ in range(3)]
        for stranger, text in zip(strangers, ("hello", "another 1", "nonce two"), strict=True):
            stranger.sendall(text.encode())
        rank.connect(*server.getsockname(), rank=1)
        lines.accept(server)
    assert list(lines.ranks.values()) == [1]
    for each in (lines, rank):
        each.drop()
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(("answer", "heard"), [("nonce", [0]), ("nothing for you", []), ("", [-1])])
def test_who_answers_in_the_place_of_rank_0_without_the_nonce_may_close_its_line(
    answer: str, heard: list[int]
) -> None:
    lines = RankConnections("nonce")
    ended = list[int]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines.connect(*server.getsockname(), rank=1)
        line, _ = server.accept()
    watching = threading.Thread(target=lines.watch, args=[ended.append])
    watching.start()
    assert line.recv(64) == b"nonce 1"
    line.sendall(answer.encode())
    time.sleep(0.2)
    line.close()
    watching.join(timeout=HANG_S)
    assert ended == heard
    lines.drop()


def test_a_worker_that_a_rank_has_forked_does_not_hold_its_line_open() -> None:
    told, tell = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank = os.fork()
        if rank == 0:
            lines = RankConnections("nonce")
            lines.connect(*server.getsockname(), rank=1)
            server.close()
            threading.Thread(target=lines.watch, args=[print], daemon=True).start()
            time.sleep(0.5)
            worker = os.fork()
            if worker == 0:
                os.write(tell, b"%8d" % os.getpid())
                time.sleep(60)
                os._exit(0)
            os.waitpid(worker, 0)
            os._exit(0)
        line, _ = server.accept()
    worker = int(os.read(told, 8))
    time.sleep(0.2)  # in which the worker is left out
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    line.settimeout(30)
    assert [line.recv(64), line.recv(64)] == [b"nonce 1", b""]
    os.kill(worker, signal.SIGKILL)  # it was there
    line.close()


def test_a_stopped_rank_of_this_machine_goes_on_when_it_is_named_and_so_ends(three: Ranks) -> None:
    stopped = os.fork()
    if stopped == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(stopped, os.WUNTRACED)
    three.hearts[2].beat = Beat(2, "here", stopped)
    three.hearts[2]._tell()
    three.hearts[0]._let_go_on(2)
    assert os.WIFCONTINUED(os.waitpid(stopped, os.WCONTINUED)[1])
    os.kill(stopped, signal.SIGKILL)
    os.waitpid(stopped, 0)


def test_a_store_that_ends_with_a_rank_that_left_its_loop_names_this_rank() -> None:
    heart = Heartbeat(HashStore(), rank=1, size=2, host="here", in_launcher=False)
    heart.opened(logs=None, fresh_line="")
    heart.at(6, "training")
    for stage in ("leaving", "left", "gone"):
        heart.watch.known = {0: Beat(0, "there", 42, stage=stage, step=5)}  # type: ignore[arg-type]
        lost = heart._lost_with_store("was lost")
        assert lost == Beat(0, "there", 42, step=5).left_alone(6)
    heart.goodbye()
    assert "connection" in heart._lost_with_store("was lost").how, "all ranks leave"
