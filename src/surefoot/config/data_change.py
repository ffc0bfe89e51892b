"""Other training data while a run goes on, by its journal of changes. Imports no torch.

A line of the journal has the identity of the data before it, whose steps need these data, and when
the new data begin. The new data are those of the program, and then of the checkpoints.
"""

from collections.abc import Iterable, Sequence

from surefoot.config.setting_change import DATA, SettingChange, in_effect

NEXT_EPOCH = "next epoch"
AT_ONCE = "at once"
UNCHANGED = "unchanged"
"""Takes back a change whose data no step has read yet."""
ORDERS = ("permutation per epoch", "sequential", "weighted")
"""The orders of samples that have epochs of any number of samples."""
WHICH_CAN_CHANGE = (
    "only shuffled, sequential and weighted data of one kind can, with batches in samples, and with"
    " as many samples in an epoch as the data have"
)


def data_changes(changes: Iterable[SettingChange]) -> dict[int, SettingChange]:
    """Return the changes of the data by the steps from which on they hold, in order."""
    by_step: dict[int, SettingChange] = {}
    for change in in_effect(changes):
        if change.setting == DATA and change.now != UNCHANGED:
            by_step[change.from_step] = change
    return by_step


def next_data_change(changes: Iterable[SettingChange], step: int) -> SettingChange | None:
    """Return the change that ends the data of the step after `step` finished ones, or None."""
    for begin, change in data_changes(changes).items():
        if begin > step:
            return change
    return None


def epoch_sizes(
    changes: Sequence[SettingChange], begins: Iterable[int], *, present: int
) -> list[int]:
    """Return the samples of an epoch from each of these steps on. `present` is that of the data
    after all changes.
    """
    sizes = []
    for begin in begins:
        change = next_data_change(changes, begin)
        sizes.append(present if change is None else int(change.was["plan"]["samples"]))
    return sizes


def first_epoch(samples: int, samples_per_epoch: int, begins: str) -> int:
    """Return the number of the epoch with which other data begin, after these samples of the data
    before: the next after those that have begun ("at once"), or after those that have ended.

    >>> first_epoch(80, 60, "at once"), first_epoch(121, 60, "next epoch")
    (2, 2)
    """
    if begins == AT_ONCE:
        return -(-samples // samples_per_epoch)
    return samples // samples_per_epoch
