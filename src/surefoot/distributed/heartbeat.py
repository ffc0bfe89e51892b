"""The thread of a rank that tells the others that it lives, and ends the process where one of them does not.

A collective waits for a dead or stopped rank for a day: compiling and long evaluations are no fault. So ranks tell beside the
training, over a connection of their own to the store where they met, that they live. Rank 0 reads what all tell; the others
read what rank 0 tells, and whom it, or the launcher, names as lost. Without a launcher lines to rank 0 tell of an end at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import HashStore, Store

from surefoot.config.paths import make_no_follow, open_no_follow
from surefoot.distributed.liveness import STOPPED, Beat, Lines, Lost, Stage, Watch, of_connection
from surefoot.errors import RankLostError, first_line

MEETING = "surefoot"  # before the keys by which the ranks of a start agree on what stands before all others
NONCE = "nonce"  # the one of those that is there where a launcher has drawn it
MAILBOX = "heartbeat"  # before all keys that are about this; before it stands the nonce of the start
VERDICT = "lost"  # the key under which the rank that is lost is named
SPEAKER = "speaker"  # a key that is there where a launcher says of lost ranks what there is to say
_LINES = 4  # of what an exception says
_LINE = 200
_UNNEEDED: tuple[Stage, ...] = ("failed", "left", "gone")  # and needing nobody


class Heartbeat:
    """One rank's life as the others see it, from `start` to `stop`.

    store: a connection of its own. in_launcher: the store is the launcher's; else it is rank 0's, and goes with it. A pause
    of this process or its machine is no silence of the others.
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
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.store, self.rank, self.size, self.in_launcher = store, rank, size, in_launcher
        self.every_s, self.silent_s, self.end = every_s, silent_s, end
        self.logs: Path | None = None
        self.fresh_line = ""
        self.beat = Beat(rank, host, os.getpid())
        self.sent = replace(self.beat)  # as it was told last
        self.watch = Watch(silent_s=silent_s, grace_s=grace_s)
        self.sent_condition = threading.Condition()
        self.wake, self.stopping = threading.Event(), threading.Event()
        self.awaited, self.named = threading.Event(), threading.Event()
        self.lost: Lost | None = None
        self.rounds = 0  # in which the store answered
        self.cut_off = self.spoken_for = False
        self.present: set[int] = set()
        self.dead: set[int] = set()  # whose line is closed
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        self.store.set_timeout(timedelta(seconds=self.silent_s))
        self.threads = [
            threading.Thread(target=self._live, name="surefoot tells that it lives", daemon=True),
            threading.Thread(target=self._watch_store, name="surefoot watches the store", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def follow(self, lines: Lines) -> None:
        def note(rank: int) -> None:
            self.dead.add(rank)
            self.wake.set()

        threading.Thread(target=lines.watch, args=[note], name="surefoot lines", daemon=True).start()

    def hears(self, rank: int) -> bool:
        return self.store.check([str(rank)])

    def at(self, step: int, doing: str) -> None:
        """Begin this step; that is told with the next beat."""
        self.beat.step, self.beat.doing = step, doing

    def busy(self, doing: str) -> None:
        self.beat.doing = doing

    def building(self) -> None:
        """Build another run, after one that has ended or could not be."""
        if self.beat.stage in ("failed", "left"):
            self.beat.stage, self.beat.error = "building", ""

    def opened(self, *, logs: Path | None, fresh_line: str) -> None:
        """Be in a run: from now on the others wait for this rank in every step.

        logs: where rank-N.log of each rank is, in the run's directory. fresh_line: what a message must begin with.
        """
        self.logs, self.fresh_line, self.beat.run_dir = logs, fresh_line, "" if logs is None else str(logs.parent)
        self.beat.stage, self.beat.step, self.beat.doing = "running", -1, "opening the run"

    def goodbye(self) -> None:
        """Begin no further step of this run; the others may still wait for this rank at its end."""
        self.beat.stage = "leaving"

    def closed(self) -> None:
        """Have ended a run as it should end: nobody waits for this rank any more."""
        if self.beat.stage == "leaving":
            self.beat.stage = "left"

    def failed(self, problem: BaseException) -> None:
        """Tell of what this rank fails, before it ends; returns when that is told, or cannot be."""
        if self.beat.stage in ("failed", "gone") or isinstance(problem, RankLostError):
            return
        self.beat.error = _in_words(problem)
        self.beat.stage = "left" if self.beat.stage == "left" else "failed"  # nobody waits for it where its run is over
        with self.sent_condition:
            self.wake.set()
            if self.threads:
                self.sent_condition.wait_for(
                    lambda: (self.sent.stage, self.sent.error) == (self.beat.stage, self.beat.error),
                    timeout=2 * self.every_s,
                )

    def cause(self, problem: BaseException) -> RankLostError | None:
        """The rank that was lost, where that is why a connection broke; waits until that rank is known.

        None where `problem` has nothing to do with other ranks, or none of them turns out to be lost.
        """
        if self.beat.stage == "failed" or not self.threads or not of_connection(problem):
            return None
        self.awaited.set()
        self.named.wait(self.silent_s + 10 * self.every_s)
        return None if self.lost is None else RankLostError(self._with_advice(self.lost))

    def speaks_of(self, problem: BaseException) -> bool:
        """Whether this rank is to say of what it ends: of what rank 0 ends of too, rank 0 does; waits a moment for that."""
        if isinstance(problem, RankLostError) and self.lost is not None:
            return self._speaks_of(self.lost)
        if self.rank == 0 or not self.threads:
            return True
        self._wait_until(lambda: self._error_of_main() != "", limit_s=3 * self.every_s)
        if self._error_of_main() != _in_words(problem):
            return True
        # until it has said it: torchrun ends all by the first that ends
        self._wait_until(lambda: 0 in self.dead, limit_s=10 * self.every_s)
        return False

    def stop(self) -> None:
        """Be missed by nobody any more, and end the threads."""
        if self.threads and self.beat.stage != "failed":
            self.beat.stage = "gone"
        self.stopping.set()
        self.wake.set()
        for thread in self.threads:
            thread.join(timeout=15)
        self.threads = []

    # --- the threads ---------------------------------------------------------------------------------------------

    def _live(self) -> None:
        """Tell and listen every `every_s` seconds, until told to stop or a rank is lost."""
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

    def _listen(self, *, elapsed_s: float) -> Lost | None:
        self.spoken_for = self.spoken_for or self.store.check([SPEAKER])
        if self.store.check([VERDICT]):
            return Lost.read(self.store.get(VERDICT))
        dead = frozenset(self.dead)  # before the beats are read: who says goodbye does so first
        beats = self._beats()
        self.rounds += 1
        lost = self.watch.lost_rank(beats, elapsed_s=elapsed_s, hurried=self.awaited.is_set(), dead=dead)
        if lost is not None and self.beat.stage not in _UNNEEDED:
            self.store.set(VERDICT, lost.written())
            self.rounds += 1
            if self._holds_store:
                time.sleep(2.5 * self.every_s)  # until all have read it: it goes with this process
        return lost

    def _beats(self) -> dict[int, Beat]:
        """What this rank is to know: on rank 0 of all that are there, elsewhere of rank 0; and of itself."""
        others = range(1, self.size) if self.rank == 0 else [0]
        self.present |= {rank for rank in others if rank not in self.present and self.store.check([str(rank)])}
        read = sorted(self.present)
        texts = self.store.multi_get([str(rank) for rank in read]) if read else []
        return {self.rank: self.sent} | {rank: Beat.read(text) for rank, text in zip(read, texts, strict=True)}

    def _watch_store(self) -> None:
        """End the process where the store does not answer: the other thread may wait for it without end."""
        silent_s, last_rounds, before = 0.0, self.rounds, time.monotonic()
        while not self.stopping.wait(self.every_s):
            now = time.monotonic()
            silent_s = silent_s + min(now - before, 2 * self.every_s) if last_rounds == self.rounds else 0.0
            last_rounds, before = self.rounds, now
            if silent_s >= self.silent_s and self.beat.stage not in _UNNEEDED:
                self._end(self._lost_with_store(f"has not answered for {self.silent_s:.0f} s"))
                return

    def _lost_with_store(self, how: str) -> Lost:
        """The loss of the store, which is the loss of whoever held it."""
        self.cut_off = True
        main = self.watch.known.get(0)
        if main is not None and main.stage == "failed":
            return Lost(0, main.failure)
        if self.in_launcher or main is None:
            return Lost(0, f"the connection to {'the launcher' if self.in_launcher else 'rank 0'} {how}", more=STOPPED)
        return replace(main.lost("", STOPPED), how=f"the connection to {main.who} {how}")

    @property
    def _holds_store(self) -> bool:
        return self.rank == 0 and not self.in_launcher

    def _end(self, lost: Lost) -> None:
        """End this process: by its main thread, where that waits to be told why, and else from here."""
        self.lost = lost.beside(self.beat)
        if not self.cut_off:
            with suppress(RuntimeError):
                self._tell()  # how far this rank was: whoever speaks of the lost one knows it from that
                self._let_go_on(lost.rank)
        self.named.set()
        if self.awaited.is_set():
            if not self.stopping.wait(10 * self.every_s):  # something hangs on its way out
                self.end(RankLostError.exit_status)
            return
        self._say(self.lost)
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(timeout=2)  # the main thread may hold a stream, and hang
        self.end(RankLostError.exit_status)

    def _let_go_on(self, rank: int) -> None:
        """Let a rank on this machine that was stopped go on, and read that it is lost: torchrun waits 30 s for one to end."""
        if sys.platform != "win32" and rank != self.rank and not self._left_to_launcher and self.hears(rank):
            beat = Beat.read(self.store.get(str(rank)))
            if beat.host == self.beat.host:
                with suppress(OSError):  # it has ended
                    os.kill(beat.pid, signal.SIGCONT)

    def _speaks_of(self, lost: Lost) -> bool:
        return not self._left_to_launcher and self.rank == (1 if lost.rank == 0 else 0)

    @property
    def _left_to_launcher(self) -> bool:
        return self.spoken_for and not self.cut_off

    def _say(self, lost: Lost) -> None:
        """To the terminal by one rank, or by the launcher; by the others to their logs, where they have any."""
        text = f"error: {self._with_advice(lost)}\n"
        with suppress(OSError):  # nobody reads it
            if self._left_to_launcher and (self.logs is None or self.rank == 0):
                return
            if self.logs is None or self._speaks_of(lost):
                os.write(2, f"{self.fresh_line}{text}".encode(errors="replace"))
            else:
                make_no_follow(self.logs)
                handle = open_no_follow(self.logs / f"rank-{self.rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                with open(handle, "a", encoding="utf-8", errors="replace") as log:
                    log.write(text)

    def _wait_for_others(self) -> None:
        """Where the store ends with this process: until nobody needs it, or for ten seconds."""
        if self._holds_store and self.beat.stage == "failed":
            time.sleep(2.5 * self.every_s)  # in which all read it
        elif self._holds_store:
            self._wait_until(lambda: all(each.stage in _UNNEEDED for each in self._beats().values()), limit_s=10)

    def _wait_until(self, holds: Callable[[], bool], *, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not holds() and time.monotonic() < until:
            time.sleep(0.1 * self.every_s)

    def _error_of_main(self) -> str:
        return self.watch.known[0].error if 0 in self.watch.known else ""

    def _with_advice(self, lost: Lost) -> str:
        """What is said of it, and where a run can go on how."""
        return lost.text + ("" if self.logs is None else "\n  the same command goes on from the newest checkpoint")


def _in_words(problem: BaseException) -> str:
    """What an exception says: its beginning, for messages of torch go on with pages."""
    lines = [line[:_LINE] for line in str(problem).splitlines() if line.strip()][:_LINES]
    return ": ".join([type(problem).__name__, *(["\n".join(lines)] if lines else [])])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def alone() -> Heartbeat:
    """The heartbeat, never started, of a process that is alone: it tells nobody, and can lose nobody."""
    return Heartbeat(HashStore(), rank=0, size=1, host="")
