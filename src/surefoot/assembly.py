"""From what a user hands over (a class, a specification) to the State that the loop works on; of data in `ordering.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.batch_statistics import BatchStatistics
from surefoot.batching import Batching
from surefoot.config.strategy import Strategy
from surefoot.errors import ConfigError, first_line
from surefoot.fp8 import with_fp8
from surefoot.loop import State, Trained
from surefoot.optimizers import flat, on_shards
from surefoot.optimizers.averages import Averages, Twin, twin_of
from surefoot.optimizers.clipping import Clip, clipping_of, limited
from surefoot.optimizers.ema import Ema
from surefoot.optimizers.fused_adamw import StraightToKernel
from surefoot.optimizers.gradients import present
from surefoot.optimizers.groups import Group, parameter_groups
from surefoot.optimizers.hidden import hidden_matrices, split
from surefoot.optimizers.rates import factors_of, freeze
from surefoot.optimizers.schedule_free import ScheduleFree, ScheduleFreeAverage
from surefoot.optimizers.skipping import skipping
from surefoot.optimizers.specs import OptimizerSpec
from surefoot.optimizers.without_compiler import without_compiler
from surefoot.plateau import Plateau
from surefoot.schedules import Joined, Schedule
from surefoot.seeding import fold, seed_generators, stream_key, untouched
from surefoot.sharding import holders
from surefoot.synchronised_norms import synchronised
from surefoot.timetable import Timetable
from surefoot.world import World

if TYPE_CHECKING:
    from surefoot.fully_sharded import Fsdp

Built = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Model = nn.Module | Callable[[], nn.Module]


def built_models(
    model: Model | Mapping[str, Model], *, seed: int, device: torch.device, fp8: bool = False
) -> dict[str, nn.Module]:
    """The models by name ("model" where there is one), on their device; a callable is called under the run's seed.

    With `fp8` their linear layers multiply in 8 bits.
    """
    named = model if isinstance(model, Mapping) else {"model": model}
    key = stream_key(seed, "model")
    built: dict[str, nn.Module] = {}
    for place, (name, source) in enumerate(named.items()):
        with untouched(), device if device.type == "meta" else nullcontext():  # on paper nothing is allocated
            seed_generators(fold(key, place))
            found = source if isinstance(source, nn.Module) else source()
        if not isinstance(found, nn.Module):
            raise ConfigError(
                f"model: {name!r} is a {type(found).__name__}, not an nn.Module, nor a callable that returns one"
            )
        lazy = [part for part, held in found.named_parameters() if is_lazy(held)]
        if lazy:
            raise ConfigError(
                f"model: {lazy[0]} of {name!r} has no size yet (a lazy module), so no optimizer can hold it\n"
                "  pass one batch through it before it is returned"
            )
        built[name] = with_fp8(found, device).to(device) if fp8 and device.type != "meta" else found.to(device)
    return built


def set_to_train(models: Mapping[str, nn.Module]) -> list[str]:
    """Put models that are in evaluation mode as a whole into training mode, and say so; parts of others stay as they are."""
    found = [name for name, model in models.items() if not any(part.training for part in model.modules())]
    for name in found:
        models[name].train()
    how = "was handed over in evaluation mode (no dropout, fixed statistics); it is trained in training mode"
    return [f"{name} {how}" for name in found]


def with_synchronised_norms(
    models: Mapping[str, nn.Module], sizes: Batching, world: World
) -> tuple[dict[str, nn.Module], list[str]]:
    """The models with batch normalisation over all ranks, and what is to be said of that.

    `ConfigError` where a rank could have nothing to normalise: the others would wait for it.
    """
    if sizes.unit == "tokens":
        raise ConfigError(
            "sync_batch_norm: of batches by tokens some micro-batches may be empty, and ranks would wait for each other\n"
            "  leave it out, or give batch_size in samples"
        )
    return synchronised(models), ["sync_batch_norm changes nothing in one process"] if world.size == 1 else []


@dataclass(frozen=True)
class Decided:
    """What of one model is told by its modules and names: who is trained how. Decided while it holds whole parameters."""

    spec: OptimizerSpec | Built
    groups: list[Group]
    limited: list[nn.Parameter]
    twin: Twin | None  # for averages of its weights

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are trained."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def on(self, held: Mapping[nn.Parameter, nn.Parameter], twin: Twin | None) -> Decided:
        """The same of what this rank holds of each parameter, and of a twin of that."""
        groups = [replace(group, parameters=[held[each] for each in group.parameters]) for group in self.groups]
        return replace(self, groups=groups, limited=[held[each] for each in self.limited], twin=twin)


def decided(
    models: Mapping[str, nn.Module],
    optimizer: OptimizerSpec | Built | Mapping[str, OptimizerSpec | Built],
    *,
    clip: Clip,
    ema: float | None,
) -> dict[str, Decided]:
    """Who is trained how, by the name of the model; freezes what is not to be trained, and copies what is to be averaged."""
    named = optimizer if isinstance(optimizer, Mapping) else dict.fromkeys(models, optimizer)
    for spec in named.values():
        if not (isinstance(spec, OptimizerSpec) or callable(spec)):
            raise ConfigError(
                f"optimizer: {type(spec).__name__} is neither a specification nor a function that builds one\n"
                "  give surefoot.adamw(lr=...), or lambda groups: torch.optim.AdamW(groups, lr=...): the run makes the groups"
            )
    foreign = [name for name in named if name not in models]
    if foreign or not named:
        raise ConfigError(
            f"optimizer: {foreign[0] if foreign else 'none'!r} has no model of that name; models: {', '.join(models)}"
        )
    found: dict[str, Decided] = {}
    for name, spec in named.items():
        decay = spec.weight_decay if isinstance(spec, OptimizerSpec) else None
        factors = factors_of(models[name], spec.rates if isinstance(spec, OptimizerSpec) else ())
        freeze(models[name], factors)
        groups = parameter_groups(models[name], decay or 0.0, rates=factors)
        parameters = [parameter for group in groups for parameter in group.parameters]
        if not parameters:
            raise ConfigError(
                f"{type(models[name]).__name__} has no trainable parameter: nothing to train (is every requires_grad False?)"
            )
        if isinstance(spec, OptimizerSpec) and spec.name == "muon":
            groups = split(groups, hidden_matrices(models[name], excepted=spec.settings["adamw_for"]))  # type: ignore[arg-type]
        own_mean = isinstance(spec, OptimizerSpec) and spec.name == "schedule-free"
        if own_mean and ema is not None:
            raise _nothing_to_average(ema)
        twin = twin_of(models[name]) if own_mean or ema is not None else None
        found[name] = Decided(spec, groups, limited(clip, models[name], parameters), twin)
    return found


def spread_models(
    models: Mapping[str, nn.Module],
    decisions: Mapping[str, Decided],
    *,
    world: World,
    parallel: Strategy,
    nominal: float,
) -> tuple[Fsdp, dict[str, Decided]]:
    """Shard the models and their twins in place; who is trained how, of what this rank holds from then on. Collective."""
    for decision in decisions.values():
        if isinstance(decision.spec, OptimizerSpec):
            on_shards.refuse_name(decision.spec.name)
    from surefoot.fully_sharded import Fsdp, sharded  # which imports seconds of torch

    fsdp = Fsdp(world, parallel, nominal, {})
    found: dict[str, Decided] = {}
    for name, model in models.items():
        parameters = list(model.parameters())
        fsdp.held[name] = live = sharded(model, world, parallel)
        if name not in decisions:
            continue
        twin = decisions[name].twin
        if twin is not None:
            copied = sharded(twin.model, world, parallel)
            fsdp.twins.append(copied)
            twin = Twin(twin.model, list(zip(live.shards.values(), copied.shards.values(), strict=True)))
        found[name] = decisions[name].on(dict(zip(parameters, live.shards.values(), strict=True)), twin)
    return fsdp, found


def built_state(
    models: dict[str, nn.Module],
    decisions: Mapping[str, Decided],
    *,
    clip: Clip,
    ema: float | None,
    world: World,
) -> State:
    """Models with their optimizers (one each, of the same name), what limits their gradients, and averages, before step 0."""
    trained: dict[str, Trained] = {}
    averages: dict[str, Averages] = {}
    for name, decision in decisions.items():
        spec, parameters = decision.spec, decision.parameters
        plain = [{"params": group.parameters} for group in decision.groups]
        with without_compiler():
            made = spec.build(decision.groups) if isinstance(spec, OptimizerSpec) else _from_factory(spec, plain)
        if holders(parameters) is not None:
            on_shards.refuse_optimizer(made)
        for group in made.param_groups:
            group["initial_lr"] = float(group["lr"])
        limits, device = clipping_of(clip, decision.limited), parameters[0].device
        way = skipping(made, device)
        gradients: Callable[[], list[Tensor]] = partial(present, parameters)
        by_group = clip[0] != "adaptive"  # which is told of parameters, not of groups
        if isinstance(way, StraightToKernel) and world.size == 1 and by_group and _may_lie_together(made, models):
            way = flat.FlatAdamW(made, way)
            gradients = way.gradients
        trained[name] = Trained(made, parameters, way, limits, torch.zeros((), device=device), gradients)
        kept = _averages(models[name], decision.twin, made, ema)
        if kept is not None:
            averages[name] = kept
    return State(models, trained, averages, buffers=BatchStatistics(models.values(), world=world))


def _from_factory(factory: Built, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What a factory of the user's makes; `ConfigError` if torch refuses its settings."""
    try:
        return factory(groups)
    except ValueError as problem:  # what torch's optimizers raise for a setting outside of its range
        raise ConfigError(
            f"optimizer: the factory's optimizer refuses its settings: {first_line(problem)}\n"
            "  give it another value: betas at least 0 and below 1, lr and eps at least 0, for example"
        ) from problem


def _may_lie_together(optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]) -> bool:
    """Whether what an optimizer trains should lie in one tensor a group, and no part of any model would notice."""
    if not all(flat.worth_it(group["params"]) for group in optimizer.param_groups):
        return False
    held = {id(tensor): tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())}
    return flat.none_shared(held.values())


def _averages(
    model: nn.Module, twin: Twin | None, optimizer: torch.optim.Optimizer, ema: float | None
) -> Averages | None:
    """What is evaluated in the model's place; None where that is the model itself."""
    if isinstance(optimizer, ScheduleFree):
        if ema is not None:
            raise _nothing_to_average(ema)
        return ScheduleFreeAverage(twin or twin_of(model), optimizer)
    return None if ema is None or twin is None else Ema(twin, ema)


def _nothing_to_average(ema: float) -> ConfigError:
    return ConfigError(
        f"ema = {ema:g} with schedule-free: that evaluates a mean of its weights already, so there is nothing to average\n"
        "  leave ema out (--ema None)"
    )


def notes(optimizers: Mapping[str, Trained], schedule: Schedule | Joined) -> list[str]:
    """What is allowed, and hardly meant: a rate that falls where the optimizer has a mean of its own instead."""
    falls = schedule.described()["shape"] != "constant"
    return [
        f"schedule-free needs no falling rate, and {schedule.described()['shape']} lets it fall:"
        " schedule=surefoot.constant(...), or --schedule.name constant"
        for trained in optimizers.values()
        if falls and isinstance(trained.optimizer, ScheduleFree)
    ]


def printed(model: nn.Module) -> str:
    """A model as it prints itself, without addresses, and its parts that are frozen or in evaluation mode."""
    parts = [("frozen", name) for name, held in model.named_parameters() if not held.requires_grad]
    parts += [("in evaluation mode", name) for name, part in model.named_modules() if not part.training]
    return "\n".join([re.sub(r"0x[0-9a-f]+", "0x", repr(model)), *(f"{name} {what}" for what, name in parts)])


def described_optimizers(
    optimizer: OptimizerSpec | Built | Mapping[str, OptimizerSpec | Built], state: State
) -> dict[str, Any]:
    """Names and settings as JSON, to be compared at resume; by model where there are several."""
    named = optimizer if isinstance(optimizer, Mapping) else dict.fromkeys(state.trained, optimizer)
    found = {name: _described(spec, state.trained[name].optimizer) for name, spec in named.items()}
    return found["model"] if list(found) == ["model"] else found


def described_plateau(plateau: Plateau, times: Timetable, *, scored: Mapping[str, Any]) -> dict[str, Any]:
    """A plateau's settings, and what else its decisions depend on: when it is asked, and the data that are scored."""
    own = {"evaluate_every": times.evaluate.described(), "scored": scored[plateau.score.split("/")[0]]}
    return vars(plateau) | own


def _described(spec: OptimizerSpec | Built, made: torch.optim.Optimizer) -> dict[str, Any]:
    if isinstance(spec, OptimizerSpec):
        rates = {"learning_rates": [group["initial_lr"] for group in made.param_groups]} if spec.rates else {}
        return spec.described() | rates
    plain = {key: value for key, value in made.defaults.items() if isinstance(value, bool | int | float | str | tuple)}
    groups = [
        {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple)}
        for group in made.param_groups
    ]
    return {"name": type(made).__name__, **plain, "groups": groups}
