"""The stages that build a run's components from its settings. `run/build_state.py` builds models,
optimizers and state.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from weakref import finalize

from torch import nn

from surefoot.config.accepted_changes import change_names
from surefoot.config.behavior import (
    BUFFERS_IN_ORDER,
    STEP_OF_SAMPLES,
    STREAM_OF_ONE_RANK,
    known_behavior,
    mean_of_nothing,
)
from surefoot.config.extras import trackers_of
from surefoot.config.order import Weighted, draws_as_many
from surefoot.config.parallel import Strategy, strategy_for
from surefoot.config.paths import absolute_path, named_path, run_path
from surefoot.config.ramps import Ramp
from surefoot.config.setting import shared_by_ranks
from surefoot.config.train_settings import clipping
from surefoot.data import pipeline as data_pipeline
from surefoot.data.data_values import DataValues
from surefoot.data.dataset_checks import check_samples, check_split, is_stream
from surefoot.data.mixture import Mixture
from surefoot.distributed.spread import spread
from surefoot.distributed.world import World, joined
from surefoot.errors import CheckpointError, ConfigError
from surefoot.optim.build import refuse_without_momentum
from surefoot.run import build_state as assembly
from surefoot.run.checkpointing import Checkpointing
from surefoot.run.components import Models, RunComponents, RunData, Steering
from surefoot.run.facts import data_facts, model_facts, size_facts, world_facts
from surefoot.run.history import SettingsHistory, StepSize, passed_in, read_history
from surefoot.run.messages import loss_remark
from surefoot.run.model_kinds import described_adapters
from surefoot.run.new_data import refuse_data_of_later_steps
from surefoot.run.validate import check_settings
from surefoot.run.way_back import name_way_back, naming_changed_model
from surefoot.schedules.joined import factors_by_optimizer
from surefoot.seeding import stream_key
from surefoot.tracking.console import RankLog, Screen, TextLog
from surefoot.tracking.numbered import (
    choose_directory,
    give_back,
    is_numbered,
    rebuilt_run,
    rebuilt_step,
)
from surefoot.tracking.record import refuse_split_names
from surefoot.tracking.run_directory import RunDirectory, checked_files
from surefoot.tracking.run_reader import (
    Beginning,
    new_beginning,
    other_format,
    read_beginning,
    unreadable_format,
)
from surefoot.train.buffer_check import refuse_order
from surefoot.train.changed_settings import changeable, values_at
from surefoot.train.compile import compiled, layout, sole_or_all
from surefoot.train.components import group_counts, printed
from surefoot.train.evaluate import Split
from surefoot.train.loop import State, Task
from surefoot.train.meter import Meter
from surefoot.train.patience import feedback, rules_of, watched
from surefoot.train.plan import Plan, SizeFacts, resolve, resolve_timeline
from surefoot.train.precision import Precision
from surefoot.train.precision import precision as chosen_precision
from surefoot.train.ramps import changes_of_ramps, not_written, without_ramps
from surefoot.train.run_settings import RunSettings, read_train_data
from surefoot.train.scorer import Evaluator
from surefoot.train.state_dict import RunState
from surefoot.train.weight_check import refuse_max_norm


def build(settings: RunSettings, *, directory: RunDirectory | None = None) -> RunComponents:
    """Build the components of a run without writing files. `directory` is that of a run that is
    built again. Raises `ConfigError` or `DataError` for invalid settings or data, and
    `CheckpointError` for a run that cannot go on. Collective.
    """
    with ExitStack() as unless_built:
        try:
            parts = _built(settings, directory, unless_built)
        except ConfigError as problem:
            name_way_back(problem, rebuilt_run() or settings.run_dir)
            raise
        unless_built.pop_all()
    return parts


def _built(
    settings: RunSettings, directory: RunDirectory | None, unless_built: ExitStack
) -> RunComponents:
    settings, ramps = without_ramps(settings)
    data = read_train_data(settings)
    if isinstance(data.dataset, Mixture):
        ramps |= data.dataset.ramps
    _check(settings, data)
    world, parallel = join_world(settings, ramps)
    numbered = str(settings.run_dir) if is_numbered(settings.run_dir) else None
    if numbered is not None:
        settings = in_numbered_directory(settings, world, unless_built)
    beginning = beginning_of(settings, world)
    history = read_history(
        settings,
        ramps,
        data,
        world,
        step=beginning.step,
        evaluation_due=beginning.evaluation_due,
    )
    if history.changes:
        settings = history.settings
        data = replace(data.with_batch_size(settings.batch_size), dataset=settings.train_data)
        _check(settings, data)
    run_data = read_data(settings, history, data, world, parallel, beginning, unless_built)
    pipeline = run_data.pipeline
    facts_of_sizes = size_facts(pipeline, run_data.earlier)
    history = with_first_changes(history, facts_of_sizes, data, world)
    try:
        timeline = resolve_timeline(
            settings,
            facts_of_sizes,
            beginning,
            exact_sums=pipeline.exact_sums,
            history=history.segments,
            next_change=history.next_change,
        )
    except CheckpointError as problem:
        raise problem.inside(f"cannot resume {settings.run_dir}") from problem.__cause__
    steering = steering_of(settings, run_data.splits, behavior=beginning.behavior)

    log = None if world.is_main else RankLog()
    console: Screen | None = None
    if settings.console:
        from surefoot.tracking.live_terminal import screen

        length = timeline.times.length
        console = screen(
            length.steps,
            log,
            unit=settings.count_unit,
            every_record=settings.log_every != "auto",
            epochs=timeline.times.epoch.count(0, length.steps),
            marks_loss=loss_remark(settings) is not None,
        )

    with naming_changed_model(history, step=beginning.step):
        models = build_models(settings, world, parallel, pipeline, behavior=beginning.behavior)
    check_first_batch(settings, models, pipeline, beginning)
    if models.parallel.kind == "fsdp" and not world.on_meta:
        models = assembly.shard_models(models, pipeline)
    state = assembly.built_state(
        models,
        pipeline,
        clip=clipping(settings.clip),
        averaging=timeline.averaging,
        loss=settings.loss,
        buffer_rules=settings.buffers,
        behavior=beginning.behavior,
    )
    refuse_order(
        state.buffers,
        parallel=models.parallel,
        loss=settings.loss,
        sync_batch_norm=settings.sync_batch_norm,
    )

    facts_of_world = world_facts(world)
    facts_of_models = model_facts(
        state.models, state.optimizers, models.decisions, was_compiled=models.was_compiled
    )
    needs_shape = (
        beginning.is_new
        and settings.loss is not None
        and facts_of_world.is_measured
        and facts_of_models.layers is not None
    )
    # the user's functions for models and optimizers may have changed values
    run_data.values.refresh()
    facts_of_data = data_facts(pipeline, run_data.splits, reads_shape=needs_shape)
    run_data.values.note_reading()
    plan = resolve(
        settings,
        facts_of_world,
        timeline,
        facts_of_data,
        facts_of_models,
        beginning,
        parallel=models.parallel,
        init_from=_initial_weights(settings),
        begins=history.begins,
        changed=history.changed,
    )
    parts = assemble(
        settings, history, plan, run_data, steering, models, state, directory, console, log
    )
    for line in [*models.notes, *assembly.notes(state.optimizers, plan.schedule)]:
        parts.say(f"note: {line}")
    if numbered is not None and parts.directory is not None:
        parts.directory.numbered = numbered
        if world.is_main:  # a run that is never opened leaves no directory
            finalize(parts.directory, give_back, parts.directory.path)
    return parts


def with_first_changes(
    history: SettingsHistory, sizes: SizeFacts, data: data_pipeline.TrainData, world: World
) -> SettingsHistory:
    """Return the history of a new run with the changes of its ramps, with which its journal will
    begin. Raises `ConfigError` for a batch size that the ranks cannot share.
    """
    if not history.ramps:
        return history
    first = history.segments[0].settings
    values = changeable(replace(first, batch_size=data.batch_size, train_data=data.dataset))
    changes = changes_of_ramps(history.ramps, values, sizes)
    for change in changes:
        present = values_at(values, changes, change.from_step)
        data_pipeline.planned_sizes(
            data.with_batch_size(present["batch_size"]),
            present["micro_batch_size"],
            ranks=world.ranks,
            began=sizes.sizes.micro_batch_size,
        )
    return replace(
        history,
        next_change=changes[0].from_step,
        first_changes=not_written(changes, history.changes),
    )


def _check(settings: RunSettings, data: data_pipeline.TrainData) -> None:
    batch_size = data.size_for(settings.micro_batch_size)
    check_settings(settings, schedule=settings.schedule, batch_size=batch_size)


def _initial_weights(settings: RunSettings) -> str | None:
    """Return the path of `init_from` without links, whatever the current directory becomes."""
    if settings.init_from is None:
        return None
    return os.path.realpath(named_path(settings.init_from, setting="init_from"))


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


def join_world(settings: RunSettings, ramps: Mapping[str, Ramp]) -> tuple[World, Strategy]:
    """Connect the ranks and select the parallel strategy. Raises `ConfigError` if the settings
    differ between ranks. Collective.
    """
    parallel = settings.parallel
    kind = parallel.kind if isinstance(parallel, Strategy) else parallel
    world = joined(settings.device, sharded=kind == "fsdp")
    if world.size > 1:
        from surefoot.distributed.consistency import check_same_on_all_ranks, comparable

        shared = comparable(shared_by_ranks(settings)) | {"device": world.device.type}
        shared |= {name: ramp.text for name, ramp in ramps.items()}
        check_same_on_all_ranks(world, shared)
    return world, strategy_for(parallel, ranks=world.on_meta or world.ranks)


def beginning_of(settings: RunSettings, world: World) -> Beginning:
    """Return how the run in the directory of the settings began, as rank 0 reads it, or the
    beginning of a new run. A run that is built again began as that in its own directory, whatever
    its program names. Raises `CheckpointError` for a run that this version cannot go on with.
    Collective.
    """
    shown = rebuilt_run() or settings.run_dir
    if shown is None:
        return new_beginning()
    directory = absolute_path(run_path(shown, setting="run_dir"))
    read = None
    if world.is_main:
        read = (other_format(directory), asdict(read_beginning(directory)))
    unknown_format, beginning = world.from_main(read)
    if unknown_format is not None:
        raise unreadable_format(unknown_format, run=shown)
    known_behavior(beginning["behavior"], run=str(directory))
    at_step = rebuilt_step()
    if at_step is not None:
        beginning["step"] = at_step
        beginning["evaluation_due"] = False
    return Beginning(**beginning)


def read_data(
    settings: RunSettings,
    history: SettingsHistory,
    data: data_pipeline.TrainData,
    world: World,
    parallel: Strategy,
    beginning: Beginning,
    unless_built: ExitStack,
) -> RunData:
    """Plan the samples of each step, and check the data of training and splits. `unless_built` ends
    what begins here. Collective.
    """
    if beginning.is_new:
        refuse_split_names(settings.splits or {})
    seed = settings.seed
    behavior = beginning.behavior
    out = None
    if settings.run_dir is not None:
        out = absolute_path(run_path(settings.run_dir, setting="run_dir"))
    if world.size > 1:
        from surefoot.data.same_on_ranks import refuse_other_lists

        refuse_other_lists(world, data.order)
    values = DataValues(data.read_objects(settings.splits or {}))
    sizes = data_pipeline.planned_sizes(
        data,
        settings.micro_batch_size,
        ranks=world.ranks,
        began=beginning.micro_batch_size_for(None if data.lists_batches else data.batch_size),
    )
    refuse_data_of_later_steps(history, data, run=str(settings.run_dir))
    samples = None
    if not is_stream(data.dataset):
        collates = data.collate is not None
        samples = check_samples(
            data.dataset, seed=seed, batch_size=sizes.batch_size, collates=collates
        )

    def step_size(earlier: RunSettings, samples: int) -> StepSize:
        of_earlier = data.with_batch_size(earlier.batch_size)
        sizes = data_pipeline.planned_sizes(of_earlier, earlier.micro_batch_size)
        if is_stream(data.dataset):
            return StepSize(sizes.batch_size, None, None)
        if isinstance(data.order, Weighted) and draws_as_many(data.order):
            return StepSize(sizes.batch_size, samples, None)
        plan = data_pipeline.data_plan(
            of_earlier.dataset, order=of_earlier.order, seed=seed, samples=samples, sizes=sizes
        )
        return StepSize(sizes.batch_size, plan.samples, plan.steps)

    data_size = samples or 0  # of a stream: no matter
    passed, earlier_sizes = passed_in(history, step_size, samples=data_size)
    if history.to_come:  # what they cannot be is refused now, not after the steps before
        whole = replace(history, segments=(*history.segments, *history.to_come))
        passed_in(whole, step_size, samples=data_size)
        step_size(history.to_come[-1].settings, data_size)
    tape = data_pipeline.tape_of(
        settings, data, world, run_dir=out, sizes=sizes, passed=passed, behavior=behavior
    )
    if tape is not None:
        unless_built.callback(tape.abandon)
        data = replace(data, dataset=tape)
        samples = tape.samples
    assert samples is not None
    order = data_pipeline.data_plan(
        data.dataset,
        order=data.order,
        seed=seed,
        samples=samples,
        sizes=sizes,
        passed=passed,
        weights_from=history.weights_from,
    )
    splits = data_pipeline.taped_splits(
        settings, world, run_dir=out, behavior=behavior, unless_built=unless_built
    )
    for name, split in splits.items():
        check_split(name, split.data, seed=seed)
    compared = {f"split {name!r}": split.data for name, split in splits.items()}
    if tape is None:
        compared["train_data"] = data.dataset
    values.note_reading()  # by the checks above
    if behavior >= STREAM_OF_ONE_RANK and world.size > 1:
        from surefoot.data.same_on_ranks import refuse_other_samples

        refuse_other_samples(world, compared, seed=seed)
    pipeline = data_pipeline.DataPipeline(
        data_pipeline.with_splits(data, splits),
        order,
        sizes,
        seed,
        world,
        settings.count_fn,
        tape,
        parallel,
        settings.exact_sums and beginning.exact_sums,
        passes_step=behavior >= STEP_OF_SAMPLES,
        passed=passed,
    )
    return RunData(pipeline, splits, values, earlier_sizes)


def steering_of(settings: RunSettings, splits: Mapping[str, Split], *, behavior: int) -> Steering:
    """Return the scores that steer training. Raises `ConfigError` for a score of no split."""
    scored = [name for name, split in splits.items() if not split.at_end]
    at_end = [name for name, split in splits.items() if split.at_end]
    rules = rules_of(settings.early_stopping)
    best, stopping = watched(
        settings.best,
        rules,
        keep_best=settings.keep_best,
        splits=scored,
        at_end=at_end,
        behavior=behavior,
    )
    return Steering(best, stopping, feedback(settings.plateau, rules, splits=scored))


def build_models(
    settings: RunSettings,
    world: World,
    parallel: Strategy,
    pipeline: data_pipeline.DataPipeline,
    *,
    behavior: int,
) -> Models:
    """Build the models with the run's seed and rank 0's weights, and plan the training of each
    model. Collective.
    """
    optimizer = settings.optimizer
    device = world.device
    models, compiled_names = assembly.built_models(
        settings.model,
        settings=settings.model_settings,
        seed=settings.seed,
        device=device,
        precision=settings.precision,
    )
    if behavior >= BUFFERS_IN_ORDER:
        refuse_max_norm(models)
    if world.size > 1:
        from surefoot.distributed.consistency import equal_from_main

        equal_from_main(models, world)
    notes = assembly.set_to_train(
        models, trained=optimizer if isinstance(optimizer, Mapping) else models
    )
    if compiled_names:
        # by the user: the run compiles them, so that resumed steps are compiled alike
        notes.append(
            f"{', '.join(compiled_names)} was compiled: the run compiles its models itself (compile ="
            " True)"
        )
    if settings.sync_batch_norm:
        from surefoot.distributed.ddp import synchronized

        models = synchronized(models)
        if world.size == 1:
            notes.append("sync_batch_norm has no effect in one process")
    if settings.sync_batch_norm or world.ranks > 1:
        from surefoot.distributed.sync_batch_norm import has_synchronized_norms, synchronize_on_cpu

        if has_synchronized_norms(models.values()):  # the user may have converted them
            assembly.refuse_unequal_passes(pipeline.sizes, ranks=world.ranks)
            if world.device.type == "cpu":  # torch's SyncBatchNorm has no kernels for it
                synchronize_on_cpu(models.values())
    decisions = assembly.decided(
        models,
        optimizer,
        clip=clipping(settings.clip),
        ema=settings.ema,
        behavior=behavior,
    )
    architecture = {name: printed(model) for name, model in models.items()}
    recomputed = None
    how = settings.activation_checkpointing
    if how != "off":  # after EMA copies, which need no gradient
        from surefoot.train.activation_checkpointing import compute_again, in_words

        blocks = compute_again(models, how, blocks=settings.activation_checkpointing_modules)
        recomputed = in_words(how, blocks)
    return Models(
        models,
        parallel,
        decisions,
        architecture,
        recomputed,
        was_compiled=bool(compiled_names),
        notes=notes,
    )


def check_first_batch(
    settings: RunSettings,
    models: Models,
    pipeline: data_pipeline.DataPipeline,
    beginning: Beginning,
) -> None:
    """Test one micro-batch before distributed training. Raises `ConfigError` if the strategy cannot
    train the models. Collective.
    """
    world = pipeline.world
    parallel = models.parallel
    is_sharded = parallel.kind == "fsdp"
    if settings.loss is None or world.on_meta or not (world.size > 1 or is_sharded):
        return
    from surefoot.distributed.blocks import fsdp_units
    from surefoot.train.parallel_check import check_first_pass

    precision: str = settings.precision
    if precision == "auto" and beginning.precision is not None:
        precision = beginning.precision  # of a new run it is resolved later, by the table of speeds
    gathered_parts: list[nn.Module] = []
    if is_sharded:
        for model in models.by_name.values():
            gathered_parts += fsdp_units(model, parallel)
    check_first_pass(
        models.by_name,
        settings.loss,
        pipeline.first(),
        precision=chosen_precision(precision, world.device),
        world=world,
        allow_unused=parallel.find_unused_parameters,
        gathered=gathered_parts,
    )


def build_task(
    settings: RunSettings,
    plan: Plan,
    pipeline: data_pipeline.DataPipeline,
    models: Models,
    state: State,
    precision: Precision,
) -> Task:
    """Build the task of a segment of the plan: the models as their ranks call them, the loss and
    the schedule. Raises `ConfigError` for a momentum that an optimizer does not have. Collective.
    """
    ranks, called = spread(
        state.models,
        compiled(state.models) if plan.compiles else state.models,
        world=pipeline.world,
        parallel=plan.parallel,
        sizes=pipeline.sizes,
        shares=pipeline.shares,
        exact=pipeline.exact,
        fsdp=models.fsdp,
    )
    length = plan.times.length
    momentum = plan.schedule.momentum(length)
    if momentum is not None:
        refuse_without_momentum(state.optimizers.values())
    return Task(
        forward=sole_or_all(called),
        loss=settings.loss,
        key=stream_key(settings.seed, "train"),
        precision=precision,
        factors=plan.schedule.factors(length),
        group_factors=factors_by_optimizer(plan.schedule, length, group_counts(state.optimizers)),
        momentum=momentum,
        settings=settings,
        ranks=ranks,
    )


def assemble(
    settings: RunSettings,
    history: SettingsHistory,
    plan: Plan,
    run_data: RunData,
    steering: Steering,
    models: Models,
    state: State,
    directory: RunDirectory | None,
    console: Screen | None,
    log: RankLog | None,
) -> RunComponents:
    """Assemble the components: wrap the models for their ranks, and prepare evaluation, checkpoints
    and records.
    """
    pipeline = run_data.pipeline
    splits = run_data.splits
    times = plan.times
    world = pipeline.world
    parallel = plan.parallel
    precision = chosen_precision(
        plan.precision, world.device, updates_on="cpu" if parallel.cpu_offload else None
    )
    if any(trained.takes_closure for trained in state.optimizers.values()):
        from surefoot.optim.closure_step import refuse_closures

        is_scaled = precision.loss_scale is not None
        refuse_closures(state.optimizers.values(), scaled=is_scaled, compiled=plan.compiles)

    image_models: list[nn.Module] = []
    if settings.channels_last:
        averages = [average.model for average in state.ema_models.values()]
        image_models = [*state.models.values(), *averages]
    laid = layout(plan.channels_last, image_models)
    task = build_task(settings, plan, pipeline, models, state, precision)

    if directory is None and settings.run_dir is not None:
        path = run_path(settings.run_dir, setting="run_dir")
        directory = RunDirectory(path, text_log=settings.text_log)
    text_log = None
    if settings.text_log and world.is_main:
        epochs = times.epoch.count(0, times.length.steps)
        text_log = TextLog(times.length.steps, unit=settings.count_unit, epochs=epochs)
    screens = [console, None if text_log is None else text_log.console]

    def say(text: str) -> None:
        for screen_or_log in screens:
            if screen_or_log is not None:
                screen_or_log.say(text)

    checkpointing = None
    if directory is not None:
        checkpointing = Checkpointing(
            directory, times, begins=history.begins, disk=settings.disk, say=say, world=world
        )
    return RunComponents(
        settings=settings,
        tasks=(task,) * len(plan.segments),
        run_state=RunState(
            state,
            precision,
            steering.best,
            steering.stopping,
            steering.lowering,
            Meter(of_nothing=mean_of_nothing(plan.behavior)),
            data_values=run_data.values,
            batch_lists=pipeline.batch_lists,
        ),
        pipeline=pipeline,
        evaluator=Evaluator(
            state,
            pipeline,
            splits=splits,
            loss=settings.loss,
            precision=precision,
            compiles=plan.compiles,
            ranks=task.ranks,
            behavior=plan.behavior,
        ),
        plan=plan,
        world=world,
        layout=laid,
        architecture=models.architecture,
        directory=directory,
        checkpointing=checkpointing,
        console=console,
        text_log=text_log,
        rank_log=log,
        computed_again=models.recomputed,
        files=checked_files(settings.extra_files or {}) | described_adapters(state.models),
        example=settings.predict_example,
        trackers=trackers_of(settings.trackers, out=settings.run_dir),
        accept_change=change_names(settings.accept_change),
        changes=history.changes,
        first_changes=history.first_changes,
        skips=history.segments[-1].skips,
        settings_begin=history.segments[-1].begin,
        of_program=history.of_program | {"precision": plan.precision},
    )
