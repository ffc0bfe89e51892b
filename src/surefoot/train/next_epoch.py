"""The step with which the next epoch of a saved run begins, for settings that can change only there.
Imports no torch.

Most orders let an epoch begin within a step. Lanes, batches in tokens and the batches of a sampler
cut each epoch into steps as a whole.
"""

from collections.abc import Mapping
from typing import Any

from surefoot.checkpoint.state_json import SavedState
from surefoot.errors import ConfigError
from surefoot.train.recorded_settings import BUCKETS, LANES, RecordedSettings, steps_per_epoch

_LISTS = "batches of "


def changes_with_epochs(identity: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that decide how the epochs of a run are cut into steps, and so change
    with an epoch.
    """
    order = str(identity["data"]["plan"]["order"])
    if order == BUCKETS:
        return ("batch_size", "micro_batch_size")
    if order == LANES or order.startswith(_LISTS):
        return ("batch_size",)
    return ()


def next_epoch(recorded: RecordedSettings, state: SavedState, step: int) -> int:
    """Return the first step of the epoch that begins at `step` or behind it. `state` is that of the
    newest checkpoint.

    Raises `ConfigError` if a sampler of the user lists the batches, and if no checkpoint was saved
    since the last change of these settings.
    """
    names = changes_with_epochs(recorded.identity)
    begin = _begin_of_present_epochs(recorded, step, names)
    epochs = state.whole_epochs or _epochs_of_identity(recorded.identity)
    if epochs is None:
        raise ConfigError(
            "batch-size-fixed",
            problem="batch_size cannot change: the sampler of the program lists the batches",
            reason="their size is a matter of the program",
            setting="batch_size",
        )
    if step == begin:
        return step
    if epochs["begin"] != begin:
        raise ConfigError(
            "epochs-not-saved-yet",
            problem=f"it is not known where the next epoch begins: no checkpoint was saved after the"
            f" change from step {begin} on",
            remedy="wait for the next checkpoint of the run",
            step=step,
            begin=begin,
        )
    passed = -(-(step - begin) // epochs["steps"])
    return begin + passed * epochs["steps"]


def _begin_of_present_epochs(recorded: RecordedSettings, step: int, names: tuple[str, ...]) -> int:
    """Return the step from which on epochs have as many steps as that before `step`."""
    begin = 0
    before = [recorded.at(0)[name] for name in names]
    for changed_at in sorted({change.from_step for change in recorded.changes}):
        values = [recorded.at(changed_at)[name] for name in names]
        if changed_at <= step and values != before:
            begin = changed_at
            before = values
    return begin


def _epochs_of_identity(identity: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the epochs of a run whose checkpoints do not have them: its batch size never
    changed.
    """
    steps = steps_per_epoch(identity)
    return None if steps is None else {"steps": steps, "begin": 0}
