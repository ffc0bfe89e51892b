"""The stages that build a run's components from its settings. `run/build_state.py` builds models,
optimizers and state.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from weakref import finalize

from surefoot.config.accepted_changes import change_names
from surefoot.config.averaging import averaging_in_identity, averaging_of_settings
from surefoot.config.behavior import (
    BUFFERS_IN_ORDER,
    STEP_OF_SAMPLES,
    STREAM_OF_ONE_RANK,
    behavior_in_identity,
    known_behavior,
    mean_of_nothing,
    newest_behavior,
)
from surefoot.config.extras import trackers_of
from surefoot.config.parallel import Strategy, strategy_for
from surefoot.config.paths import absolute_path, named_path, run_path
from surefoot.config.setting import identity_of, shared_by_ranks
from surefoot.config.train_settings import clipping, timetable
from surefoot.data import pipeline as data_pipeline
from surefoot.data.data_values import DataValues
from surefoot.data.dataset_checks import check_samples, check_split, fingerprint
from surefoot.distributed.spread import spread
from surefoot.distributed.world import World, joined
from surefoot.optim.build import optimizer_identity, refuse_without_momentum
from surefoot.run import build_state as assembly
from surefoot.run.checkpointing import Checkpointing
from surefoot.run.components import Models, Plan, RunComponents
from surefoot.run.messages import loss_remark
from surefoot.run.model_kinds import described_adapters
from surefoot.run.validate import check_settings, json_settings
from surefoot.schedules.joined import factors_by_optimizer
from surefoot.schedules.lr_schedule import constant
from surefoot.seeding import stream_key
from surefoot.tracking.console import RankLog, Screen, TextLog
from surefoot.tracking.numbered import choose_directory, give_back, is_numbered
from surefoot.tracking.run_directory import RunDirectory, checked_files
from surefoot.tracking.run_reader import (
    Beginning,
    other_format,
    read_beginning,
    unreadable_format,
)
from surefoot.train.buffer_check import refuse_order
from surefoot.train.compile import Layout, compiled, compiling, layout, refuse_compiled, sole_or_all
from surefoot.train.components import bound_to, group_counts, printed
from surefoot.train.loop import State, Task
from surefoot.train.meter import Meter
from surefoot.train.patience import EarlyStopping, feedback, rules_of, watched
from surefoot.train.precision import precision as chosen_precision
from surefoot.train.run_settings import RunSettings, read_train_data
from surefoot.train.scorer import Evaluator
from surefoot.train.state_dict import RunState
from surefoot.train.weight_check import refuse_max_norm


def build(settings: RunSettings) -> RunComponents:
    """Build the components of a run without writing files. Raises `ConfigError` or `DataError` for
    invalid settings or data. Collective.
    """
    with ExitStack() as unless_built:
        parts = _built(settings, unless_built)
        unless_built.pop_all()
    return parts


def _built(settings: RunSettings, unless_built: ExitStack) -> RunComponents:
    data = read_train_data(settings)
    check_settings(
        settings, schedule=settings.schedule, batch_size=data.size_for(settings.micro_batch_size)
    )
    world, parallel = join_world(settings)
    numbered = str(settings.run_dir) if is_numbered(settings.run_dir) else None
    if numbered is not None:
        settings = in_numbered_directory(settings, world, unless_built)
    plan = plan_data(settings, data, world, parallel, unless_built)
    log = None if world.is_main else RankLog()
    console: Screen | None = None
    if settings.console:
        from surefoot.tracking.live_terminal import screen

        console = screen(
            plan.times.length.steps,
            log,
            unit=settings.count_unit,
            every_record=settings.log_every != "auto",
            epochs=plan.times.epoch.count(0, plan.times.length.steps),
            marks_loss=loss_remark(settings) is not None,
        )
    models = build_models(settings, world, parallel, plan)
    check_first_batch(settings, models, plan.pipeline)
    if models.parallel.kind == "fsdp" and not world.on_meta:
        models = assembly.shard_models(models, plan.pipeline)
    state = assembly.built_state(
        models,
        plan.pipeline,
        clip=clipping(settings.clip),
        averaging=averaging_of_settings(settings, plan.times.length, behavior=plan.behavior),
        loss=settings.loss,
        buffer_rules=settings.buffers,
        behavior=plan.behavior,
    )
    refuse_order(
        state.buffers,
        parallel=models.parallel,
        loss=settings.loss,
        sync_batch_norm=settings.sync_batch_norm,
    )
    if any(trained.takes_closure for trained in state.optimizers.values()):
        from surefoot.optim.closure_step import refuse_closures

        scaled, is_compiled = models.precision.loss_scale is not None, models.compiling.on
        refuse_closures(state.optimizers.values(), scaled=scaled, compiled=is_compiled)
    plan = replace(plan, schedule=bound_to(plan.schedule, state.optimizers.values()))
    parts = assemble(settings, plan, models, state, console, log)
    for line in [*models.notes, *assembly.notes(state.optimizers, plan.schedule)]:
        parts.say(f"note: {line}")
    if numbered is not None and parts.directory is not None:
        parts.directory.numbered = numbered
        if world.is_main:  # a run that is never opened leaves no directory
            finalize(parts.directory, give_back, parts.directory.path)
    return parts


def in_numbered_directory(
    settings: RunSettings, world: World, unless_built: ExitStack
) -> RunSettings:
    """Return the settings with the directory that rank 0 chooses for a run_dir with {n}.
    Collective.
    """
    chosen = None
    if world.is_main and settings.run_dir is not None:
        directory = choose_directory(settings.run_dir)
        unless_built.callback(give_back, absolute_path(directory))
        chosen = str(directory)
    return replace(settings, run_dir=world.from_main(chosen))


def join_world(settings: RunSettings) -> tuple[World, Strategy]:
    """Connect the ranks and select the parallel strategy. Raises `ConfigError` if the settings
    differ between ranks. Collective.
    """
    parallel = settings.parallel
    sharded = (parallel.kind if isinstance(parallel, Strategy) else parallel) == "fsdp"
    world = joined(settings.device, sharded=sharded)
    if world.size > 1:
        from surefoot.distributed.consistency import check_same_on_all_ranks, comparable

        check_same_on_all_ranks(
            world, comparable(shared_by_ranks(settings)) | {"device": world.device.type}
        )
    return world, strategy_for(parallel, ranks=world.on_meta or world.ranks)


def plan_data(
    settings: RunSettings,
    data: data_pipeline.TrainData,
    world: World,
    parallel: Strategy,
    unless_built: ExitStack,
) -> Plan:
    """Plan the samples of each step, the timetable, and the splits to evaluate. `unless_built` ends
    what begins here. Collective.
    """
    seed = settings.seed
    out = None
    beginning = None
    if settings.run_dir is not None:
        out = absolute_path(run_path(settings.run_dir, setting="run_dir"))
        beginning = beginning_of(out, world, shown=settings.run_dir)
    behavior = newest_behavior()
    micro_batch_size_of_run = None
    exact_sums = settings.exact_sums
    if beginning is not None:
        behavior = known_behavior(beginning.behavior, run=str(out))
        batch_size = None if data.lists_batches else data.batch_size
        micro_batch_size_of_run = beginning.micro_batch_size_for(batch_size)
        exact_sums = exact_sums and beginning.exact_sums
    if world.size > 1:
        from surefoot.data.same_on_ranks import refuse_other_lists

        refuse_other_lists(world, data.order)
    splits = settings.splits or {}
    values = DataValues(data.read_objects(splits))
    sizes = data_pipeline.planned_sizes(
        data, settings.micro_batch_size, ranks=world.ranks, began=micro_batch_size_of_run
    )
    tape = data_pipeline.tape_of(settings, data, world, run_dir=out, sizes=sizes, behavior=behavior)
    if tape is not None:
        unless_built.callback(tape.abandon)
        data = replace(data, dataset=tape)
    if tape is None:
        collates = data.collate is not None
        samples = check_samples(
            data.dataset, seed=seed, batch_size=sizes.batch_size, collates=collates
        )
    else:
        samples = tape.samples
    plan = data_pipeline.data_plan(
        data.dataset, order=data.order, seed=seed, samples=samples, sizes=sizes
    )
    refuse_compiled(plan, data, compiled=settings.compile is True)
    # sizes of an epoch and of a step in samples, or in steps if the samples per step vary
    of_epoch, of_step = (plan.samples, sizes.batch_size) if plan.steps is None else (plan.steps, 1)
    times = timetable(settings, samples_per_epoch=of_epoch, batch_size=of_step)
    splits = data_pipeline.taped_splits(
        settings, world, run_dir=out, behavior=behavior, unless_built=unless_built
    )
    for name, split in splits.items():
        check_split(name, split.data, seed=seed)
    values.note_reading()  # by the checks above
    compared = {f"split {name!r}": split.data for name, split in splits.items()}
    if tape is None:
        compared["train_data"] = data.dataset
    if behavior >= STREAM_OF_ONE_RANK and world.size > 1:
        from surefoot.data.same_on_ranks import refuse_other_samples

        refuse_other_samples(world, compared, seed=seed)
    data = data_pipeline.with_splits(data, splits)
    steering = [name for name, split in splits.items() if not split.at_end]
    rules = rules_of(settings.early_stopping)
    best, stopping = watched(
        settings.best,
        rules,
        keep_best=settings.keep_best,
        splits=steering,
        at_end=[name for name, split in splits.items() if split.at_end],
        behavior=behavior,
    )
    return Plan(
        data_pipeline.DataPipeline(
            data,
            plan,
            sizes,
            seed,
            world,
            settings.count_fn,
            tape,
            parallel,
            exact_sums,
            passes_step=behavior >= STEP_OF_SAMPLES,
        ),
        times,
        (settings.schedule or constant()).resolved(times.length),
        best=best,
        stopping=stopping,
        lowering=feedback(settings.plateau, rules, splits=steering),
        behavior=behavior,
        data_values=values,
        splits=splits,
    )


def beginning_of(directory: Path, world: World, *, shown: Path | str) -> Beginning | None:
    """Return how the run in a directory began, as rank 0 reads it. `shown` is the path as the user
    gave it. Collective.
    """
    beginning = read_beginning(directory)
    reads = (other_format(directory), None if beginning is None else asdict(beginning))
    other_format_of_main, beginning_of_main = world.from_main(reads)
    if other_format_of_main is not None:
        raise unreadable_format(other_format_of_main, run=shown)
    return None if beginning_of_main is None else Beginning(**beginning_of_main)


def build_models(settings: RunSettings, world: World, parallel: Strategy, plan: Plan) -> Models:
    """Build the models with the run's seed and rank 0's weights, and plan the training of each
    model. Collective.
    """
    optimizer, device = settings.optimizer, world.device
    models, compiled_names = assembly.built_models(
        settings.model, seed=settings.seed, device=device, precision=settings.precision
    )
    if plan.behavior >= BUFFERS_IN_ORDER:
        refuse_max_norm(models)
    if world.size > 1:
        from surefoot.distributed.consistency import equal_from_main

        equal_from_main(models, world)
    notes = assembly.set_to_train(
        models, trained=optimizer if isinstance(optimizer, Mapping) else models
    )
    if (
        compiled_names
    ):  # by the user: the run compiles them, so that resumed steps are compiled alike
        refuse_compiled(plan.pipeline.plan, plan.pipeline.data, compiled=True)
        notes.append(
            f"{', '.join(compiled_names)} was compiled: the run compiles its models itself (compile = True)"
        )
    if settings.sync_batch_norm:
        from surefoot.distributed.ddp import synchronized

        models = synchronized(models)
        notes += ["sync_batch_norm has no effect in one process"] * (world.size == 1)
    if settings.sync_batch_norm or world.ranks > 1:
        from surefoot.distributed.sync_batch_norm import has_synchronized_norms, synchronize_on_cpu

        if has_synchronized_norms(models.values()):  # the user may have converted them
            assembly.refuse_unequal_passes(plan.pipeline.sizes, ranks=world.ranks)
            if world.device.type == "cpu":  # torch's SyncBatchNorm has no kernels for it
                synchronize_on_cpu(models.values())
    decisions = assembly.decided(
        models,
        optimizer,
        clip=clipping(settings.clip),
        ema=settings.ema,
        behavior=plan.behavior,
    )
    architecture = {name: printed(model) for name, model in models.items()}
    recomputed, how = None, settings.activation_checkpointing
    if how != "off":  # after EMA copies, which need no gradient
        from surefoot.train.activation_checkpointing import compute_again, in_words

        recomputed = in_words(
            how, compute_again(models, how, blocks=settings.activation_checkpointing_modules)
        )
    precision, compiles = (
        chosen_precision(
            settings.precision, device, updates_on="cpu" if parallel.cpu_offload else None
        ),
        compiling(settings.compile or bool(compiled_names)),
    )
    return Models(models, precision, compiles, parallel, decisions, architecture, recomputed, notes)


def check_first_batch(
    settings: RunSettings, models: Models, pipeline: data_pipeline.DataPipeline
) -> None:
    """Test one micro-batch before distributed training. Raises `ConfigError` if the strategy cannot
    train the models. Collective.
    """
    world, parallel, is_sharded = pipeline.world, models.parallel, models.parallel.kind == "fsdp"
    if settings.loss is None or world.on_meta or not (world.size > 1 or is_sharded):
        return
    from surefoot.distributed.blocks import gathered
    from surefoot.train.parallel_check import check_first_pass

    check_first_pass(
        models.by_name,
        settings.loss,
        pipeline.first(),
        precision=models.precision,
        world=world,
        allow_unused=parallel.find_unused_parameters,
        gathered=[part for model in models.by_name.values() for part in gathered(model, parallel)]
        if is_sharded
        else (),
    )


def assemble(
    settings: RunSettings,
    plan: Plan,
    models: Models,
    state: State,
    console: Screen | None,
    log: RankLog | None,
) -> RunComponents:
    """Assemble the components: wrap the models for their ranks, and prepare evaluation, checkpoints
    and records.
    """
    pipeline = plan.pipeline
    times = plan.times
    precision = models.precision
    splits = plan.splits
    laid = layout(
        settings.channels_last,
        [*state.models.values(), *(average.model for average in state.ema_models.values())],
    )
    ranks, called = spread(
        state.models,
        compiled(state.models) if models.compiling.on else state.models,
        world=pipeline.world,
        parallel=models.parallel,
        sizes=pipeline.sizes,
        shares=pipeline.shares,
        exact=plan.pipeline.exact,
        fsdp=models.fsdp,
    )
    task = Task(
        forward=sole_or_all(called),
        loss=settings.loss,
        key=stream_key(settings.seed, "train"),
        precision=precision,
        factors=plan.schedule.factors(times.length),
        group_factors=factors_by_optimizer(
            plan.schedule, times.length, group_counts(state.optimizers)
        ),
        momentum=plan.schedule.momentum(times.length),
        settings=settings,
        ranks=ranks,
    )
    if task.momentum is not None:
        refuse_without_momentum(state.optimizers.values())
    directory = (
        None
        if settings.run_dir is None
        else RunDirectory(run_path(settings.run_dir, setting="run_dir"), text_log=settings.text_log)
    )
    text_log = None
    if settings.text_log and pipeline.world.is_main:
        epochs = times.epoch.count(0, times.length.steps)
        text_log = TextLog(times.length.steps, unit=settings.count_unit, epochs=epochs)
    screens = [console, None if text_log is None else text_log.console]

    def say(text: str) -> None:
        for each in screens:
            if each is not None:
                each.say(text)

    return RunComponents(
        settings=settings,
        task=task,
        run_state=RunState(
            state,
            precision,
            plan.best,
            plan.stopping,
            plan.lowering,
            Meter(of_nothing=mean_of_nothing(plan.behavior)),
            data_values=plan.data_values,
            batch_lists=pipeline.batch_lists,
        ),
        pipeline=pipeline,
        evaluator=Evaluator(
            state,
            pipeline,
            splits=splits,
            loss=settings.loss,
            precision=precision,
            compiling=models.compiling,
            ranks=task.ranks,
            behavior=plan.behavior,
        ),
        timetable=times,
        schedule=plan.schedule,
        world=pipeline.world,
        parallel=models.parallel,
        compiling=models.compiling,
        layout=laid,
        identity=run_identity(settings, plan, models, state, laid),
        architecture=models.architecture,
        split_identity={name: fingerprint(split.data) for name, split in splits.items()},
        directory=directory,
        checkpointing=None
        if directory is None
        else Checkpointing(directory, times, disk=settings.disk, say=say, world=pipeline.world),
        console=console,
        text_log=text_log,
        rank_log=log,
        computed_again=models.recomputed,
        files=checked_files(settings.extra_files or {}) | described_adapters(state.models),
        example=settings.predict_example,
        trackers=trackers_of(settings.trackers, out=settings.run_dir),
        accept_change=change_names(settings.accept_change),
    )


def run_identity(
    settings: RunSettings, plan: Plan, models: Models, state: State, laid: Layout
) -> dict[str, Any]:
    """Return the resolved settings and data fingerprints that a resume compares."""
    times, pipeline, lowering = plan.times, plan.pipeline, plan.lowering
    plateau = None
    if (
        lowering is not None
    ):  # its decisions also depend on the evaluation interval and the evaluated data
        scored = fingerprint(plan.splits[lowering.plateau.score.split("/")[0]].data)
        plateau = vars(lowering.plateau) | {
            "evaluate_every": times.every["evaluate_every"].described(),
            "scored": scored,
        }
    optimizers = {
        name: optimizer_identity(each, state.optimizers[name])
        for name, each in models.decisions.items()
    }
    averaging = averaging_of_settings(settings, times.length, behavior=plan.behavior)
    resolved = {
        "init_from": None
        if settings.init_from is None
        else os.path.realpath(named_path(settings.init_from, setting="init_from")),
        "length": f"{times.length.steps} steps",
        "early_stopping": _described(settings.early_stopping),
        **averaging_in_identity(averaging),
        **pipeline.sizes.to_dict(),
        "optimizer": sole_or_all(optimizers),
        "schedule": plan.schedule.to_dict(),
        "plateau": plateau,
        "precision": models.precision.name,
        "channels_last": laid.channels_last,
        "compile": models.compiling.on,
        "exact_sums": pipeline.exact_sums,
        **behavior_in_identity(plan.behavior),
        "buffers": settings.buffers or None,
        "identity": json_settings(settings.identity or {}),
        "schedule_of_steps": times.length.steps,
        "data": {"plan": pipeline.plan.to_dict(), **fingerprint(pipeline.dataset)},
    }
    return identity_of(settings, resolved)


def _described(early_stopping: EarlyStopping | Sequence[EarlyStopping] | None) -> Any:
    """Return the rules of early stopping in the form in which they were given."""
    if early_stopping is None:
        return None
    if isinstance(early_stopping, EarlyStopping):
        return vars(early_stopping)
    return [vars(rule) for rule in early_stopping]
