"""A run's directory: what lies in it besides checkpoints and metrics, and who may write there."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from surefoot.checkpoint.disk import DISK
from surefoot.errors import CheckpointError, ConfigError

_OPEN: set[Path] = set()  # directories that runs of this process hold


class RunDirectory:
    """One run's directory, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file of records."""
        return self.path / "metrics.jsonl"

    def open(self) -> None:
        """Make the directory and hold it; a second process that trains into it is refused."""
        place = self.path.resolve()
        if place in _OPEN:  # a process may lock a file as often as it likes
            raise ConfigError(f"this process is training into {self.path} already: choose another --out")
        try:
            _make(place)
            self.lock = (self.path / ".lock").open("w")
        except OSError as problem:
            raise ConfigError(
                f"cannot write to {self.path}: {problem.strerror or problem}\n  choose another place: --out DIR"
            ) from problem
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.lockf(
                    self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # ends with the process; loader workers do not inherit it
            except OSError as problem:
                self.lock.close()
                raise ConfigError(
                    f"another process is training into {self.path} right now: wait for it, or choose another --out"
                ) from problem
        _OPEN.add(place)

    def close(self) -> None:
        """Let go of the directory."""
        if self.lock is not None:
            _OPEN.discard(self.path.resolve())
            self.lock.close()
            self.lock = None

    def write_text(self, name: str, text: str) -> None:
        """Write a small file so that it is there whole or not at all."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """The same of a file that is no text."""
        target = self.path / name
        beside = target.with_name(f".{target.name}.partial")
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        except OSError as problem:
            raise CheckpointError(f"cannot write {target}: {problem.strerror or problem}") from problem

    def add_sitting(self, sitting: dict[str, Any]) -> None:
        """Append one start or resume to environment.json."""
        place = self.path / "environment.json"
        held: list[Any] = []
        if place.exists():
            try:
                held = json.loads(place.read_text())["sittings"]
            except (ValueError, KeyError, TypeError):
                place.replace(self.path / "environment.damaged.json")
        self.write_text("environment.json", json.dumps({"sittings": [*held, sitting]}, indent=1) + "\n")


def held_here(path: Path) -> bool:
    """Whether a run of this process holds a directory: its lock must then not be touched, since any close lets go of it."""
    return path.resolve() in _OPEN


def directory_of_start(run: Path) -> str | None:
    """Where the command was given that began a run; None where that is not known."""
    try:
        return str(json.loads((run / "environment.json").read_text())["sittings"][0]["directory"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def checked_files(files: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
    """Small files of a recipe's for the directory; `ConfigError` for a name that is not plain, or is one of ours."""
    ours = {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "crash",
        "report.html",
        "trackers",
        "panels.json",
    }
    wrong = [name for name in files if not re.fullmatch(r"\w[\w.-]*", name) or name.lower() in ours]
    if wrong:
        raise ConfigError(f"files: {wrong[0]!r} is no plain name, or one that surefoot uses itself: choose another")
    return dict(files)


def machine(device: torch.device, *, deterministic: bool) -> dict[str, Any]:
    """What bit-equal results depend on besides the configuration."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "surefoot": _version("surefoot"),
        "torch": torch.__version__,
        "device": device.type,
        "hardware": name,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": deterministic,
    }


def environment() -> dict[str, Any]:
    """Where and how this sitting was started."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": _version("numpy"),
        "processors": os.cpu_count(),
        "memory_bytes": machine_memory_bytes(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "directory": os.getcwd(),
        "git_commit": _git_commit(),
    }


def machine_memory_bytes() -> int | None:
    """The memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # the first: on Windows there is no sysconf
        return None


def _make(path: Path) -> None:
    """Make a directory and those above it that are missing, so that their names outlive a power failure too."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        DISK.flush_directory(place.parent)


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _git_commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
