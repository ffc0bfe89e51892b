"""Ranks begin alike: with the same settings, models of the same shapes, the same weights.

Where they were not started so, that is said before they do anything else together: they would wait for each other without end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch import nn

from surefoot.errors import ConfigError
from surefoot.world import World

_LONG = 100  # items: whoever has more of them names their number
_WIDE = 60  # characters of a value in a message


def refuse_unequal(world: World, settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a rank was started with other settings than rank 0: which field, which rank; collective.

    `settings` go by dotted name; their values are compared as they are written.
    """
    own = {name: repr(value) for name, value in settings.items()}
    if len(set(world.gathered(sha256(json.dumps(own).encode()).hexdigest()))) == 1:
        return
    told = world.gathered(own)
    problems = []
    for rank, other in enumerate(told):
        for name in dict.fromkeys([*told[0], *other]):
            if told[0].get(name) != other.get(name):
                problems.append(f"{name}: rank 0 has {_shown(told[0], name)}, rank {rank} has {_shown(other, name)}")
    if problems:
        more = [f"and {len(problems) - 2} more"] if len(problems) > 3 else []
        shown = problems[: 2 if more else 3]
        raise ConfigError(
            "the ranks were started with different configurations\n  "
            + "\n  ".join([*shown, *more, "start all of them with the same command and files"])
        )


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as ranks compare them, by dotted name: plain values, of all else the kind.

    >>> comparable({"seed": 3, "model": nn.Linear(2, 1), "settings": {"rate": 0.1, "names": ("a", "b")}})
    {'seed': 3, 'model': 'Linear', 'settings.rate': 0.1, 'settings.names': ['a', 'b']}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        plain = _plain(value)
        if isinstance(plain, dict):
            found |= {f"{name}.{part}": held for part, held in comparable(plain).items()}
        else:
            found[name] = plain
    return found


def equal_from_main(models: Mapping[str, nn.Module], world: World) -> None:
    """Give every rank rank 0's weights and buffers: a module that was built outside the run's seed differs. Collective.

    Raises `ConfigError` where ranks have built models of other shapes.
    """
    if world.size == 1:
        return
    refuse_unequal(world, shapes(models))
    for model in models.values():
        for held in [*model.parameters(), *model.buffers()]:
            dist.broadcast(held.detach(), src=0)


def shapes(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Kind and shape of every parameter and buffer, by name.

    >>> shapes({"model": nn.Linear(2, 1)})
    {'model.weight': 'float32 (1, 2)', 'model.bias': 'float32 (1,)'}
    """
    return {
        f"{model}.{name}": f"{str(held.dtype).removeprefix('torch.')} {tuple(held.shape)}"
        for model, module in models.items()
        for name, held in [*module.named_parameters(), *module.named_buffers()]
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): held for name, held in value.items()}
    if isinstance(value, list | tuple) and all(isinstance(held, bool | int | float | str) for held in value):
        return list(value) if len(value) <= _LONG else f"{len(value)} items"
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("surefoot."):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return (value if isinstance(value, type | FunctionType) else type(value)).__qualname__


def _shown(settings: Mapping[str, str], name: str) -> str:
    text = settings.get(name, "none")
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}..."
