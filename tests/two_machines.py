"""Two machines of one: network namespaces with a cable between them, each with a name of its own
that nobody can look up.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forked import Forked

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NAMED = 'hostname "$0" && exec "$@"'
_LAUNCHERS = ("SLURM", "GLOO", "MASTER", "WORLD_SIZE", "RANK", "LOCAL_")
_NETWORK, _NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS


class Machines:
    """Commands on one or the other of the two; they have the same files."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.started: list[subprocess.Popen[str]] = []
        self.forked: list[Forked] = []

    def fork(
        self, place: int, call: Callable[[], object], environment: Mapping[str, str], *, said: Path
    ) -> Forked:
        """Do something on one or the other in a process that this one forks, having imported torch;
        what it prints is in `said`.
        """
        namespace = Path("/var/run/netns") / self.names[place]

        def inside() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with namespace.open() as held:
                if libc.setns(held.fileno(), _NETWORK) or libc.unshare(_NAMES):
                    raise OSError(ctypes.get_errno(), "cannot go to another machine")
            socket.sethostname(f"machine{place}")
            for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
                del os.environ[name]
            os.environ.update(environment)
            call()

        with said.open("w") as stream:
            process = Forked(inside, stdout=stream, stderr=subprocess.STDOUT)
        self.forked.append(process)
        return process

    def start(
        self, place: int, command: Sequence[str], environment: Mapping[str, str], **how: Any
    ) -> subprocess.Popen[str]:
        """Start a command on the first (0) or the second (1); nothing of this process's own
        launcher reaches it.
        """
        clean = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
        inside = [
            _ip(),
            "netns",
            "exec",
            self.names[place],
            "unshare",
            "--uts",
            "sh",
            "-c",
            _NAMED,
            f"machine{place}",
        ]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | how
        self.started.append(
            subprocess.Popen([*inside, *command], env={**clean, **environment}, **how)
        )
        return self.started[-1]


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Both, for as long as they are needed; skips the test where this machine does not permit it,
    with the reason.
    """
    if os.geteuid() != 0:
        pytest.skip("two machines of one need network namespaces, and those root")
    if not (Path(_ip()).is_file() and shutil.which("unshare") and shutil.which("hostname")):
        pytest.skip("two machines of one need the commands ip (iproute2), unshare and hostname")
    names = [f"sf{os.getpid()}{letter}" for letter in "ab"]
    machines = Machines(names)
    try:
        for name in names:
            _ask("netns", "add", name)
        _ask(
            "link",
            "add",
            "cable0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable1",
            "netns",
            names[1],
        )
        for place, name in enumerate(names):
            _ask("-n", name, "addr", "add", f"{ADDRESSES[place]}/24", "dev", f"cable{place}")
            for interface in ("lo", f"cable{place}"):
                _ask("-n", name, "link", "set", interface, "up")
        yield machines
    finally:
        for process in machines.started:
            process.kill()
            process.communicate()
        for other in machines.forked:
            other.kill()
            other.wait()
        for name in names:
            subprocess.run([_ip(), "netns", "del", name], capture_output=True, check=False)


def _ask(*words: str) -> None:
    done = subprocess.run([_ip(), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(
            f"two machines of one are not permitted here: ip {' '.join(words)}: {done.stderr.strip()}"
        )


def _ip() -> str:
    return shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ip"
