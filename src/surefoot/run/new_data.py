"""Other training data while a run goes on: each step has the data that it had, or none."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from surefoot.checkpoint.format import Checkpoint
from surefoot.config.data_change import (
    UNCHANGED,
    WHICH_CAN_CHANGE,
    data_changes,
    next_data_change,
)
from surefoot.config.order import Weighted, draws_as_many
from surefoot.config.setting_change import DATA
from surefoot.data.dataset_checks import fingerprint, is_stream
from surefoot.data.mixture import Mixture
from surefoot.data.pipeline import TrainData
from surefoot.errors import CheckpointError, Command, ConfigError
from surefoot.run.components import RunComponents
from surefoot.run.history import SettingsHistory
from surefoot.train.run_identity import differences


def refuse_data_of_later_steps(history: SettingsHistory, data: TrainData, *, run: str) -> None:
    """Raise `CheckpointError` if a later change of the data has not come yet, and the program gives
    other data than the run had before it. Raises `ConfigError` for data that cannot change while a
    run goes on.
    """
    if not data_changes(history.changes):
        return
    if isinstance(data.order, Weighted):
        has_epochs = draws_as_many(data.order)
    else:
        has_epochs = data.order in ("shuffled", "sequential")
    can_change = (
        has_epochs
        and isinstance(data.batch_size, int)
        and not isinstance(data.dataset, Mixture)
        and not is_stream(data.dataset)
    )
    if not can_change:
        raise ConfigError(
            "data-cannot-change",
            problem=f"the data of {run} cannot change while it goes on",
            reason=WHICH_CAN_CHANGE,
            run=run,
        )
    following = next_data_change(history.changes, history.segments[-1].begin)
    if following is None:
        return
    given = fingerprint(data.dataset)
    if isinstance(data.order, Weighted):
        from surefoot.data.orders import WeightedOrder  # which most runs do not need

        given["plan"] = WeightedOrder(0, data.order, batch_size=1).to_dict()
    differing = _differing(following.was, given)
    if differing:
        raise CheckpointError(
            "data-of-later-steps",
            problem=f"until step {following.from_step}, {run} needs the data that it had before",
            reason=f"the program gives others: {differing[0]}",
            remedy="give these data until then, and the others after it",
            run=run,
            step=following.from_step,
        )


def refuse_data_of_earlier_steps(parts: RunComponents, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` if the run goes on with other data from a checkpoint on, and the
    program gives those of before.
    """
    change = data_changes(parts.changes_since(checkpoint)).get(checkpoint.step)
    if change is None or _differing(change.was, parts.plan.identity["data"]):
        return
    assert parts.directory is not None
    run = str(parts.directory.shown)
    raise CheckpointError(
        "data-of-earlier-steps",
        problem=f"{run} has other data from step {change.from_step} on, and the program gives the"
        " data of before",
        remedy=[
            "give the other data, and start it again",
            ("keep these:", Command(f"surefoot change {shlex.quote(run)} {DATA}={UNCHANGED}")),
        ],
        run=run,
        step=change.from_step,
    )


def _differing(before: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference between two data sets and the weights of their samples,
    whatever else their order is.
    """
    described = [{"data": dict(before)}, {"data": json.loads(json.dumps(given))}]
    for each in described:
        plan = each["data"].pop("plan", {})
        each["data"]["weights"] = plan.get("weights")
    return differences(*described)
