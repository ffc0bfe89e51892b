"""The heartbeat of a single process, which has no ranks to tell and none to lose."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.distributed.liveness import Beat, RankPhase
    from surefoot.distributed.own_times import Work


class NoHeartbeat:
    """The methods of `Heartbeat` that a run calls. They do nothing."""

    rank = 0
    phase: "RankPhase" = "step"

    def building(self) -> None: ...

    def opened(self, *, logs: Path | None, fresh_line: str, device: str = "cpu") -> None: ...

    def at(self, step: int, doing: str) -> None: ...

    def enter(self, phase: "RankPhase") -> None: ...

    def during(self, phase: "RankPhase") -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def enter_work(self, work: "Work") -> None: ...

    def busy(self, doing: str) -> None: ...

    def goodbye(self) -> None: ...

    def left_alone(self) -> None: ...

    def closed(self) -> None: ...

    def failed(self, problem: BaseException) -> None: ...

    def cause(self, problem: BaseException) -> None:  # noqa: ARG002
        """Return None: no other rank can be the cause of an error."""
        return

    def speaks_of(self, problem: BaseException) -> bool:  # noqa: ARG002
        """Return True: no other rank prints the same error."""
        return True

    def stop(self) -> None: ...

    def known_beats(self) -> Mapping[int, "Beat"]:
        return {}
