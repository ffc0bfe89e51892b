"""What several ranks found of one split, put together as one process would have found it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.distributed.objects import Messages
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DivergedError
from surefoot.mean import Mean, summed


def scores_together(
    world: World,
    sums: Mapping[str, Mean],
    collected: list[list[Any]],
    void: list[bool],
    *,
    judge: Callable[[list[Any]], Mapping[str, Any]] | None,
    diverged: DivergedError | None,
) -> dict[str, Any]:
    """Sums and outputs of all ranks, as one process would have found them."""
    own = {name: (float(mean.total), float(mean.count)) for name, mean in sums.items()}
    told = world.gathered({"sums": own, "diverged": None if diverged is None else str(diverged)})
    for other in told:
        if other["diverged"] is not None:
            raise DivergedError(other["diverged"])
    names = dict.fromkeys(name for other in told for name in other["sums"])
    found: dict[str, Any] = {
        name: float(summed(Mean(*other["sums"][name]) for other in told if name in other["sums"]).value)
        for name in names
    }
    if judge is None:
        return found
    counted = sum(not is_void for other in world.gathered(void) for is_void in other)
    messages = Messages()
    told = world.gathered([messages.written(made) for made in collected])
    in_order = [messages.read(text) for of_ranks in zip(*told, strict=True) for text in of_ranks]
    outputs = [output for made in in_order[:counted] for output in made]  # void ones are the last in order
    return found | _judged_by_main(world, judge, outputs)


def _judged_by_main(
    world: World, judge: Callable[[list[Any]], Mapping[str, Any]], outputs: list[Any]
) -> dict[str, Any]:
    """What rank 0 makes of all outputs; what it gives up for a model that has diverged, all ranks give up."""
    judged: dict[str, Any] = {}
    problem: str | None = None
    if world.is_main:
        try:
            judged = as_recorded(judge(outputs))
        except DivergedError as error:
            problem = str(error)
    judged, problem = world.from_main([judged, problem])
    if problem is not None:
        raise DivergedError(problem)
    return judged


def as_recorded(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a judge returned, as it will stand in the records; `ConfigError` for what cannot."""
    held = {name: float(value) if isinstance(value, int | float) else value for name, value in found.items()}
    try:
        json.dumps([value for value in held.values() if not isinstance(value, float)], allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"judge returned what cannot be put into a record: {problem}\n  give numbers, lists, texts"
        ) from problem
    return held
