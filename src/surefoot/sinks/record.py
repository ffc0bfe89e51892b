"""One line of metrics, and what takes it."""

from __future__ import annotations

from typing import Any, Protocol

Record = dict[str, Any]
"""`kind` ("train", "scores", "sample", "resumed", "stopped", "finished"), `step` (steps made), and the values."""


class Sink(Protocol):
    """Somewhere records go."""

    def write(self, record: Record) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102
