"""A run's directory: its files except checkpoints and metrics, and the lock of the training
process.
"""

import errno
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from surefoot.checkpoint.filesystem import DISK
from surefoot.checkpoint.manifest import MANIFEST
from surefoot.config.paths import NO_LOCKS, absolute_path, open_no_follow, write_whole
from surefoot.errors import CheckpointError, ConfigError, Setting
from surefoot.tracking.appended_file import is_named
from surefoot.tracking.change_journal import CHANGES
from surefoot.tracking.change_request import REQUEST
from surefoot.tracking.numbered import free_directory
from surefoot.tracking.run_reader import (
    HELD,
    REPORT,
    SessionEntry,
    read_sessions,
    run_file_not_written,
    surefoot_version,
)

_DIRECTORIES = (
    "branches",
    "checkpoints",
    "crash",
    "logs",
    "tape",
    "tapes",
    "tensorboard",
    "trackers",
)
_APPENDED_TO = ("metrics.jsonl", ".lock")
TEXT_LOG = "log.txt"  # appended to if the run has a text log
# replaced atomically, so links are not followed
_REPLACED = ("config.toml", "environment.json", "panels.json")
# what a run replaces or removes below its directory; to logs of ranks, it only appends
_WRITTEN_BELOW = ("branches/*", "crash/*", "tape/*", "tapes/*", "trackers/*")


@dataclass(eq=False)
class RunDirectory:
    """A run's directory, locked by one process at a time. `path` is made absolute, so that a later
    `os.chdir` changes nothing; `shown` is the path as the user gave it, for messages.
    """

    path: Path
    shown: Path = field(init=False)
    lock: IO[bytes] | None = None
    is_locked: bool = False  # False on a file system without locks
    text_log: bool = False  # the run appends to log.txt
    numbered: str | None = None  # run_dir with {n}, if the number was chosen for this run
    # config.toml and others, restored if deleted
    small_files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shown = self.path
        self.path = absolute_path(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def open(self) -> None:
        """Create and lock the directory; raise an error if another process trains in the directory
        or a file to write is a link. No effect if an earlier session has kept the lock.
        """
        if self.lock is not None:
            return
        resolved = self.path.resolve()
        if resolved in HELD:  # one process can lock the same file repeatedly
            raise self._in_training("this")
        try:
            _make(resolved)
            self._refuse_strange_files()
            lock, is_locked = self._lock()
        except OSError as problem:
            raise ConfigError(
                "run-directory-not-writable",
                problem=f"cannot write to {self.shown}: {problem.strerror or problem}",
                remedy=Setting("run_dir", "DIR"),
                setting="run_dir",
                value=str(self.shown),
            ) from problem
        if is_locked is False:
            raise self._in_training("another")
        self.lock = lock
        self.is_locked = is_locked is not None
        HELD.add(resolved)

    def _in_training(self, process: str) -> ConfigError:
        free = free_directory(self.shown)
        return ConfigError(
            "run-in-training",
            problem=f"{process} process is training into {self.shown}",
            remedy=["wait for it", Setting("run_dir", str(free))],
            setting="run_dir",
            value=str(self.shown),
            process=process,
        )

    def refuse_files_of_others(self, files: Iterable[str]) -> None:
        """Raise `ConfigError` for files that a run would overwrite, append to or remove, in a
        directory in which no run has begun. `files` are the names of the recipe's small files.
        """
        if self._is_of_run():
            return
        names = [*_REPLACED, *self._appended_to(), REPORT, *files]
        present = [path for path in self._named(dict.fromkeys(names)) if os.path.lexists(path)]
        for pattern in _WRITTEN_BELOW:
            present += sorted(self.path.glob(pattern))
        if not present:
            return
        others = [path.relative_to(self.path).as_posix() for path in present]
        more = f" and {len(others) - 2} more" if len(others) > 2 else ""
        raise ConfigError(
            "directory-has-other-files",
            problem=f"{self.shown} has {', '.join(others[:2])}{more}, and no run has begun there",
            reason="a run would overwrite what somebody else has written",
            remedy=[Setting("run_dir", str(self.shown / "run")), "move the files away"],
            setting="run_dir",
            value=str(self.shown),
            files=others,
        )

    def remember(self, *names: str) -> None:
        """Read small files into memory, so that `make_again` can restore the files."""
        for name in names:
            file = self.path / name
            if file.is_file():
                self.small_files[name] = file.read_bytes()

    def make_again(self) -> bool:
        """Recreate and lock a deleted directory or lock file, and restore the small files; return
        True if anything was recreated.

        Raises `CheckpointError` if another process has since started training in the directory.
        """
        if self.lock is None:
            return False
        with suppress(OSError):
            if is_named(self.path / ".lock", self.lock):
                return False
        try:
            _make(self.path.resolve())
            self.refuse_links()
            lock, is_locked = self._lock()
        except OSError as problem:
            raise CheckpointError(
                "run-directory-not-recreated",
                problem=f"cannot recreate {self.shown}, which was deleted: {problem}",
                path=self.path,
            ) from problem
        if is_locked is False:
            raise CheckpointError(
                "run-directory-taken-over",
                problem=f"another process is training into {self.shown}: the .lock of this run was"
                " deleted or replaced",
                reason="two runs in one directory would delete each other's checkpoints,"
                " so this run stops saving",
                remedy="stop one of them, and resume the other with the same command",
                path=self.path,
            )
        self.lock.close()
        self.lock = lock
        for name, content in self.small_files.items():
            if not (self.path / name).exists():
                self.write_bytes(name, content)
        return True

    def refuse_links(self) -> None:
        """Raise `OSError` (ELOOP) if a file or directory that the run writes is a link."""
        link = self._link()
        if link is not None:
            words = f"a link to {os.readlink(link)}, and a run does not follow links"
            raise OSError(errno.ELOOP, words, str(link))

    def _link(self) -> Path | None:
        for path in [*self._named(_DIRECTORIES), *self._files()]:
            if path.is_symlink():
                return path
        return None

    def _files(self) -> list[Path]:
        return [
            *self._named(self._appended_to()),
            *self.path.glob("logs/*"),
            *self.path.glob("trackers/*.lo*"),
        ]

    def _appended_to(self) -> tuple[str, ...]:
        if self.text_log:
            return (*_APPENDED_TO, TEXT_LOG)
        return _APPENDED_TO

    def _named(self, names: Iterable[str]) -> list[Path]:
        return [self.path / name for name in names]

    def _refuse_strange_files(self) -> None:
        link = self._link()
        if link is not None:
            raise _strange(link, f"a link to {os.readlink(link)}")
        for path in self._named(_DIRECTORIES):
            if path.exists() and not path.is_dir():
                raise _strange(path, "not a directory")
        for path in [*self._files(), *self._named(_REPLACED)]:
            if path.exists() and not path.is_file():
                raise _strange(path, "not a regular file")

    def _is_of_run(self) -> bool:
        """Return True if a run has begun in the directory: then its files are a run's. A run begins
        with an empty `.lock`; a copy of a run may lack it, but has a checkpoint.
        """
        with suppress(OSError):
            if (self.path / ".lock").lstat().st_size == 0:
                return True
        return any(self.checkpoints.glob(f"step-*/{MANIFEST}"))

    def _lock(self) -> tuple[IO[bytes], bool | None]:
        # True: locked; False: another process has the lock; None: no lock support
        lock = os.fdopen(open_no_follow(self.path / ".lock", os.O_RDWR | os.O_CREAT), "r+b")
        if sys.platform == "win32":
            return lock, True
        import fcntl

        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in NO_LOCKS:
                return lock, None
            lock.close()
            return lock, False
        return lock, True

    def close(self) -> None:
        if self.lock is not None:
            HELD.discard(self.path.resolve())
            self.lock.close()
            self.lock = None

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file atomically. Raises `CheckpointError` if the write fails."""
        target = self.path / name
        try:
            write_whole(target, data)
        except OSError as problem:
            raise run_file_not_written(target, problem) from problem
        if target.parent == self.path:
            self.small_files[name] = data

    def add_session(self, session: dict[str, Any]) -> None:
        """Append a session to environment.json. A file that cannot be read is kept as
        environment.damaged.json.
        """
        file = self.path / "environment.json"
        earlier: tuple[SessionEntry, ...] = ()
        if file.exists():
            try:
                earlier = read_sessions(self.path)
            except (OSError, ValueError):
                file.replace(self.path / "environment.damaged.json")
        text = json.dumps({"sessions": [*earlier, session]}, indent=1)
        self.write_text(file.name, f"{text}\n")


def _strange(path: Path, what: str) -> ConfigError:
    return ConfigError(
        "run-directory-with-strange-file",
        problem=f"{path} is {what}",
        reason="a run writes only regular files and directories of its own, and follows no links",
        remedy=[f"remove it (rm -r {shlex.quote(str(path))})", Setting("run_dir", "DIR")],
        path=path,
    )


def directory_of_start(run: Path) -> str | None:
    """Return the working directory of a run's first command, or None if unknown."""
    try:
        return str(read_sessions(run)[0]["directory"])
    except (OSError, ValueError, LookupError):
        return None


def checked_files(files: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
    """Return a recipe's small files; raise `ConfigError` for a file name with a path or a reserved
    file name.
    """
    ours = {*_DIRECTORIES, *_APPENDED_TO, *_REPLACED, REPORT, TEXT_LOG, CHANGES, REQUEST}
    for name in files:
        if not re.fullmatch(r"\w[\w.-]*", name) or name.lower() in ours:
            raise ConfigError(
                "extra-file-name",
                problem=f"extra_files: {name!r} is not a plain name, or is reserved",
                setting="extra_files",
                value=name,
            )
    return dict(files)


def machine(device: torch.device, *, deterministic: bool) -> dict[str, Any]:
    """Return the hardware and software properties that affect bitwise reproducibility."""
    hardware = platform.machine()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return {
        "surefoot": surefoot_version(),
        "torch": torch.__version__,
        "device": device.type,
        "hardware": hardware,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": deterministic,
    }


def output_into_run(out: Path, *, instead: str) -> ConfigError:
    """Return the error for an output that would be written into a run. `instead` is another
    directory.
    """
    return ConfigError(
        "output-into-run",
        problem=f"{out} is the directory of a run or a checkpoint",
        remedy=("another directory:", Setting("out", instead)),
        setting="out",
        value=str(out),
    )


def environment() -> dict[str, Any]:
    """Return versions, machine, command line and git commit of this process."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": np.__version__,
        "processors": os.cpu_count(),
        "memory_bytes": machine_memory_bytes(),
        "command": [Path(sys.argv[0]).name, *_recorded(sys.argv[1:])],
        "directory": os.getcwd(),
        "git_commit": _git_commit(),
    }


def _recorded(arguments: list[str]) -> list[str]:
    """Leave out --alert and --alert-test, which are for one session. An address may be a secret."""
    kept = []
    is_target = False
    for word in arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if not is_target and flag not in ("--alert", "--alert-test"):
            kept.append(word)
        is_target = word == "--alert"
    return kept


def machine_memory_bytes() -> int | None:
    """Return the machine's memory in bytes, or None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # AttributeError: Windows has no sysconf
        return None


def _make(path: Path) -> None:
    # durably, so that the directories survive a power failure
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        DISK.flush_directory(directory.parent)


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.TimeoutExpired):
        git = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        return git.stdout.strip() or None
    return None
