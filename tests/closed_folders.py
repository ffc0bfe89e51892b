"""A folder that nobody can list, not even root."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def close_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``os.scandir`` of ``folder`` fail, and list everything else as before.

    A finalizer may list any folder at any time, by path or by file descriptor.
    """
    scandir = os.scandir

    def list_open(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(os.fsdecode(path)) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", list_open)
