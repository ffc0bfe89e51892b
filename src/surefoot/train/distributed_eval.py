"""What several ranks found of one split, put together as one process would have found it.

Outputs travel as text: nothing is pickled, so nothing that comes can run code.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

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
    if reasons := [other["diverged"] for other in told if other["diverged"] is not None]:
        raise DivergedError(reasons[0])
    found: dict[str, Any] = {
        name: float(summed(Mean(*other["sums"][name]) for other in told if name in other["sums"]).value)
        for name in dict.fromkeys(name for other in told for name in other["sums"])
    }
    if judge is None:
        return found
    counted = sum(not is_void for other in world.gathered(void) for is_void in other)
    messages = Messages()
    told = world.gathered([messages.written(made) for made in collected])
    in_order = [messages.read(text) for of_ranks in zip(*told, strict=True) for text in of_ranks]
    outputs = [output for made in in_order[:counted] for output in made]  # void ones are the last in order
    judged, problem = dict[str, Any](), None
    if world.is_main:  # what it gives up for a model that has diverged, all ranks give up
        try:
            judged = as_recorded(judge(outputs))
        except DivergedError as error:
            problem = str(error)
    judged, problem = world.from_main([judged, problem])
    if problem is not None:
        raise DivergedError(problem)
    return found | dict(judged)


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


class Messages:
    """Values to text and back: numbers, texts, lists, tuples, dictionaries, tensors, arrays, dataclasses and named tuples.

    The last two, and what is a list or tuple of a kind of its own, come back as classes that this process has written itself before: a name
    in a message chooses among those.

    >>> messages = Messages()
    >>> messages.read(messages.written([(1, float("inf")), {"a": "b"}]))
    [(1, inf), {'a': 'b'}]
    """

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}

    def written(self, value: Any) -> str:
        """The value as text; `ConfigError` for what cannot be."""
        return json.dumps(self._taken_apart(value))

    def read(self, text: str) -> Any:
        """What was written, by this process or another one of the same program."""
        return self._put_together(json.loads(text))

    def _taken_apart(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value if type(value) in (type(None), bool, int, float, str) else _plain(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": _bytes(value)}
        if isinstance(value, np.ndarray | np.generic):
            return {"array": _bytes(torch.from_numpy(np.array(value)))}
        if isinstance(value, dict):
            return {"dict": [[self._taken_apart(key), self._taken_apart(held)] for key, held in value.items()]}
        if is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name) for field in fields(value) if field.init]
        elif isinstance(value, list | tuple):
            parts = list(value)
        else:
            raise ConfigError(
                f"a {type(value).__name__} cannot go from one rank to another, for all outputs to be judged together\n"
                "  let outputs(model, batch) return numbers, texts, tensors, or lists, tuples and dictionaries of them"
            )
        kind = type(value).__name__
        if type(value) not in (list, tuple):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            self.classes[kind] = type(value)
        return {kind: [self._taken_apart(part) for part in parts]}

    def _put_together(self, told: Any) -> Any:
        if not isinstance(told, dict):
            return told
        ((kind, held),) = told.items()
        if kind in ("tensor", "array"):
            tensor = load(base64.b64decode(held))["held"]
            return tensor if kind == "tensor" else tensor.numpy()
        if kind == "dict":
            return {self._put_together(key): self._put_together(value) for key, value in held}
        parts = [self._put_together(part) for part in held]
        if kind in ("list", "tuple"):
            return parts if kind == "list" else tuple(parts)
        if kind not in self.classes:
            raise ConfigError(f"another rank's outputs are of the class {kind}, and none was made here")
        made = self.classes[kind]
        if is_dataclass(made):
            return made(**dict(zip([field.name for field in fields(made) if field.init], parts, strict=True)))
        return made(*parts) if "_fields" in vars(made) else made(parts)  # of a named tuple each part is an argument


def _plain(value: Any) -> Any:
    """A number or text of a class of its own (an enumeration, a float of NumPy) as a plain one."""
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def _bytes(tensor: torch.Tensor) -> str:
    return base64.b64encode(save({"held": tensor.detach().cpu().contiguous()})).decode()
