"""The request for changes of settings that another process makes of a run while it trains: a file in
the run's directory, which the run takes away when the changes are lines of its journal. Imports no
torch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from surefoot.config.paths import open_no_follow, read_regular
from surefoot.errors import ConfigError

REQUEST = "changes.request.json"


def request_changes(run: Path, wishes: Sequence[Mapping[str, Any]]) -> None:
    """Ask a run for changes of settings. Raises `ConfigError` if another request waits, and
    `OSError` if the file cannot be written.
    """
    text = json.dumps(list(wishes)) + "\n"
    written = run / f"{REQUEST}.{os.getpid()}"
    with os.fdopen(open_no_follow(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(text)
    try:
        os.link(written, run / REQUEST)  # whole, and only if no other stands there
    except FileExistsError:
        raise ConfigError(
            "change-requested-already",
            problem=f"another change of {run} waits for its process",
            reason=f"{REQUEST} is there until the run has taken it, at its next record",
            remedy="wait until it has; if no process trains the run, remove the file",
            run=str(run),
        ) from None
    finally:
        written.unlink()


def requested_changes(run: Path) -> list[dict[str, Any]]:
    """Return the changes that another process has asked for, or nothing."""
    with suppress(FileNotFoundError):
        return list(json.loads(read_regular(run / REQUEST)))
    return []


def end_request(run: Path) -> bool:
    """Remove the request. Return False if there was none."""
    try:
        (run / REQUEST).unlink()
    except FileNotFoundError:
        return False
    return True
