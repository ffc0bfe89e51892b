"""Paths that a user gives. Nothing here imports torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from surefoot.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # a scheme of two letters or more: `C://` is a drive


def local_path(path: str | os.PathLike[str], *, setting: str) -> Path:
    """The path of a file or directory on this machine; `setting` names the argument or flag in the error.

    Raises `ConfigError` for a URL, of which `Path` would make a directory called "s3:".

    >>> local_path("runs/first", setting="out").parts
    ('runs', 'first')
    """
    text = os.fspath(path)
    if isinstance(text, str) and (scheme := _URL.match(text)):
        raise ConfigError(
            f"{setting} {text!r} is a URL, and surefoot reads and writes local files only\n"
            f"  as a path it would name a directory called {scheme[0][:-2]!r}\n"
            "  give a local path: mount the remote storage, or copy the files before or after the run"
        )
    return Path(text)
