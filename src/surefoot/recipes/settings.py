"""What recipes share: the settings of an optimizer and of a schedule, and telling all that is wrong at once. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import surefoot as sf
from surefoot import schedules


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients become updates. A setting that is absent has the optimizer's default; a foreign one is refused."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    lr: float = 3e-3
    """Base learning rate, reached where warm-up ends."""
    weight_decay: float = 0.1
    """Decay of matrices, for adamw decoupled from the gradient; biases, norms and embeddings have none."""
    betas: tuple[float, float] | None = None
    """adamw: how slowly the averages of gradient and square move."""
    eps: float | None = None
    """adamw: added to the root of the average square."""
    momentum: float | None = None
    """sgd: how much of the last update is kept."""
    nesterov: bool | None = None
    """sgd: look ahead along the momentum."""
    layer_decay: float | None = None
    """Rate of each block as a fraction of the next one's, such as 0.75; the head has lr. Absent: lr for all."""
    base_width: int | None = None
    """Width at which lr was found: hidden matrices and the head have lr x base_width / width. Absent: lr at any width."""
    frozen: tuple[str, ...] | None = None
    """Parameters that are not trained, by name, such as "embedding.*". Absent: none."""

    def spec(self) -> Any:
        """The optimizer for `sf.Run`; `ConfigError` for values that cannot be."""
        from surefoot.optimizers.specs import named  # imports torch

        own = {field.name: getattr(self, field.name) for field in fields(self)}
        name, lr, decay = own.pop("name"), own.pop("lr"), own.pop("weight_decay")
        layers, base_width, frozen = own.pop("layer_decay"), own.pop("base_width"), own.pop("frozen")
        plain = partial(named, name, lr=lr, weight_decay=decay, settings=own)
        *found, _ = checked(
            lambda: [] if layers is None else [sf.layer_decay(layers)],
            lambda: [] if base_width is None else [sf.width_scaling(base_width=base_width)],
            lambda: [] if not frozen else [sf.frozen(*frozen)],
            plain,
        )
        return plain(rates=[rate for given in found for rate in given])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the run, as a factor on the base rate; absent settings have the shape's default."""

    name: schedules.Shape = "cosine"
    """Its shape after warm-up."""
    warmup: str | None = None
    """How long the rate rises from near 0; absent: 5%, and 30% for one-cycle."""
    floor: float | None = None
    """The lowest factor, reached on the last step."""
    power: float | None = None
    """polynomial: of what is left of the fall."""
    cooldown: str | None = None
    """wsd: how long the rate falls at the end."""
    drops: tuple[str, ...] | None = None
    """step: when the rate drops."""
    drop_factor: float | None = None
    """step: what the rate is multiplied by at each drop."""
    start: float | None = None
    """one-cycle: the factor at step 0."""
    cycle: str | None = None
    """restarts: from one full rate to the next."""
    cycle_growth: float | None = None
    """restarts: how many times longer each cycle is than the one before."""

    def spec(self) -> schedules.Schedule:
        """The schedule for `sf.Run`; `ConfigError` for values that cannot be."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.warmup is None and self.name != "one-cycle":
            own["warmup"] = "5%"
        return schedules.Schedule(own.pop("name"), **own)

    def spec_or_none(self) -> schedules.Schedule | None:
        """The schedule, or none where it cannot be: that is told by itself."""
        try:
            return self.spec()
        except sf.ConfigError:
            return None


def checked(*checks: Callable[[], Any]) -> list[Any]:
    """What each check returns; where some raise `ConfigError`, one of them all, with every problem."""
    found, problems = [], []
    for check in checks:
        try:
            found.append(check())
        except sf.ConfigError as problem:
            problems.append(str(problem))
    if problems:
        raise sf.ConfigError("\n".join(problems))
    return found
