"""Functions that build the models, optimizers and `State` of a run. `data/pipeline.py` builds the
data.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.config.averaging import Averaging, average_of_average
from surefoot.config.batch_size import Batching
from surefoot.config.behavior import AVERAGES, RATES_OF_CODE
from surefoot.data.pipeline import DataPipeline
from surefoot.distributed.shards import holders
from surefoot.errors import ConfigError, Setting
from surefoot.optim.build import (
    RunOptimizer,
    Source,
    TrainingPlan,
    clipped_parameters,
    run_optimizer,
)
from surefoot.optim.clipping import Clip, clear
from surefoot.optim.kinds.kind import kind_named, kind_of, refuse_shards
from surefoot.optim.lr_multipliers import factors_of, freeze, with_frozen
from surefoot.optim.optimizers import OptimizerSpec
from surefoot.optim.param_groups import ParameterGroup, former_places, parameter_groups
from surefoot.optim.trainable import Trainable
from surefoot.run.components import Models
from surefoot.run.model_kinds import (
    needs_arguments,
    refuse_kind,
    refuse_other_than_model,
    takes_no_settings,
    uncompiled,
)
from surefoot.schedules.joined import AnySchedule
from surefoot.schedules.sampled import Sampled
from surefoot.seeding import fold, seed_generators, stream_key, untouched
from surefoot.train.batch_norm_buffers import BatchStatistics
from surefoot.train.buffer_rules import BufferRule
from surefoot.train.loop import State, Step, forward_backward
from surefoot.train.precision import FORMATS
from surefoot.train.run_settings import Model
from surefoot.train.step_watch import UNWATCHED, LossWatch

if TYPE_CHECKING:
    from surefoot.optim.ema import EmaModel


def built_models(
    model: Model | Mapping[str, Model],
    *,
    settings: Mapping[str, Any] | None,
    seed: int,
    device: torch.device,
    precision: str,
) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the models by name ("model" for a single model) on their device and in their dtype,
    and the names of compiled ones.

    Factories run with seeded generators, and the one of a single model with `settings`. Models are returned without the wrappers of
    `torch.compile`.
    """
    if settings and (isinstance(model, Mapping | nn.Module) or not callable(model)):
        raise ConfigError(
            "model-settings-without-factory",
            problem=f"model_settings = {dict(settings)}, and model is no factory that takes them",
            remedy="pass the class or the function that builds the model",
            setting="model_settings",
            value=dict(settings),
        )
    on_meta = device.type == "meta"
    convert = None
    if precision in FORMATS and not on_meta:
        convert = FORMATS[precision].convert
    built: dict[str, nn.Module] = {}
    compiled_names: list[str] = []
    sources = model if isinstance(model, Mapping) else {"model": model}
    for index, (name, source) in enumerate(sources.items()):
        # the meta device allocates no memory
        with untouched(), device if on_meta else nullcontext():
            seed_generators(fold(stream_key(seed, "model"), index))
            module: Any = source
            if callable(source) and not isinstance(source, nn.Module):
                module = _called(source, settings or {})
        if not isinstance(module, nn.Module):
            refuse_other_than_model(name, module)
        module, was_compiled = uncompiled(module)
        refuse_kind(name, module, on_meta=on_meta)
        if was_compiled:
            compiled_names.append(name)
        if convert is not None:
            module = convert(module, device)
        built[name] = module.to(device)
    return built, compiled_names


def _called(build: Callable[..., nn.Module], settings: Mapping[str, Any]) -> nn.Module:
    try:
        return build(**settings)
    except TypeError as problem:
        if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
            raise  # raised inside the call
        if settings:
            raise takes_no_settings(build, settings, problem) from None
        raise needs_arguments(build, problem) from None


def set_to_train(models: Mapping[str, nn.Module], *, trained: Collection[str]) -> list[str]:
    """Set `trained` models to training mode if all their modules are in evaluation mode. Returns a
    note for each change.
    """
    notes = []
    for name, model in models.items():
        if name in trained and not any(part.training for part in model.modules()):
            model.train()
            notes.append(
                f"{name} was passed in evaluation mode (no dropout, fixed statistics); it is trained"
                " in training mode"
            )
    return notes


def refuse_unequal_passes(sizes: Batching, *, ranks: int) -> None:
    """Raise `ConfigError` if ranks with SyncBatchNorm may run different numbers of passes."""
    if sizes.pieces % ranks:
        raise ConfigError(
            "sync-batch-norm-of-unequal-shares",
            problem=f"sync_batch_norm: {ranks} ranks have unequal shares of the {sizes.pieces}"
            " micro-batches of a step",
            reason="each pass waits for all ranks",
            remedy="leave it out, or use a number of ranks that divides the micro-batches",
            setting="sync_batch_norm",
            ranks=ranks,
            micro_batches=sizes.pieces,
        )
    if sizes.unit == "tokens":
        raise ConfigError(
            "sync-batch-norm-with-tokens",
            problem="sync_batch_norm with batch_size in tokens",
            reason="a micro-batch may be empty, and the other ranks would wait for it",
            remedy="leave it out, or set batch_size in samples",
            setting="sync_batch_norm",
        )


def decided(
    models: Mapping[str, nn.Module],
    optimizer: Source | Mapping[str, Source],
    *,
    clip: Clip,
    ema: float | None,
    behavior: int,
) -> dict[str, TrainingPlan]:
    """Return the training plan of each model by name. Freezes parameters with learning rate 0, and
    copies models for averaging.
    """
    named = optimizer if isinstance(optimizer, Mapping) else dict.fromkeys(models, optimizer)
    for spec in named.values():
        if not (isinstance(spec, OptimizerSpec | Optimizer) or callable(spec)):
            raise ConfigError(
                "not-an-optimizer",
                problem=f"optimizer: {type(spec).__name__} is neither an optimizer specification"
                " nor a class or function that builds an optimizer",
                remedy="pass sf.optim.adamw(lr=...), or functools.partial(torch.optim.AdamW, lr=...);"
                " the run supplies the parameters",
                setting="optimizer",
                value=type(spec).__name__,
            )
    foreign = [name for name in named if name not in models]
    if foreign or not named:
        raise ConfigError(
            "optimizer-of-unknown-model",
            problem=f"optimizer names {', '.join(foreign) or 'no model'}",
            reason=f"models of this run: {', '.join(models)}",
            setting="optimizer",
            value=foreign,
        )
    decisions = {}
    for name, spec in named.items():
        decisions[name] = _decided(name, models, spec, clip=clip, behavior=behavior)
    for name, spec in named.items():
        averages = isinstance(spec, OptimizerSpec) and kind_named(spec.name).average is not None
        if ema is not None or averages:
            from surefoot.optim.ema import copy_model

            model_copy = copy_model(models[name], takes_rest=behavior >= AVERAGES)
            decisions[name] = replace(decisions[name], model_copy=model_copy)
    return decisions


def _decided(
    name: str,
    models: Mapping[str, nn.Module],
    spec: Source,
    *,
    clip: Clip,
    behavior: int,
    trained: set[str] | None = None,
) -> TrainingPlan:
    """Return the training plan of a model. `trained` names its trained parameters, if these changed
    after the beginning.
    """
    model = models[name]
    by_spec = spec if isinstance(spec, OptimizerSpec) else None
    lr_multipliers = () if by_spec is None else by_spec.lr_multipliers
    factors = factors_of(model, lr_multipliers)
    others = with_frozen(lr_multipliers, ())
    unfrozen_factors = factors if others == lr_multipliers else factors_of(model, others)
    if trained is None:
        freeze(model, factors)
    else:
        _refuse_without_rate(factors, trained)
    if by_spec is None:
        groups = parameter_groups(model, 0.0, rates=factors, trained=trained)
    else:
        groups = _groups_of(model, by_spec, factors, trained=trained, behavior=behavior)
    parameters = [parameter for group in groups for parameter in group.parameters]
    if not parameters:
        raise _nothing_to_train(name, models)
    clipped = clipped_parameters(clip, model, parameters)
    return TrainingPlan(spec, factors, unfrozen_factors, groups, clipped, None)


def _groups_of(
    model: nn.Module,
    spec: OptimizerSpec,
    factors: Mapping[str, float],
    *,
    trained: set[str] | None,
    behavior: int,
) -> list[ParameterGroup]:
    """Return the groups of the trained parameters of a model in an optimizer of ours."""
    groups = parameter_groups(
        model,
        spec.weight_decay,
        decay=spec.decay,
        rates=factors,
        trained=trained,
        has_decayed=spec.has_decayed,
    )
    split = kind_named(spec.name).split
    if split is None or not groups:
        return groups
    return split(model, groups, spec.settings, behavior)


def _former_places(
    model: nn.Module, plan: TrainingPlan, behavior: int, trained: set[str], count: int
) -> list[int | None]:
    """Return for each group of a plan its index among the `count` groups of earlier settings, which
    trained other parameters or had no weight decay; None for a new group.
    """
    assert isinstance(plan.spec, OptimizerSpec)
    for has_decayed in (False, True):
        spec = replace(plan.spec, weight_decay=0.0, has_decayed=has_decayed)
        former = _groups_of(model, spec, plan.unfrozen_factors, trained=trained, behavior=behavior)
        if len(former) == count:
            return former_places(plan.groups, former)
    return [*range(count)]  # of another model, which the restoring refuses


def _refuse_without_rate(factors: Mapping[str, float], trained: set[str]) -> None:
    """Raise `ConfigError` if a trained parameter has a learning rate of 0."""
    for parameter, factor in factors.items():
        if factor == 0 and parameter in trained:
            raise ConfigError(
                "unfrozen-without-learning-rate",
                problem=f"requires_grad of {parameter} is now True, but its learning rate is 0",
                reason="it would get gradients and never change",
                remedy=[
                    "to unfreeze it from the next step on, where sf.optim.frozen(...) has frozen it:"
                    " run.change('optimizer.frozen', None)",
                    "remove it from the lr_multipliers of 0, and freeze it with"
                    " requires_grad_(False) before Run(...): then it can be unfrozen during"
                    " training",
                ],
                parameter=parameter,
            )


def _nothing_to_train(name: str, models: Mapping[str, nn.Module]) -> ConfigError:
    others = []
    for other, model in models.items():
        if any(parameter.requires_grad for parameter in model.parameters()):
            others.append(other)
    if not others:
        return ConfigError(
            "nothing-to-train",
            problem=f"{type(models[name]).__name__} has no trainable parameter",
            reason="is every requires_grad False?",
            model=name,
        )
    wanted = ", ".join(f"{other!r}: ..." for other in others)
    return ConfigError(
        "optimizer-of-frozen-model",
        problem=f"{name} has no trainable parameter, but has an optimizer ({', '.join(models)})",
        reason="a frozen model, such as a teacher, needs no optimizer, and keeps its mode",
        remedy=f"name only the trained models: optimizer={{{wanted}}}",
        setting="optimizer",
        model=name,
        trainable=others,
    )


def shard_models(models: Models, pipeline: DataPipeline) -> Models:
    """Shard the models and their EMA copies over the ranks in place. Each rank trains its own
    shard. Collective.
    """
    for plan in models.decisions.values():
        if isinstance(plan.spec, OptimizerSpec):
            refuse_shards(kind_named(plan.spec.name), name=plan.spec.name)
    from surefoot.distributed.fsdp import Fsdp  # this import takes seconds
    from surefoot.distributed.sharded_model import shard_model

    world = pipeline.world
    parallel = models.parallel
    decisions = dict(models.decisions)
    exact = pipeline.exact
    nominal = None if exact and pipeline.sizes.pieces == 1 else float(pipeline.sizes.batch_size)
    fsdp = Fsdp(world, parallel, nominal, {}, shares=pipeline.shares if exact else None)
    for name, model in models.by_name.items():
        parameters = list(model.parameters())
        sharded = shard_model(model, world, parallel, exact=exact)
        fsdp.models[name] = sharded
        if name not in decisions:
            continue
        model_copy = decisions[name].model_copy
        if model_copy is not None:
            sharded_copy = shard_model(model_copy.model, world, parallel, exact=exact)
            fsdp.model_copies.append(sharded_copy)
            pairs = zip(sharded.shards.values(), sharded_copy.shards.values(), strict=True)
            model_copy = replace(model_copy, pairs=[*pairs])
        shards = dict(zip(parameters, sharded.shards.values(), strict=True))
        decisions[name] = decisions[name].on(shards, model_copy)
    fsdp.sum_exactly()
    return replace(models, decisions=decisions, fsdp=fsdp)


def built_state(
    planned: Models,
    pipeline: DataPipeline,
    *,
    clip: Clip,
    averaging: Averaging | None,
    loss: Any,
    buffer_rules: Mapping[str, BufferRule] | None,
    behavior: int,
) -> State:
    """Build the state before step 0: models, one optimizer with clipping per trained model, and EMA
    models.
    """
    world = pipeline.world
    models = planned.by_name
    decisions = planned.decisions
    buffers = BatchStatistics(
        models,
        world=world,
        shares=pipeline.shares,
        loss=loss,
        declared=buffer_rules,
        behavior=behavior,
    )
    # the functions below refer to these, not to the state, which refers to the functions
    optimizers: dict[str, RunOptimizer] = {}
    ema_models: dict[str, EmaModel] = {}
    state = State(models, optimizers, ema_models, buffers=buffers)

    def build(name: str, plan: TrainingPlan) -> None:
        optimizers[name] = run_optimizer(
            plan,
            models,
            clip=clip,
            before=optimizers.get(name),
            evaluate=evaluated_again,
            follows_code=behavior >= RATES_OF_CODE,
        )
        if isinstance(plan.spec, OptimizerSpec):
            places = partial(_former_places, models[name], plan, behavior)
            optimizers[name].former_places = places
        if plan.model_copy is None and name in ema_models:  # of an optimizer's own average
            plan = replace(plan, model_copy=ema_models[name].model_copy)
        average = _average(
            models[name],
            plan,
            optimizers[name].optimizer,
            averaging,
            before=ema_models.get(name),
            behavior=behavior,
        )
        if average is not None:
            ema_models[name] = average

    def rebuild(name: str, trained: set[str]) -> None:
        spec = decisions[name].spec
        model_copy = decisions[name].model_copy
        plan = _decided(name, models, spec, clip=clip, behavior=behavior, trained=trained)
        plan = replace(plan, model_copy=model_copy)
        joining = set(plan.parameters) - set(optimizers[name].parameters)
        clear([*joining])  # gradients from a step in which they were frozen
        if model_copy is not None:
            model_copy.copy_parameters(joining)
        build(name, plan)

    for name, plan in decisions.items():
        build(name, plan)
    trained_names = {}
    without_rate = {}
    for name, plan in decisions.items():
        trained_names[name] = {parameter for group in plan.groups for parameter in group.names}
        factors = plan.factors.items()
        without_rate[name] = {parameter for parameter, factor in factors if factor == 0}
    state.trainable = Trainable(
        models,
        trained_names,
        without_rate,
        rebuild=rebuild,
        joins_in_step=world.size == 1,
        sharded=any(holders(trained.parameters) is not None for trained in optimizers.values()),
    )
    return state


def evaluated_again(step: Step) -> tuple[Tensor, Tensor | float]:
    """Repeat the evaluation of a step at the current weights, with its samples and seeds, and
    record nothing.
    """
    # others measure the first evaluation
    watch = step._watch if isinstance(step._watch, LossWatch) else UNWATCHED
    again = Step(step.index, step.micro_batches, step._task, step.state, _watch=watch)
    assert step._pending is not None  # in its update
    mean = forward_backward(again, step._pending[2])
    assert again._pending is not None
    return mean, again._pending[1]


def _average(
    model: nn.Module,
    plan: TrainingPlan,
    optimizer: Optimizer,
    averaging: Averaging | None,
    *,
    before: "EmaModel | None",
    behavior: int,
) -> "EmaModel | None":
    kind = kind_of(optimizer)
    average_of = None if kind is None else kind.average
    if kind is None:
        from surefoot.optim.switched_weights import SwitchedWeights, switches_weights

        if switches_weights(optimizer):
            average_of = SwitchedWeights
    if average_of is not None:
        if averaging is not None:
            called = type(optimizer).__name__ if kind is None else kind.name
            raise average_of_average(averaging.decay, optimizer=str(called))
        from surefoot.optim.ema import copy_model

        takes_rest = behavior >= AVERAGES
        model_copy = plan.model_copy or copy_model(model, takes_rest=takes_rest)
        return average_of(model_copy, optimizer)
    if averaging is None or plan.model_copy is None:
        return None
    from surefoot.optim.ema import Ema

    if isinstance(before, Ema):  # parameters joined
        before.follow(set(plan.parameters))
        return before
    return Ema(plan.model_copy, averaging, trained=set(plan.parameters))


def notes(optimizers: Mapping[str, RunOptimizer], schedule: AnySchedule) -> list[str]:
    """Return notes: a scheduler that does not reach its end, and averaging optimizers whose
    learning rate is lowered.
    """
    lines = []
    if isinstance(schedule, Sampled) and schedule.note:
        lines.append(schedule.note)
    shape = schedule.to_dict()["shape"]
    if shape == "constant":
        return lines
    for trained in optimizers.values():
        kind = kind_of(trained.optimizer)
        if kind is not None and kind.average is not None:
            lines.append(
                f"{kind.name} needs no learning-rate decay, but {shape} lowers the learning rate:"
                f" {Setting('schedule.name', 'constant')}"
            )
    return lines
