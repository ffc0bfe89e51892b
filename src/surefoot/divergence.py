"""Steps that were not applied, seen from the host at each log: since when, from which samples, and what to say."""

from __future__ import annotations

from surefoot.loop import State


class BadSteps:
    """The steps skipped in a row up to now, as far as the records that were read tell."""

    def __init__(self) -> None:
        self.in_a_row: list[int] = []

    def saw(self, skipped: list[int], *, done: int) -> None:
        """Take notice of the skipped steps among those read, when `done` steps are made."""
        for step in skipped:
            follows = bool(self.in_a_row) and step == self.in_a_row[-1] + 1
            self.in_a_row = [*self.in_a_row, step] if follows else [step]
        if self.in_a_row and self.in_a_row[-1] != done - 1:
            self.in_a_row = []

    def latched(self, state: State, most: int) -> bool:
        """True where some optimizer has skipped more than `most` steps in a row; waits for the device."""
        return any(trained.bad_in_a_row.item() > most for trained in state.trained.values())
