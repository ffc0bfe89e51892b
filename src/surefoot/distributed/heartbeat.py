"""The thread of a rank that sends heartbeats, and ends the process if another rank is lost.

Collectives time out after a day, since compilation and evaluation can take hours. So each rank also
reports to the ranks' store, over a separate connection, that the rank is alive. Rank 0 reads all
reports. The other ranks read rank 0's report, and the name of a lost rank from rank 0 or the
launcher. Without a launcher, connections to rank 0 (`RankConnections`) reveal the end of a process
at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from surefoot.config.paths import make_no_follow, open_no_follow
from surefoot.distributed.liveness import (
    STOPPED,
    Beat,
    LostRank,
    RankConnections,
    RankPhase,
    RankWatch,
    Stage,
    Stall,
    of_connection,
)
from surefoot.distributed.own_times import DeviceTimes, HostTimes, OwnTimes, Work
from surefoot.errors import RankLostError, first_line

MEETING = "surefoot"  # prefix of the keys by which ranks agree on a nonce
NONCE = "nonce"  # the key of a nonce drawn by a launcher
MAILBOX = "heartbeat"  # prefix of all heartbeat keys, after the nonce
VERDICT = "lost"  # the key of the lost rank
SPEAKER = "speaker"  # the key that exists if a launcher reports lost ranks
_LINES = 4  # of an exception's message
_LINE = 200
_UNNEEDED: tuple[Stage, ...] = ("failed", "left", "gone")  # such a rank needs no other rank either


class Heartbeat:
    """The heartbeat of one rank, from `start` to `stop`. A pause of this process does not count as
    silence of other ranks.

    store: a separate connection to the ranks' store. in_launcher: whether the launcher, instead of
    rank 0, serves the store.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        host: str,
        in_launcher: bool = True,
        every_s: float = 1.0,
        silent_s: float = 20.0,
        grace_s: float = 5.0,
        stall_s: float = 60.0,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.in_launcher = in_launcher
        self.every_s = every_s
        self.silent_s = silent_s
        self.end = end
        self.logs: Path | None = None
        self.fresh_line = ""  # before a message on the terminal
        self.beat = Beat(rank, host, os.getpid())
        self.times: OwnTimes = HostTimes()
        self.sent = replace(self.beat)  # the last beat sent
        self.watch = RankWatch(silent_s=silent_s, grace_s=grace_s)
        self.stall = Stall(after_s=stall_s)
        self.sent_condition = threading.Condition()
        self.wake = threading.Event()
        self.stopping = threading.Event()
        self.awaited = threading.Event()
        self.named = threading.Event()
        self.lost: LostRank | None = None
        self.rounds = 0  # of requests that the store answered
        self.cut_off = False
        self.spoken_for = False
        self.present: set[int] = set()
        self.dead: set[int] = set()  # ranks with a closed line
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start to send beats and to watch the store; after `silent_s` seconds without an answer
        the store counts as lost.
        """
        self.store.set_timeout(timedelta(seconds=self.silent_s))
        self.threads = [
            threading.Thread(target=self._live, name="surefoot heartbeat", daemon=True),
            threading.Thread(target=self._watch_store, name="surefoot store watch", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def follow(self, lines: RankConnections) -> None:
        """Watch the connections to other ranks in a thread. A rank whose connection closes counts
        as dead at once.
        """

        def note(rank: int) -> None:
            self.dead.add(rank)
            self.wake.set()

        thread = threading.Thread(
            target=lines.watch, args=[note], name="surefoot connections", daemon=True
        )
        thread.start()

    def hears(self, rank: int) -> bool:
        return self.store.check([str(rank)])

    def at(self, step: int, doing: str) -> None:
        """Set the step and the activity that the next beat reports. The wait for the step's data
        begins.
        """
        spent = self.times.start(step)
        self.beat.step = step
        self.beat.doing = doing
        self.beat.spent = spent
        self.enter("data")

    def enter(self, phase: RankPhase) -> None:
        """Set the phase that the next beat reports. A call takes 0.1 us."""
        self.beat.phase = phase
        self.beat.entered += 1

    @property
    def phase(self) -> RankPhase:
        """The phase that the next beat reports."""
        return self.beat.phase

    def enter_work(self, work: Work) -> None:
        """Assign the time of this rank from now on to a kind of work."""
        self.times.enter(work)

    def known_beats(self) -> Mapping[int, Beat]:
        """Return the last beat of each rank, by rank."""
        return self.watch.known

    @contextmanager
    def during(self, phase: RankPhase) -> Iterator[None]:
        """Report this phase inside the block, and the one before after it."""
        before = self.beat.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def busy(self, doing: str) -> None:
        self.beat.doing = doing
        self.beat.entered += 1

    def building(self) -> None:
        """Report that another run is being built, after a run that ended or could not be built."""
        if self.beat.stage in ("failed", "left"):
            self.beat.stage = "building"
            self.beat.error = ""

    def opened(self, *, logs: Path | None, fresh_line: str, device: str = "cpu") -> None:
        """Report that the run is open: other ranks wait for this rank in each step. `logs` is the
        directory of rank-N.log files.
        """
        has_device_times = self.size > 1 and device == "cuda"
        self.times = DeviceTimes() if has_device_times else HostTimes()
        self.logs = logs
        self.fresh_line = fresh_line
        self.beat.spent = {}
        self.beat.run_dir = "" if logs is None else str(logs.parent)
        self.beat.stage = "running"
        self.beat.step = -1
        self.beat.doing = "opening the run"
        self.enter("step")

    def goodbye(self) -> None:
        """Report that this rank begins no further step. Other ranks may still wait for this rank at
        the end of the run.
        """
        self.beat.stage = "leaving"

    def left_alone(self) -> None:
        """Tell all ranks that this rank left its loop, and that others have not."""
        self.store.set(VERDICT, self.beat.left_alone(self.beat.step + 1).written())
        if self._holds_store:
            time.sleep(2.5 * self.every_s)  # until all ranks have read the key

    def closed(self) -> None:
        """Report that the run has ended normally. Other ranks no longer wait for this rank."""
        if self.beat.stage == "leaving":
            self.beat.stage = "left"

    def failed(self, problem: BaseException) -> None:
        """Report this rank's error before the process ends. Returns once the error is sent, or
        after two intervals.
        """
        if self.beat.stage in ("failed", "gone") or isinstance(problem, RankLostError):
            return
        self.beat.error = _in_words(problem)
        if self.beat.stage != "left":  # no rank waits for it after its run
            self.beat.stage = "failed"
        with self.sent_condition:
            self.wake.set()
            if self.threads:
                self.sent_condition.wait_for(self._is_error_sent, timeout=2 * self.every_s)

    def _is_error_sent(self) -> bool:
        return self.sent.stage == self.beat.stage and self.sent.error == self.beat.error

    def cause(self, problem: BaseException) -> RankLostError | None:
        """Return the lost rank behind a connection error, after waiting for its name. Returns None
        if no rank is lost.
        """
        if self.beat.stage == "failed" or not self.threads or not of_connection(problem):
            return None
        self.awaited.set()
        self.named.wait(self.silent_s + 10 * self.every_s)
        return None if self.lost is None else self._error_of(self.lost)

    def speaks_of(self, problem: BaseException) -> bool:
        """Return whether this rank prints its error. Waits a moment for rank 0's error: if both
        errors are equal, only rank 0 prints.
        """
        if isinstance(problem, RankLostError) and self.lost is not None:
            return self._speaks_of(self.lost)
        if self.rank == 0 or not self.threads:
            return True
        self._wait_until(lambda: self._error_of_main() != "", limit_s=3 * self.every_s)
        if self._error_of_main() != _in_words(problem):
            return True
        # torchrun ends all after the first
        self._wait_until(lambda: 0 in self.dead, limit_s=10 * self.every_s)
        return False

    def stop(self) -> None:
        """Report that this rank is gone, and end the threads."""
        if self.threads and self.beat.stage != "failed":
            self.beat.stage = "gone"
        self.stopping.set()
        self.wake.set()
        for thread in self.threads:
            thread.join(timeout=15)
        self.threads = []

    def _live(self) -> None:
        before = time.monotonic()
        while True:
            ending = self.stopping.is_set()
            try:
                self._tell()
                if ending:
                    self._wait_for_others()
                    return
                now = time.monotonic()
                lost = self._listen(elapsed_s=min(now - before, 2 * self.every_s))
                before = now
            except RuntimeError as problem:
                if ending:
                    return
                lost = self._lost_with_store(f"was lost ({first_line(problem)[:120]})")
            if lost is not None and self.beat.stage not in _UNNEEDED:
                self._end(lost)
                return
            if self.cut_off:
                return
            self.wake.wait(self.every_s)
            self.wake.clear()

    def _tell(self) -> None:
        self.beat.number += 1
        sent = replace(self.beat)
        self.store.set(str(self.rank), sent.written())
        with self.sent_condition:
            self.sent = sent
            self.sent_condition.notify_all()

    def _listen(self, *, elapsed_s: float) -> LostRank | None:
        self.spoken_for = self.spoken_for or self.store.check([SPEAKER])
        if self.store.check([VERDICT]):
            return LostRank.read(self.store.get(VERDICT))
        # before the beats are read: a rank says goodbye before its line closes
        dead = frozenset(self.dead)
        beats = self._beats()
        self.rounds += 1
        if self.rank == 0 and len(beats) == self.size:
            notice = self.stall.notice(beats, elapsed_s=elapsed_s)
            if notice is not None:
                with suppress(OSError):  # nobody reads it
                    text = f"{self.fresh_line}note: {notice}\n"
                    os.write(2, text.encode(errors="replace"))
        lost = self.watch.lost_rank(
            beats, elapsed_s=elapsed_s, hurried=self.awaited.is_set(), dead=dead
        )
        if lost is not None and self.beat.stage not in _UNNEEDED:
            self.store.set(VERDICT, lost.written())
            self.rounds += 1
            if self._holds_store:
                # until all ranks have read the key: the store ends with this process
                time.sleep(2.5 * self.every_s)
        return lost

    def _beats(self) -> dict[int, Beat]:
        others = range(1, self.size) if self.rank == 0 else [0]
        for rank in others:
            if rank not in self.present and self.store.check([str(rank)]):
                self.present.add(rank)
        beats = {self.rank: self.sent}
        ranks = sorted(self.present)
        if ranks:
            texts = self.store.multi_get([str(rank) for rank in ranks])
            for rank, text in zip(ranks, texts, strict=True):
                beats[rank] = Beat.read(text)
        return beats

    def _watch_store(self) -> None:
        # the other thread may wait for the store forever
        silent_s = 0.0
        last_rounds = self.rounds
        before = time.monotonic()
        while not self.stopping.wait(self.every_s):
            now = time.monotonic()
            if last_rounds == self.rounds:
                silent_s += min(now - before, 2 * self.every_s)
            else:
                silent_s = 0.0
            last_rounds = self.rounds
            before = now
            if silent_s >= self.silent_s and self.beat.stage not in _UNNEEDED:
                self._end(self._lost_with_store(f"has not answered for {self.silent_s:.0f} s"))
                return

    def _lost_with_store(self, how: str) -> LostRank:
        self.cut_off = True
        main = self.watch.known.get(0)
        if main is not None and main.stage == "failed":
            return LostRank(0, main.failure)
        if main is not None and main.has_left and self.beat.stage == "running":
            return main.left_alone(self.beat.step)  # its store ended with it
        if self.in_launcher:
            return LostRank(0, f"the connection to the launcher {how}", more=STOPPED)
        if main is None:
            return LostRank(0, f"the connection to rank 0 {how}", more=STOPPED)
        return replace(main.lost("", STOPPED), how=f"the connection to {main.who} {how}")

    @property
    def _holds_store(self) -> bool:
        return self.rank == 0 and not self.in_launcher

    def _end(self, lost: LostRank) -> None:
        self.lost = lost.beside(self.beat)
        if not self.cut_off:
            with suppress(RuntimeError):
                self._tell()  # this rank's progress, for the message about the lost rank
                self._let_go_on(lost.rank)
        self.named.set()
        if self.awaited.is_set():
            if not self.stopping.wait(10 * self.every_s):  # the main thread hangs while exiting
                self.end(RankLostError.exit_status)
            return
        self._say(self.lost)
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(timeout=2)  # the flush hangs if the main thread holds a stream's lock
        self.end(RankLostError.exit_status)

    def _let_go_on(self, rank: int) -> None:
        # a stopped rank must continue to read that it is lost: torchrun waits 30 s for its end
        if sys.platform == "win32" or rank == self.rank or self._left_to_launcher:
            return
        if not self.hears(rank):
            return
        beat = Beat.read(self.store.get(str(rank)))
        if beat.host == self.beat.host:
            with suppress(OSError):  # it has ended
                os.kill(beat.pid, signal.SIGCONT)

    def _speaks_of(self, lost: LostRank) -> bool:
        return not self._left_to_launcher and self.rank == (1 if lost.rank == 0 else 0)

    @property
    def _left_to_launcher(self) -> bool:
        return self.spoken_for and not self.cut_off

    def _say(self, lost: LostRank) -> None:
        text = f"error: {self._error_of(lost)}\n"
        with suppress(OSError):  # nobody reads it
            if self._left_to_launcher and (self.logs is None or self.rank == 0):
                return
            if self.logs is None or self._speaks_of(lost):
                os.write(2, f"{self.fresh_line}{text}".encode(errors="replace"))
            else:
                make_no_follow(self.logs)
                handle = open_no_follow(
                    self.logs / f"rank-{self.rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT
                )
                with open(handle, "a", encoding="utf-8", errors="replace") as log:
                    log.write(text)

    def _wait_for_others(self) -> None:
        if self._holds_store and self.beat.stage == "failed":
            time.sleep(2.5 * self.every_s)  # until all ranks have read the error
        elif self._holds_store:
            self._wait_until(self._have_all_ended, limit_s=10)

    def _have_all_ended(self) -> bool:
        return all(beat.stage in _UNNEEDED for beat in self._beats().values())

    def _wait_until(self, holds: Callable[[], bool], *, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not holds() and time.monotonic() < until:
            time.sleep(0.1 * self.every_s)

    def _error_of_main(self) -> str:
        return self.watch.known[0].error if 0 in self.watch.known else ""

    def _error_of(self, lost: LostRank) -> RankLostError:
        first, *more = [line.strip() for line in lost.text.splitlines()]
        remedy = None
        if self.logs is not None:
            remedy = "the same command continues from the newest checkpoint"
        return RankLostError(
            "rank-lost",
            problem=first,
            reason="\n".join(more) if more else None,
            remedy=remedy,
            rank=lost.rank,
            step=lost.step,
        )


def _in_words(problem: BaseException) -> str:
    # only the beginning: torch's messages can fill pages
    lines = [line[:_LINE] for line in str(problem).splitlines() if line.strip()]
    name = type(problem).__name__
    if not lines:
        return name
    text = "\n".join(lines[:_LINES])
    return f"{name}: {text}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
