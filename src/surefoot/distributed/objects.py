"""What one rank tells another of a user's values, as text: nothing is pickled, so nothing that comes can run code."""

import base64
import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from surefoot.errors import ConfigError


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
        if isinstance(value, Tensor):
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
        match kind:
            case "tensor":
                return load(base64.b64decode(held))["held"]
            case "array":
                return load(base64.b64decode(held))["held"].numpy()
            case "dict":
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


def _bytes(tensor: Tensor) -> str:
    return base64.b64encode(save({"held": tensor.detach().cpu().contiguous()})).decode()
