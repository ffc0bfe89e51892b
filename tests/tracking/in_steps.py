"""Records handed to a console as a run hands them: a step is complete before the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from surefoot.tracking.rows import IN_ROWS


class Receiver(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...
    def step_recorded(self) -> None: ...


def hand(
    receiver: Receiver,
    records: Sequence[dict[str, Any]],
    before: Callable[[int], None] = lambda index: None,
) -> None:
    """Write each record, and call `before` with its number before."""
    for index, record in enumerate(records):
        before(index)
        receiver.write(record)
        following = records[index + 1 : index + 2]
        if not any(
            each["step"] == record["step"] and each["kind"] in IN_ROWS for each in following
        ):
            receiver.step_recorded()
