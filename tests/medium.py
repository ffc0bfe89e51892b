"""A model of a file system that knows what a power cut would leave, and disks on which one
operation goes wrong.
"""

from __future__ import annotations

import copy
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

# ---- a file system that remembers what a power cut would leave ----


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass
class Directory:
    entries: dict[str, File | Directory] = field(default_factory=dict)
    flushed: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[dict[str, File | Directory | None]] = field(
        default_factory=list
    )  # each change is atomic

    def change(self, change: dict[str, File | Directory | None]) -> None:
        self.pending.append(change)
        apply(change, self.entries)


def apply(change: dict[str, File | Directory | None], entries: dict[str, File | Directory]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Medium:
    """Files and directories in memory; `after_power_cut` is what could be found of them."""

    def __init__(self, root: Directory | None = None) -> None:
        self.root = root or Directory()
        self.open: dict[int, File] = {}

    def node(self, path: PurePath) -> File | Directory:
        found: File | Directory = self.root
        for part in path.parts[1:]:
            if not isinstance(found, Directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
            if part not in found.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            found = found.entries[part]
        return found

    def directory(self, path: PurePath) -> Directory:
        found = self.node(path)
        if not isinstance(found, Directory):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return found

    def file(self, path: PurePath) -> File:
        found = self.node(path)
        if not isinstance(found, File):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        return found

    def _new(self, path: PurePath, node: File | Directory) -> None:
        if path.name in self.directory(path.parent).entries:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self.directory(path.parent).change({path.name: node})

    def make_directory(self, path: Path) -> None:
        self._new(path, Directory())

    def create(self, path: Path) -> int:
        file = File()
        self._new(path, file)
        handle = max(self.open, default=0) + 1
        self.open[handle] = file
        return handle

    def append(self, handle: int, data: memoryview) -> None:
        self.open[handle].data += data

    def flush(self, handle: int) -> None:
        self.open[handle].flushed = bytes(self.open[handle].data)

    def close(self, handle: int) -> None:
        del self.open[handle]

    def flush_directory(self, path: Path) -> None:
        held = self.directory(path)
        held.flushed = dict(held.entries)
        held.pending = []

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent
        node = self.node(source)
        there = self.directory(target.parent).entries.get(target.name)
        if isinstance(there, Directory) and there.entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        self.directory(source.parent).change({source.name: None, target.name: node})

    def remove(self, path: Path) -> None:
        self.file(path)
        self.directory(path.parent).change({path.name: None})

    def remove_directory(self, path: Path) -> None:
        if self.directory(path).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        self.directory(path.parent).change({path.name: None})

    def is_directory(self, path: Path) -> bool:
        try:
            return isinstance(self.node(path), Directory)
        except OSError:
            return False

    def is_link(self, path: Path) -> bool:
        return False

    def names(self, path: Path) -> list[str]:
        return list(self.directory(path).entries)

    def size(self, path: Path) -> int:
        return len(self.file(path).data)

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        return bytes(self.file(path).data[start : start + length])

    def free_bytes(self, path: Path) -> int:
        return 1 << 40

    def after_power_cut(self, fate: Callable[[], float]) -> Medium:
        """What is found afterwards; `fate` decides on everything not flushed: 0 it is lost, 1 it is
        there.
        """
        return Medium(_survivors(self.root, fate))

    def copied(self) -> Medium:
        return self.after_power_cut(lambda: 1.0)

    def copied_with_pending(self) -> Medium:
        return Medium(copy.deepcopy(self.root))


def _survivors(directory: Directory, fate: Callable[[], float]) -> Directory:
    entries = dict(directory.flushed)
    for change in directory.pending:
        if fate() > 0.5:
            apply(change, entries)
    found: dict[str, File | Directory] = {}
    for name, node in entries.items():
        if isinstance(node, Directory):
            found[name] = _survivors(node, fate)
        else:
            data = bytes(node.data) if bytes(node.data) == node.flushed else _torn(node, fate())
            found[name] = File(bytearray(data), data)
    return Directory(dict(found), dict(found))


def _torn(file: File, fate: float) -> bytes:
    """Nothing, all, the length without the bytes, or a beginning."""
    if fate in {0.0, 1.0}:
        return file.flushed if fate == 0.0 else bytes(file.data)
    if fate < 0.3:
        return bytes(len(file.data))
    kept = int(len(file.data) * fate)
    return bytes(file.data[:kept]) + (bytes(len(file.data) - kept) if fate < 0.6 else b"")


# ---- a disk on which one operation goes wrong ----

CHANGES = {"make_directory", "create", "append", "flush", "close", "flush_directory", "rename"}
CHANGES |= {"remove", "remove_directory"}
NEEDS_ROOM = {"make_directory", "create", "append"}


class Killed(BaseException):
    """As a SIGKILL: nothing runs any more, no `except` and no `finally` that touches a file."""


class Faulty:
    """Passes on to `disk`; the operation number `at` (from 1) goes wrong, and `happened` tells."""

    def __init__(
        self,
        disk: Any,
        fault: Callable[[str], None],
        *,
        at: int,
        only: set[str] | None = None,
        for_good: bool,
    ) -> None:
        self.disk = disk
        self.fault = fault
        self.at = at
        self.only = only
        self.for_good = for_good
        self.operations = 0
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.disk, name)
        if name not in CHANGES:
            return operation

        def attempted(*arguments: Any) -> Any:
            self.operations += 1
            counts = self.only is None or name in self.only
            if counts and (
                self.operations == self.at or (self.for_good and self.operations > self.at)
            ):
                if name == "append":  # half of it still arrives
                    operation(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if name == "close":  # closed even where that fails, as Linux does
                    operation(*arguments)
                self.happened = True
                self.fault(name)
            return operation(*arguments)

        return attempted


def killed(name: str) -> None:
    raise Killed


def killed_for_real(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int) -> Callable[[str], None]:
    def fault(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return fault
