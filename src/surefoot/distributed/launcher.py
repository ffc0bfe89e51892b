"""The launcher of several processes, which starts, monitors, ends and restarts the ranks together.

The launcher reports a rank whose process ended, and heartbeats report a silent rank. The remaining
ranks then end, or are killed.
"""

import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from surefoot.distributed.liveness import ranks_in_words
from surefoot.distributed.process_count import Slots
from surefoot.distributed.process_group import Group
from surefoot.errors import ConfigError, RankLostError

_LOOK_S = 0.05
_ALIKE_S = 5.0  # for other ranks to meet and print the same error
_TERMINATED_S = 8.0  # from the first failed rank until SIGTERM to the others
_KILLED_S = 15.0
_STOPPED_S = 20.0  # the limit of heartbeats, here for ranks that have not met the others yet
_AGAIN_S = 2.0  # from the second Ctrl-C until SIGKILL
_BY_DECISION = (0, 5, 130, 143)  # exit statuses of ranks that end together, after saving
_LOST = RankLostError.exit_status
_NOT_AGAIN = (0, 2, 4, 5, 130, 143)  # exit statuses after which a restart is useless or unwanted


@dataclass(frozen=True)
class GroupExit:
    """The end of a group: its exit status, the dead ranks, and the error text that rank 0 has not
    printed.
    """

    status: int
    died: tuple[int, ...] = ()
    text: str = ""
    saved: bool = False  # whether a checkpoint can be resumed
    logs: Path | None = None  # the directory of other ranks' output, if the text lacks a part of it


def launch(
    command: Callable[[float], list[str]],
    *,
    places: Slots,
    max_restarts: int = 0,
    again: str = "the same command",
) -> int:
    """Run `command` in several processes. Returns the exit status of the rank that caused the end,
    as a shell reports it.

    `command` returns Python's arguments, given the seconds since the start. `again` is the command
    that continues the run, for a message. Raises `ConfigError` as
    `places.size` does.
    """
    launcher = _Launcher()
    began, size, attempt = time.monotonic(), places.size(), 0
    with launcher.signals():
        while True:
            ended = launcher.attempt(
                command(time.monotonic() - began),
                size=size,
                attempt=attempt,
                environment=places.environment(),
            )
            over = (
                ended.status in _NOT_AGAIN or launcher.stop is not None or attempt == max_restarts
            )
            if ended.text:
                _say(f"error: {ended.text}")
            if ended.text and over and ended.status not in _NOT_AGAIN:
                _say(_advice(ended, max_restarts, again))
            if ended.logs is not None:
                _say(f"  the output of ranks above 0 is in {ended.logs}")
            if over:
                return ended.status
            places.died(ended.died)
            try:
                size = places.size()
            except ConfigError as problem:
                _say(f"cannot restart with fewer processes: {problem}")
                return ended.status
            attempt += 1
            _say(
                f"restarting with {size} process{'es' * (size != 1)} (restart {attempt} of {max_restarts})"
            )


@dataclass
class _Launcher:
    stop: int | None = None
    again_at: float = math.inf  # the time of the second signal
    group: Group | None = None

    @contextmanager
    def signals(self) -> Iterator[None]:
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self.on_stop,
            signal.SIGTERM: self.on_stop,
        }
        if sys.platform != "win32":
            # one rank is signaled: all ranks agree on the step of the checkpoint
            handlers |= {
                signal.SIGUSR1: lambda number, _: self._pass_on(number, 0),
                signal.SIGTSTP: self.on_pause,
            }
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def attempt(
        self, command: list[str], *, size: int, attempt: int, environment: Mapping[str, str]
    ) -> GroupExit:
        logs, keep_logs = Path(tempfile.mkdtemp(prefix="surefoot-")), False
        self.group = group = Group(
            command, size=size, attempt=attempt, logs=logs, environment=environment
        )
        try:
            if self.stop is None:
                group.start()
            ended = self._watched(group)
            self.group = None
            group.end()
            stopped = attempt == 0 and self.stop and ended.status == 128 + self.stop
            if stopped and not any(beat.doing != "starting" for beat in group.beats()):
                _say("nothing was started")
            keep_logs = bool(ended.text) and group.unsaid(ended.text)
            return replace(
                ended,
                saved=any(beat.run_dir for beat in group.beats()),
                logs=logs if keep_logs else None,
            )
        finally:
            self.group = None
            group.end()
            if not keep_logs:
                shutil.rmtree(logs, ignore_errors=True)

    def _watched(self, group: Group) -> GroupExit:
        order = list[int]()
        first_at = math.inf  # time of the first unexpected end
        named = terminated = False
        stopped_s, before = dict[int, float](), time.monotonic()
        while group.running:
            new, now = group.look(), time.monotonic()
            order += [] if terminated else new  # a terminated rank is no cause
            elapsed_s, before = (
                min(now - before, 2 * _LOOK_S),
                now,
            )  # the launcher may have been stopped too
            stopped_s = {rank: stopped_s.get(rank, 0.0) + elapsed_s for rank in group.stopped()}
            for rank, seconds in stopped_s.items():
                if seconds > _STOPPED_S and first_at == math.inf:
                    first_at = now
                    group.name_lost(
                        group.beat(rank).lost(f"has been stopped for {_STOPPED_S:.0f} s")
                    )
            wrong = [rank for rank in order if group.statuses[rank] not in _BY_DECISION]
            first_at = min(first_at, now) if wrong else first_at
            causes = [rank for rank in wrong if group.statuses[rank] != _LOST]
            if (
                causes
                and not named
                and (group.statuses[causes[0]] < 0 or now - first_at > _ALIKE_S)
            ):
                named = True
                if group.running and causes[0] not in group.refusals():
                    _say(f"{group.in_short(causes[0])}; ending the other ranks")
                group.name_lost(group.what_happened(causes[0]))
            if now - first_at > _TERMINATED_S and not terminated:
                terminated = True
                group.signal(signal.SIGTERM)
            if now - first_at > _KILLED_S or now - self.again_at > _AGAIN_S:
                break
            if (
                first_at < math.inf
                and (lost := group.named_lost()) is not None
                and group.running == [lost.rank]
            ):
                break  # the lost rank is stopped or hangs
            time.sleep(_LOOK_S)
        order += [] if terminated else group.look()
        return self._judged(group, order)

    def _judged(self, group: Group, order: list[int]) -> GroupExit:
        group.look()
        statuses, left = group.statuses, tuple(group.running)
        causes = [rank for rank in order if statuses[rank] not in (0, _LOST)]
        first = statuses[causes[0]] if causes else 0
        if self.stop is not None and (first <= 0 or first in _BY_DECISION):
            # all ranks have ended normally before the signal
            return GroupExit(
                0 if order and not left and not any(statuses.values()) else 128 + self.stop
            )
        if first in _BY_DECISION and not (left or _LOST in statuses.values()):
            return GroupExit(first)
        if causes:
            by_first = first > 0 and (
                causes[0] == 0 or (not left and set(statuses.values()) == {first})
            )
            is_said = by_first and (
                group.beat(0).error
                or not group.mailbox.check(["0"])
                # all ranks have ended alike, without an error
                or all(beat.stage == "gone" for beat in group.beats())
            )
            text = "" if is_said else group.what_happened(causes[0]).beside(group.furthest()).text
            others = _other_errors(group, 0 if is_said else causes[0])
            text = "\nerror: ".join([text, *others] if text else others)
            died = tuple(rank for rank in causes if statuses[rank] < 0 or rank == causes[0])
            return GroupExit(
                128 - first if first < 0 else first, died, text
            )  # as a shell reports it
        lost = group.named_lost()
        if lost is None:
            return GroupExit(
                _LOST, left, f"rank {', '.join(map(str, left))} did not end" if left else ""
            )
        lines = group.last_lines(lost.rank) if lost.doing else ""
        return GroupExit(_LOST, (lost.rank,), lost.beside(group.furthest()).text + lines)

    def on_stop(self, number: int, _: FrameType | None) -> None:
        # ranks save and end after the first signal, and end at once after the second
        if self.stop is not None:
            self.again_at = min(self.again_at, time.monotonic())
        self.stop = self.stop or number
        self._pass_on(number)

    def on_pause(self, _number: int, _: FrameType | None) -> None:
        # Ctrl-Z does not reach the ranks, which do not belong to the terminal
        self._pass_on(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._pass_on(signal.SIGCONT)

    def _pass_on(self, number: int, *ranks: int) -> None:
        if self.group is not None:
            with suppress(OSError):
                self.group.signal(number, *ranks)


def _other_errors(group: Group, rank: int) -> list[str]:
    """Return the errors that differ from a rank's, each once, with the ranks that met it."""
    messages = group.refusals()
    ranks_by_message: dict[str, list[int]] = {}
    for other, message in messages.items():
        if message != messages.get(rank):
            ranks_by_message.setdefault(message, []).append(other)
    return [f"{ranks_in_words(ranks)}: {each}" for each, ranks in ranks_by_message.items()]


def _advice(ended: GroupExit, max_restarts: int, again: str) -> str:
    how = "continues from the newest checkpoint" if ended.saved else "starts from the beginning"
    if max_restarts:
        return f"  all restarts are used up (--max-restarts {max_restarts}); {again} {how}"
    by_itself = "; --max-restarts 3 does so automatically" * (
        ended.status == _LOST or ended.status > 128
    )
    return f"  {again} {how}{by_itself}"


def _say(text: str) -> None:
    with suppress(OSError):
        fresh = "\n" if os.isatty(2) and text.startswith("error") else ""
        os.write(2, f"{fresh}{text}\n".encode(errors="replace"))
