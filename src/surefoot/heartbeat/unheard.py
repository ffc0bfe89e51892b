"""One process that is alone has nobody who hears its heart."""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import RankLostError


class Unheard:
    """In the place of a heartbeat where one process is alone: nobody is told, and nobody can be lost."""

    def at(self, step: int, doing: str) -> None:
        """See `Heartbeat.at`, and so on."""

    def busy(self, doing: str) -> None: ...  # noqa: D102
    def building(self) -> None: ...  # noqa: D102
    def opened(self, *, logs: Path | None, fresh_line: str) -> None: ...  # noqa: D102
    def goodbye(self) -> None: ...  # noqa: D102
    def closed(self) -> None: ...  # noqa: D102
    def failed(self, problem: BaseException) -> None: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102

    def cause(self, problem: BaseException) -> RankLostError | None:
        """None: whatever happened, it was no other rank."""

    def speaks_of(self, problem: BaseException) -> bool:  # noqa: ARG002
        """True: nobody else could."""
        return True
