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
    start = time.monotonic()
    size = places.size()
    attempt = 0
    with launcher.signals():
        while True:
            arguments = command(time.monotonic() - start)
            group_exit = launcher.attempt(
                arguments, size=size, attempt=attempt, environment=places.environment()
            )
            may_restart = group_exit.status not in _NOT_AGAIN
            is_over = not may_restart or launcher.stop is not None or attempt == max_restarts
            if group_exit.text:
                _say(f"error: {group_exit.text}")
                if is_over and may_restart:
                    _say(_advice(group_exit, max_restarts, again))
            if group_exit.logs is not None:
                _say(f"  the output of ranks above 0 is in {group_exit.logs}")
            if is_over:
                return group_exit.status
            places.died(group_exit.died)
            try:
                size = places.size()
            except ConfigError as problem:
                _say(f"cannot restart with fewer processes: {problem}")
                return group_exit.status
            attempt += 1
            processes = "1 process" if size == 1 else f"{size} processes"
            _say(f"restarting with {processes} (restart {attempt} of {max_restarts})")


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
        logs = Path(tempfile.mkdtemp(prefix="surefoot-"))
        keep_logs = False
        group = Group(command, size=size, attempt=attempt, logs=logs, environment=environment)
        self.group = group
        try:
            if self.stop is None:
                group.start()
            group_exit = self._watch(group)
            self.group = None
            group.end()
            beats = group.beats()
            is_stopped = self.stop is not None and group_exit.status == 128 + self.stop
            if attempt == 0 and is_stopped and all(beat.doing == "starting" for beat in beats):
                _say("nothing was started")
            keep_logs = bool(group_exit.text) and group.unsaid(group_exit.text)
            return replace(
                group_exit,
                saved=any(beat.run_dir for beat in beats),
                logs=logs if keep_logs else None,
            )
        finally:
            self.group = None
            group.end()
            if not keep_logs:
                shutil.rmtree(logs, ignore_errors=True)

    def _watch(self, group: Group) -> GroupExit:
        order: list[int] = []  # of ended ranks
        first_at = math.inf  # time of the first unexpected end
        is_cause_named = False
        is_terminated = False
        stopped_s: dict[int, float] = {}
        before = time.monotonic()
        while group.running:
            ended = group.look()
            now = time.monotonic()
            if not is_terminated:  # a terminated rank is no cause
                order += ended
            elapsed_s = min(now - before, 2 * _LOOK_S)  # the launcher may have been stopped too
            before = now
            stopped_s = {rank: stopped_s.get(rank, 0.0) + elapsed_s for rank in group.stopped()}
            too_long = [rank for rank, seconds in stopped_s.items() if seconds > _STOPPED_S]
            if too_long and first_at == math.inf:
                first_at = now
                how = f"has been stopped for {_STOPPED_S:.0f} s"
                group.name_lost(group.beat(too_long[0]).lost(how))
            wrong = [rank for rank in order if group.statuses[rank] not in _BY_DECISION]
            if wrong:
                first_at = min(first_at, now)
            causes = [rank for rank in wrong if group.statuses[rank] != _LOST]
            if causes and not is_cause_named:
                was_killed = group.statuses[causes[0]] < 0
                if was_killed or now - first_at > _ALIKE_S:
                    is_cause_named = True
                    _name_cause(group, causes[0])
            if now - first_at > _TERMINATED_S and not is_terminated:
                is_terminated = True
                group.signal(signal.SIGTERM)
            if now - first_at > _KILLED_S or now - self.again_at > _AGAIN_S:
                break
            if first_at < math.inf and _runs_only_lost(group):
                break
            time.sleep(_LOOK_S)
        if not is_terminated:
            order += group.look()
        return self._exit_of(group, order)

    def _exit_of(self, group: Group, order: list[int]) -> GroupExit:
        group.look()
        statuses = group.statuses
        running = tuple(group.running)
        causes = [rank for rank in order if statuses[rank] not in (0, _LOST)]
        first = statuses[causes[0]] if causes else 0
        if self.stop is not None and (first <= 0 or first in _BY_DECISION):
            # all ranks may have ended normally before the signal
            ended_before = bool(order) and not running and not any(statuses.values())
            return GroupExit(0 if ended_before else 128 + self.stop)
        if first in _BY_DECISION and not running and _LOST not in statuses.values():
            return GroupExit(first)
        if causes:
            status = 128 - first if first < 0 else first  # as a shell reports it
            died = tuple(rank for rank in causes if statuses[rank] < 0 or rank == causes[0])
            return GroupExit(status, died, _text_of_failure(group, causes[0]))
        lost = group.named_lost()
        if lost is None:
            text = f"rank {', '.join(map(str, running))} did not end" if running else ""
            return GroupExit(_LOST, running, text)
        text = lost.beside(group.furthest()).text
        if lost.doing:
            text += group.last_lines(lost.rank)
        return GroupExit(_LOST, (lost.rank,), text)

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


def _name_cause(group: Group, rank: int) -> None:
    """Tell the user and the other ranks which rank ended first."""
    if group.running and rank not in group.refusals():
        _say(f"{group.in_short(rank)}; ending the other ranks")
    group.name_lost(group.what_happened(rank))


def _runs_only_lost(group: Group) -> bool:
    """Return True if only the lost rank is left: it is stopped or hangs."""
    lost = group.named_lost()
    return lost is not None and group.running == [lost.rank]


def _text_of_failure(group: Group, cause: int) -> str:
    """Return the errors that rank 0 has not printed, given the rank that ended first."""
    status = group.statuses[cause]
    ended_alike = not group.running and set(group.statuses.values()) == {status}
    is_of_main = status > 0 and (cause == 0 or ended_alike)
    is_printed = is_of_main and (
        group.beat(0).error
        or not group.mailbox.check(["0"])
        # all ranks have ended alike, without an error
        or all(beat.stage == "gone" for beat in group.beats())
    )
    if is_printed:
        errors = _other_errors(group, 0)
    else:
        text = group.what_happened(cause).beside(group.furthest()).text
        errors = [text, *_other_errors(group, cause)]
    return "\nerror: ".join(errors)


def _other_errors(group: Group, rank: int) -> list[str]:
    """Return the errors that differ from a rank's, each once, with the ranks that met it."""
    messages = group.refusals()
    ranks_by_message: dict[str, list[int]] = {}
    for other, message in messages.items():
        if message != messages.get(rank):
            ranks_by_message.setdefault(message, []).append(other)
    return [f"{ranks_in_words(ranks)}: {message}" for message, ranks in ranks_by_message.items()]


def _advice(group_exit: GroupExit, max_restarts: int, again: str) -> str:
    how = "starts from the beginning"
    if group_exit.saved:
        how = "continues from the newest checkpoint"
    if max_restarts:
        return f"  all restarts are used up (--max-restarts {max_restarts}); {again} {how}"
    advice = f"  {again} {how}"
    if group_exit.status == _LOST or group_exit.status > 128:
        advice += "; --max-restarts 3 does so automatically"
    return advice


def _say(text: str) -> None:
    with suppress(OSError):
        fresh = "\n" if os.isatty(2) and text.startswith("error") else ""
        os.write(2, f"{fresh}{text}\n".encode(errors="replace"))
