"""A process that does not outlive the one that started it, even where that is killed with `kill -9`."""

from __future__ import annotations

from surefoot.placement import end_with_parent


def die_with(parent: int) -> None:
    """End this process when `parent`, which started it, is gone.

    What is lost is what a checkpoint does not hold: the run goes on from it.
    """
    end_with_parent(parent)
