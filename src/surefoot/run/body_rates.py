"""Learning rates that the body of a loop writes, by hand or through a torch scheduler: the next step
uses them, or they are refused by name.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

from torch.optim import Optimizer

from surefoot.distributed.world import World
from surefoot.errors import ConfigError, Setting
from surefoot.optim.build import has_scheduler
from surefoot.optim.kinds.kind import inner_optimizers
from surefoot.schedules.joined import AnySchedule
from surefoot.train.loop import State
from surefoot.train.patience import Feedback

# schedulers of torch that multiply the current rate; others write rates of their own
_RELATIVE = {
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "MultiplicativeLR",
    "ConstantLR",
    "LinearLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "ChainedScheduler",  # of schedulers that are looked at too
}


class BodyRates:
    """What one session does about rates that the user's code writes.

    own_schedule: what changes the rates by itself, or None if they are constant. registered: the
    objects of `run.register_state`, or None if schedulers need not be among them.
    """

    def __init__(
        self,
        state: State,
        world: World,
        *,
        own_schedule: str | None,
        registered: Mapping[str, Any] | None,
        say: Callable[[str], None],
    ) -> None:
        self.state = state
        self.world = world
        self.own_schedule = own_schedule
        self.registered = registered
        self.say = say
        self.writes = self._writes()
        # a number that is equal on all ranks if these write the same rates
        self.fingerprint = self._fingerprint()
        self.is_said = False
        # schedulers that were not stepped yet, with the numbers in them
        self.unchecked: list[tuple[ref[Any], dict[str, Any]]] = []

    def begin(self) -> None:
        """Call this before the first step of a session: code before the loop, such as the
        constructor of a scheduler, wrote rates that the checkpoint has already.
        """
        is_replaced = False
        for trained in self.state.optimizers.values():
            if trained.rates.put_back():
                is_replaced = True
        if is_replaced and not any(has_scheduler(each) for each in self._optimizers()):
            self.say(
                "note: the parameter groups keep the values of the checkpoint; what your code wrote"
                " into them before the loop is left out"
            )
        self.fingerprint = self._fingerprint()

    def follow(self, *, has_body: bool) -> bool:
        """Take over what was written since the last step; return True if there is anything. Raises
        `ConfigError` for rates that cannot be followed.

        Without a body, code writes only within a step, and its update takes this over. Ranks
        compare their rates before each step.
        """
        if has_body or self.world.size > 1:
            for trained in self.state.optimizers.values():
                trained.rates.follow()
        if self._writes() == self.writes:
            return False
        self.writes = self._writes()
        self.fingerprint = self._fingerprint()
        if not self.is_said:
            self.is_said = True
            for scheduler in schedulers_of(self._optimizers()):
                self.unchecked.append((ref(scheduler), _numbers(scheduler)))
            self._check_schedulers()
            self.say(
                f"after step {self.state.step:,}: your code wrote learning rates; the next"
                " steps use them, multiplied by the schedule's further course"
            )
        elif self.unchecked:
            self._check_schedulers()
        return True

    def factors(self) -> dict[str, Any]:
        """Return what a record has of these rates: the factor of the first group, as its `lr`, and
        those of all groups if they differ. Waits for the device if a rate is in a tensor.
        """
        by_group: dict[str, float] = {}
        for name, trained in self.state.optimizers.items():
            for index, factor in enumerate(trained.rates.body_factors()):
                by_group[f"{name}.param_groups[{index}]"] = factor
        first = next(iter(by_group.values()))
        record: dict[str, Any] = {}
        if first != 1.0:
            record["lr_body_factor"] = first
        if any(factor != first for factor in by_group.values()):
            record["lr_body_factors"] = by_group
        return record

    def refuse_other_ranks(self) -> None:
        rank, step = self.world.rank, self.state.step
        raise ConfigError(
            "rates-differ-on-ranks",
            problem=f"after step {step} your code wrote other learning rates on rank {rank} than on"
            " other ranks",
            reason="the ranks would train different weights",
            remedy="write the same rates on every rank: exchange what they depend on",
            setting="lr",
            step=step,
            rank=rank,
        )

    def _optimizers(self) -> list[Optimizer]:
        return [trained.optimizer for trained in self.state.optimizers.values()]

    def _fingerprint(self) -> int:
        fingerprint = 0
        for trained in self.state.optimizers.values():
            fingerprint ^= trained.rates.fingerprint
        return fingerprint

    def _writes(self) -> int:
        return sum(trained.rates.writes for trained in self.state.optimizers.values())

    def _check_schedulers(self) -> None:
        """Check the schedulers that were stepped; others may have nothing to do with the rates."""
        schedulers: list[Any] = []
        unchecked = []
        for reference, numbers in self.unchecked:
            scheduler = reference()
            if scheduler is None:
                continue
            if _is_stepped(scheduler) or _numbers(scheduler) != numbers:
                schedulers.append(scheduler)
            else:
                unchecked.append((reference, numbers))
        self.unchecked = unchecked
        own = self.own_schedule
        absolute = [
            type(scheduler).__name__
            for scheduler in schedulers
            if _is_of_package(scheduler) and not _is_relative(scheduler)
        ]
        if absolute and own is not None:
            raise ConfigError(
                "two-schedules",
                problem=f"{absolute[0]} in the body of the loop writes learning rates of its own,"
                f" and the run has {own}",
                reason="each would overwrite the other",
                remedy=[
                    f"leave out {own}",
                    "or leave out the scheduler; sf.schedules.from_scheduler(...) takes it as the"
                    " schedule of the run",
                ],
                setting="schedule",
                value=absolute[0],
            )
        if self.registered is None or not schedulers:
            return
        registered = _within(list(self.registered.values()))
        if not any(id(scheduler) in registered for scheduler in schedulers):
            name = type(schedulers[0]).__name__
            raise ConfigError(
                "scheduler-not-registered",
                problem=f"{name} in the body of the loop changes learning rates, and no checkpoint"
                " holds its state",
                reason="a resumed run would begin its schedule anew",
                remedy=[
                    'write run.register_state("scheduler", scheduler) before the loop',
                    (Setting("check_state", False), "if your code restores it"),
                ],
                setting="scheduler",
                value=name,
            )


def own_schedule(schedule: AnySchedule, feedback: Feedback | None) -> str | None:
    """Return what changes the rates of a run by itself, or None if they are constant."""
    if feedback is not None:
        return "plateau="
    shape = schedule.to_dict()["shape"]
    if shape == "constant" and not schedule.warmup:
        return None
    return f"schedule= ({shape})"


def _is_relative(scheduler: Any) -> bool:
    """Return True if a scheduler, or the class of torch that it inherits its rates from, multiplies
    the rates that it finds.
    """
    kind = type(scheduler)
    for base in kind.__mro__:
        if base.__name__ in _RELATIVE:
            return getattr(kind, "get_lr", None) is getattr(base, "get_lr", None)
    return False


def schedulers_of(optimizers: Sequence[Any]) -> list[Any]:
    """Return the living schedulers over these optimizers or those inside them: objects with one of
    them as an attribute, and with a method `step`.
    """
    ids = set()
    for optimizer in optimizers:
        ids.add(id(optimizer))
        for inner in inner_optimizers(optimizer).values():
            ids.add(id(inner))
    schedulers = []
    for candidate in gc.get_objects():
        kind = type(candidate)
        if not hasattr(kind, "step") or not kind.__weakrefoffset__:
            continue
        if isinstance(candidate, Optimizer):
            continue
        attributes = getattr(candidate, "__dict__", {})
        is_over_one = any(id(value) in ids for value in attributes.values())
        # the module of a class that has nothing to do with the run may be anything
        if is_over_one and not kind.__module__.startswith("surefoot."):
            schedulers.append(candidate)
    return schedulers


def _is_of_package(scheduler: Any) -> bool:
    """Return True for a scheduler of torch or timm, or one that inherits from these."""
    return hasattr(type(scheduler), "get_last_lr") or hasattr(type(scheduler), "step_update")


def _is_stepped(scheduler: Any) -> bool:
    """Return True if a scheduler of a package was stepped, as far as it counts its steps."""
    inner = getattr(scheduler, "_schedulers", [scheduler])
    return _is_of_package(scheduler) and any(getattr(each, "last_epoch", 1) > 0 for each in inner)


def _numbers(scheduler: Any) -> dict[str, Any]:
    return {
        name: value for name, value in vars(scheduler).items() if isinstance(value, int | float)
    }


def _within(objects: list[Any]) -> set[int]:
    """Return the ids of objects and of what they hold, two levels deep."""
    ids: set[int] = set()
    level = objects
    for _ in range(3):
        ids.update(map(id, level))
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                deeper.extend(each.values())
            elif isinstance(each, list | tuple):
                deeper.extend(each)
            else:
                deeper.extend(getattr(each, "__dict__", {}).values())
        level = deeper
    return ids
