"""The ranks of one attempt: their processes, their rendezvous store, and their output.

Each process is torch's `SubprocessHandler`. torchrun's agent is not used, since that agent turns
every exit status into 1.
"""

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from surefoot.distributed.environment import ERRORS, LAUNCHER
from surefoot.distributed.heartbeat import MAILBOX, MEETING, NONCE, SPEAKER, VERDICT
from surefoot.distributed.liveness import Beat, LostRank
from surefoot.distributed.process_count import cores_each
from surefoot.errors import visible

_HOST = "127.0.0.1"
_LAST_LINES = 3  # of a rank in a message
_LINE = 200  # characters
_TRACEBACK = "Traceback (most recent call last)"
_IN_CRASH = "its traceback is in"


class Group:
    """The running ranks of a command. Rank 0 has the terminal; the other ranks write to files in
    `logs`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        size: int,
        attempt: int,
        logs: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.command = tuple(command)
        self.size = size
        self.attempt = attempt
        self.logs = logs
        self.environment = dict(environment)
        self.statuses: dict[int, int] = {}  # exit statuses of ended ranks; negative for a signal
        self.processes: dict[int, SubprocessHandler] = {}
        # the system chooses the port, and no other program can take it from now on
        self.store = TCPStore(
            _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
        nonce = secrets.token_hex(8)
        PrefixStore(MEETING, self.store).set(NONCE, nonce)
        self.mailbox = PrefixStore(f"{nonce}/{MAILBOX}", self.store)
        self.mailbox.set(SPEAKER, "launcher")

    def start(self) -> None:
        """Start one process per rank with torchrun's variables; ranks above 0 write to log
        files.
        """
        for rank in range(self.size):
            values = {  # torchrun's variables, and the launcher's process id
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", cores_each(self.size)),
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
                "RANK": rank,
                "WORLD_SIZE": self.size,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": self.size,
                "MASTER_ADDR": _HOST,
                "MASTER_PORT": self.store.port,
                "TORCHELASTIC_RESTART_COUNT": self.attempt,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                LAUNCHER: os.getpid(),
                ERRORS: self.logs,
            }
            self.processes[rank] = SubprocessHandler(
                entrypoint=sys.executable,
                args=self.command,
                env={name: str(value) for name, value in values.items()} | self.environment,
                stdout=str(self.logs / f"rank-{rank}.stdout") if rank else None,
                stderr=str(self.logs / f"rank-{rank}.stderr") if rank else None,
                local_rank_id=rank,
                numa_options=None,
            )

    def look(self) -> list[int]:
        """Return the ranks that have ended since the last call."""
        ended = []
        for rank in self.running:
            status = self.processes[rank].proc.poll()
            if status is not None:
                self.statuses[rank] = status
                ended.append(rank)
        return ended

    @property
    def running(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.statuses]

    def stopped(self) -> list[int]:
        """Return the ranks that are stopped (SIGSTOP)."""
        if sys.platform == "win32":
            return []
        ranks = []
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        for rank in self.running:
            with suppress(ChildProcessError):  # the rank has just ended
                if os.waitid(os.P_PID, self.processes[rank].proc.pid, options) is not None:
                    ranks.append(rank)
        return ranks

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to running ranks (default: all), but not to their child processes."""
        for rank in ranks or self.running:
            self.processes[rank].proc.send_signal(number)

    def name_lost(self, lost: LostRank) -> None:
        """Report a lost rank to the other ranks, so that they end."""
        if not self.mailbox.check([VERDICT]):
            self.mailbox.set(VERDICT, lost.written())

    def named_lost(self) -> LostRank | None:
        if not self.mailbox.check([VERDICT]):
            return None
        return LostRank.read(self.mailbox.get(VERDICT))

    def beat(self, rank: int) -> Beat:
        if self.mailbox.check([str(rank)]):
            return Beat.read(self.mailbox.get(str(rank)))
        # the rank has not met the others
        return Beat(rank, socket.gethostname(), self.processes[rank].proc.pid)

    def beats(self) -> list[Beat]:
        return [self.beat(rank) for rank in self.processes]

    def furthest(self) -> Beat:
        return max(self.beats(), key=lambda beat: beat.step)

    def unsaid(self, text: str) -> bool:
        """Return whether ranks above 0 printed lines that the text lacks. Tracebacks are ignored if
        the text names their file.
        """
        with suppress(OSError):
            for file in self.logs.glob("rank-*.std*"):
                output = file.read_text(encoding="utf-8", errors="replace")
                if _IN_CRASH in text:
                    output, _, _ = output.partition(_TRACEBACK)
                for line in output.splitlines():
                    if line.strip().removeprefix("error: ")[:_LINE] not in text:
                        return True
        return False

    def refusals(self) -> dict[int, str]:
        """Return the messages of the errors that ranks left (`leave_error`), by rank."""
        messages = {}
        for rank in self.processes:
            with suppress(OSError, ValueError):  # the rank left none, or was killed
                text = (self.logs / f"rank-{rank}.json").read_text(encoding="utf-8")
                messages[rank] = visible(json.loads(text)["message"])
        return messages

    def in_short(self, rank: int) -> str:
        status = self.statuses[rank]
        beat = self.beat(rank)
        if status < 0:
            return f"{beat.who} was killed by {signal.Signals(-status).name}"
        if beat.error:
            return f"{beat.who} failed"
        return f"{beat.who} ended with status {status}"

    def what_happened(self, rank: int) -> LostRank:
        """Return the end of a rank with its progress and its last output."""
        status = self.statuses[rank]
        beat = self.beat(rank)
        if beat.error and status > 0:
            return LostRank(rank, beat.failure)
        refusal = self.refusals().get(rank)
        if refusal is not None:  # before it met the other ranks
            return LostRank(rank, f"rank {rank}: {refusal}")
        more = self.last_lines(rank)
        if -status == getattr(signal, "SIGKILL", 9):
            more = f": out of memory, or killed by hand{more}"
        return LostRank(rank, self.in_short(rank), step=beat.step, doing=beat.doing, more=more)

    def last_lines(self, rank: int) -> str:
        """Return the last output of a rank for a message. The result is empty for rank 0, which
        prints to the terminal.
        """
        last: deque[str] = deque(maxlen=_LAST_LINES)
        log = self.logs / f"rank-{rank}.stderr"
        with suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
            last.extend(line.rstrip()[:_LINE] for line in lines if line.strip())
        if not last:
            return ""
        return "\n  ".join(["", "its last lines:", *last])

    def end(self) -> None:
        """Kill the group's remaining processes, including stopped ranks and children of ranks, and
        wait for their end.
        """
        kill = signal.Signals(getattr(signal, "SIGKILL", signal.SIGTERM))
        for process in self.processes.values():
            # all have ended; macOS reports zombies so
            with suppress(ProcessLookupError, PermissionError):
                process.close(death_sig=kill)
        for process in self.processes.values():
            process.proc.wait()
        self.look()
        # wait until the ranks' sessions are empty, so that their resources are free
        if sys.platform == "win32":
            return
        until = time.monotonic() + 5
        for process in self.processes.values():
            with suppress(ProcessLookupError, PermissionError):
                while time.monotonic() < until:
                    os.killpg(process.proc.pid, 0)
                    time.sleep(0.01)
