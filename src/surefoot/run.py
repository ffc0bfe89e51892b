"""A training run: the parts put together, and the ways to train them.

How arguments become parts is in `assembly.py`, how a step is made in `loop.py`, what is done between steps in
`between_steps.py`, at the beginning and at the end in `sitting.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from surefoot import assembly, ordering, snapshot
from surefoot.activations import How, compute_again, in_words
from surefoot.alike import as_given, equal_from_main, refuse_unequal
from surefoot.assembly import Model
from surefoot.checkpoint.changes import change_names
from surefoot.checkpoint.compare import differences
from surefoot.checkpoint.disk import DISK, Files
from surefoot.checkpoint.format import Contents
from surefoot.checks import check_settings, json_settings
from surefoot.compiling import compiled, compiling
from surefoot.config import clipping
from surefoot.config.paths import local_path
from surefoot.config.strategy import Kind, Strategy, strategy_for
from surefoot.data.samples import check_samples, check_split, fingerprint
from surefoot.directory import RunDirectory, checked_files
from surefoot.errors import ConfigError
from surefoot.evaluate import Split, numbers
from surefoot.first_pass import check_first_pass
from surefoot.gallery import Makes, made
from surefoot.loop import Loss, State, Step, Task
from surefoot.memory_format import layout
from surefoot.optim.build import Built
from surefoot.optim.specs import OptimizerSpec
from surefoot.panels import Panels
from surefoot.parallel import spread
from surefoot.parts import Parts
from surefoot.plateau import Plateau, feedback
from surefoot.precision import precision as chosen_precision
from surefoot.saving import Saving, began_with
from surefoot.schedules.lr_schedule import Joined, Schedule, constant
from surefoot.scoring import Scoring
from surefoot.seeding import stream_key
from surefoot.shardable import gathered
from surefoot.sinks import RankLog, screen
from surefoot.sinks.tracking.names import trackers_of
from surefoot.sitting import Sitting
from surefoot.snapshot import Whole
from surefoot.stopping import EarlyStopping, watched
from surefoot.supply import Supply
from surefoot.timetable import timetable
from surefoot.user_files import refuse_training_at_import
from surefoot.world import joined


class Run:
    """One training run: `run.train()`, or inside `with run:` a loop of your own over `run` or `run.steps()`.

    A run is a pure function of its arguments, `seed` and the step. When it is opened it goes on by itself where `out`
    holds a checkpoint. Durations are text with a unit: "200 steps", "2 epochs", "5%" of the run, and for
    `save_every` and `time_limit` also "90 min".

    model: an `nn.Module`, or better a callable that builds one (called under the run's seed); or several by name.
    loss: a function of (model, batch) that returns a scalar mean, or a counted `Mean`; None where the caller makes the steps.
    train: a map-style data set, a `TensorDataset` or tuple of tensors, a `Mixture`, token `Windows`.
    batch_size: samples of one step, all micro-batches together; `micro_batch_size` of one forward and backward pass. Or
        "4096 tokens", padding included, for data that say how long each sample is (`lengths`).
    parallel: how several processes work together: "auto" (DDP), "none", "ddp", "fsdp", or `surefoot.fsdp(...)` with its settings.
    count: targets in a batch over which the loss is a mean (default: its first dimension); called on the host.
    evaluate: {name: Split} scored every `evaluate_every` and after the last step.
    best: "min SPLIT/SCORE" or "max ...": the checkpoint of the best value is kept. `early_stopping` watches a score too.
    watch_every: of which steps gradient, weights and update of every layer are recorded (docs/watching.md); None: of none.
    channels_last: whether images (B, C, H, W) are laid out with the channels of a pixel side by side before a model with convolutions
        has them; changes rounding and no weight's shape. "auto" is looked up beside precision = "auto" on the CPU, elsewhere False.
    compile: whether to use torch.compile: True, False, or "auto", which does if the table of what was measured says that it is
        faster. What it chose is part of the run.
    plateau: a lower learning rate where a score does not improve; `evaluate_every` is then part of what the run is.
    init: weights to start from (a .safetensors file, checkpoint or run directory); only at step 0.
    sample: a function of the model that returns text to show after the last step, and every `sample_every`.
    panels: a function of the model that returns or yields what the report shows of the task (`surefoot.classification_panels`, say):
        called once, when the run is over. After 60 seconds no further panel is asked for.
    files: {name: text or bytes} to put into the run's directory when it is made, such as a tokenizer that belongs to the weights.
    describe_sample: a function of a batch of one sample that returns it in words, for `surefoot replay`; None: shapes and values.
    activation_checkpointing: "blocks" computes the model's repeated blocks again in the backward pass instead of keeping what is in
        them; "selective" keeps the results of matrix products and attention. `checkpointed_blocks`: modules to take instead,
        by name or class. Changes no bit.
    sync_batch_norm: on CUDA, batch normalisation over the micro-batches of all processes together.
    trackers: experiment trackers that are told as well: "wandb", "mlflow", "trackio", or several; nothing that happens to
        them stops a run.
    settings: what else makes it this run and no other (JSON), such as how the data were made; compared at resume like all else.
    example: an input with which `surefoot predict` may be tried; the end of a run names it ("" where predict needs none).
    about_data: lines that say which data these are; `surefoot plan` shows them, and the start of a run the first.
    report: write a page on the run into `out` at its end (`surefoot.report`); changes no result.
    check_state: at step 0 refuse what passes and updates change and no checkpoint of `out` would hold; changes no result.
    accept_change: what may compute something else than before in this session, from the step on at which it goes on: "loss", "model",
        "collate", "data" or "optimizer", or several (docs/resume.md).
    out: the run's directory; None keeps everything in memory and nothing on disk.

    Raises `ConfigError` or `DataError` for what cannot be run, before anything is written.
    """

    def __init__(
        self,
        *,
        model: Model | Mapping[str, Model],
        train: Any,
        batch_size: int | str,
        length: str,
        optimizer: OptimizerSpec | Built | Mapping[str, OptimizerSpec | Built],
        loss: Loss | None = None,
        schedule: Schedule | Joined | None = None,
        evaluate: Mapping[str, Split] | None = None,
        out: str | Path | None = None,
        seed: int = 0,
        micro_batch_size: int | str | None = None,
        count: Callable[[Any], int] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        clip: str = "norm 1.0",
        precision: str = "auto",
        channels_last: bool | Literal["auto"] = "auto",
        compile: bool | Literal["auto"] = False,
        activation_checkpointing: How = "off",
        checkpointed_blocks: Sequence[str] | None = None,
        sync_batch_norm: bool = False,
        device: str = "auto",
        parallel: Kind | Strategy = "auto",
        workers: int = 0,
        deterministic: bool = False,
        log_every: str = "50 steps",
        evaluate_every: str = "1 epochs",
        sample_every: str | None = None,
        save_every: str = "5 min",
        watch_every: str | None = "200 steps",
        compare_ranks_every: str = "1000 steps",
        trackers: str | Sequence[str] | None = None,
        keep: int = 3,
        keep_every: str | None = None,
        stop_after: str | None = None,
        time_limit: str | None = None,
        max_bad_steps: int = 5,
        ema: float | None = None,
        best: str | None = None,
        early_stopping: EarlyStopping | None = None,
        plateau: Plateau | None = None,
        init: str | Path | None = None,
        sample: Callable[[Any], str] | None = None,
        panels: Makes | None = None,
        files: Mapping[str, str | bytes] | None = None,
        settings: Mapping[str, Any] | None = None,
        describe_sample: Callable[[Any], str] | None = None,
        example: str | None = None,
        about_data: Sequence[str] = (),
        report: bool = True,
        check_state: bool = True,
        accept_change: str | Sequence[str] | None = None,
        console: bool = True,
        disk: Files = DISK,
    ) -> None:
        check_settings(
            length=length,
            batch_size=batch_size,
            seed=seed,
            micro_batch_size=micro_batch_size,
            schedule=schedule,
            clip=clip,
            precision=precision,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
            checkpointed_blocks=checkpointed_blocks,
            sync_batch_norm=sync_batch_norm,
            device=device,
            workers=workers,
            log_every=log_every,
            evaluate_every=evaluate_every,
            sample_every=sample_every,
            save_every=save_every,
            watch_every=watch_every,
            compare_ranks_every=compare_ranks_every,
            trackers=trackers,
            keep=keep,
            keep_every=keep_every,
            stop_after=stop_after,
            time_limit=time_limit,
            max_bad_steps=max_bad_steps,
            ema=ema,
            accept_change=accept_change,
        )
        world = joined(
            device, sharded=parallel == "fsdp" or (isinstance(parallel, Strategy) and parallel.kind == "fsdp")
        )
        refuse_unequal(world, as_given(locals()) | {"device": world.device.type})  # so far, these are the arguments
        place, how = world.device, strategy_for(parallel, ranks=world.on_paper or world.ranks)
        began = None if out is None else began_with(local_path(out, setting="out"), batch_size, world=world)
        sizes = ordering.planned_sizes(train, batch_size, micro_batch_size, ranks=world.ranks, began=began)
        plan = ordering.data_plan(
            train, seed=seed, samples=check_samples(train, seed=seed, batch_size=sizes.batch_size), sizes=sizes
        )
        ordering.refuse_compiled(plan, compiled=compile is True)
        samples_per_epoch, samples_per_step = ordering.steps_of_epoch(plan, sizes)
        times = timetable(
            samples_per_epoch=samples_per_epoch,
            batch_size=samples_per_step,
            length=length,
            log_every=log_every,
            evaluate_every=evaluate_every,
            sample_every=sample_every,
            save_every=save_every,
            keep_every=keep_every,
            stop_after=stop_after,
            time_limit=time_limit,
            watch_every=watch_every,
            compare_ranks_every=compare_ranks_every,
        )
        schedule = schedule or constant()
        in_steps = schedule.resolved(times.length)
        _check_splits(evaluate, seed=seed)
        steering = [name for name, split in (evaluate or {}).items() if not split.at_end]
        watch = watched(best, early_stopping, splits=steering)
        lowering = feedback(plateau, early_stopping, splits=steering)

        log = None if world.is_main else RankLog()
        said = screen(times.length.steps, log) if console else None
        models = assembly.built_models(model, seed=seed, device=place, precision=precision)
        equal_from_main(models, world)
        notes = assembly.set_to_train(models, trained=optimizer if isinstance(optimizer, Mapping) else models)
        if sync_batch_norm:
            models, more = assembly.with_synchronised_norms(models, sizes, world)
            notes += more
        decisions = assembly.decided(models, optimizer, clip=clipping(clip), ema=ema)
        architecture = {name: assembly.printed(held) for name, held in models.items()}
        again = None
        if activation_checkpointing != "off":  # after averages have copied the models: these compute no gradient
            again = in_words(
                activation_checkpointing, compute_again(models, activation_checkpointing, blocks=checkpointed_blocks)
            )
        number_format, compiles = chosen_precision(precision, place), compiling(compile)
        supply = Supply(train, plan, sizes, seed, world, workers, count, collate)
        if loss is not None and (world.size > 1 or how.kind == "fsdp") and not world.on_paper:
            check_first_pass(
                models,
                loss,
                supply.first(),
                precision=number_format,
                world=world,
                allow_unused=how.unused,
                gathered=[part for held in models.values() for part in gathered(held, how)]
                if how.kind == "fsdp"
                else (),
            )
        fsdp = None
        if how.kind == "fsdp" and not world.on_paper:
            fsdp, decisions = assembly.spread_models(
                models, decisions, world=world, parallel=how, nominal=float(sizes.batch_size)
            )
        state = assembly.built_state(models, decisions, clip=clipping(clip), ema=ema, world=world)
        if said is not None:
            for line in [*notes, *assembly.notes(state.trained, schedule)]:
                said.say(f"note: {line}")
        laid = layout(
            channels_last,
            [*models.values(), *(average.model for average in state.averages.values())],
        )
        ranks, called = spread(
            models,
            compiled(models) if compiles.on else models,
            world=world,
            parallel=how,
            nominal=float(sizes.batch_size),
            fsdp=fsdp,
        )
        task = Task(
            forward=called["model"] if list(models) == ["model"] else called,
            loss=loss,
            key=stream_key(seed, "train"),
            precision=number_format,
            factors=in_steps.factors(times.length),
            max_bad_steps=max_bad_steps,
            ranks=ranks,
        )
        scoring = Scoring(
            state, supply, splits=evaluate or {}, loss=loss, precision=number_format, compiling=compiles, ranks=ranks
        )
        if out is not None and not str(out):
            raise ConfigError("out is empty: give the path of the run's directory, or leave it out to save nothing")
        directory = None if out is None else RunDirectory(Path(out))
        scored = {name: fingerprint(split.dataset) for name, split in (evaluate or {}).items()}
        self.parts = Parts(
            task=task,
            whole=Whole(state, number_format, watch, lowering),
            supply=supply,
            scoring=scoring,
            timetable=times,
            schedule=in_steps,
            schedule_written=schedule,
            world=world,
            parallel=how,
            deterministic=deterministic,
            compiling=compiles,
            layout=laid,
            described={
                "seed": seed,
                "length": f"{times.length.steps} steps",
                **sizes.described(),
                "optimizer": assembly.described_optimizers(decisions, state),
                "schedule": in_steps.described(),
                "schedule_of_steps": times.length.steps,
                "clip": clip,
                "precision": number_format.name,
                "compile": compiles.on,
                **({"channels_last": True} if laid.channels_last else {}),
                "ema": ema,
                "max_bad_steps": max_bad_steps,
                **({"sync_batch_norm": True} if sync_batch_norm else {}),
                "init": None if init is None else str(local_path(init, setting="init").resolve()),
                "early_stopping": None if early_stopping is None else vars(early_stopping),
                "plateau": None
                if lowering is None
                else assembly.described_plateau(lowering.plateau, times, scored=scored),
                "settings": json_settings(settings or {}),
                "data": {"plan": plan.described(), **fingerprint(train)},
            },
            architecture=architecture,
            scored=scored,
            directory=directory,
            saving=None
            if directory is None
            else Saving(directory, times, keep=keep, disk=disk, console=said, world=world),
            console=said,
            rank_log=log,
            computed_again=again,
            init=None if init is None else str(init),
            sample=sample,
            panels=panels,
            describe_sample=describe_sample,
            files=checked_files(files or {}),
            example=example,
            about_data=tuple(about_data),
            trackers=trackers_of(trackers, out=out),
            report=report,
            check_state=check_state and directory is not None,
            accept_change=change_names(accept_change),
        )
        self.configuration: str | None = None  # config.toml; the command line sets it, a script's is written for it
        self.sitting: Sitting | None = None  # while the run is open

    @property
    def state(self) -> State:
        """Models, optimizers and averages by name, and the number of steps made."""
        return self.parts.state

    # --- three ways to train -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Make all steps that are left; opens the run where it is not open."""
        self.parts.whole.kept.is_complete = self.sitting is None
        with nullcontext() if self.sitting else self:
            self._open("run.train()").between.alone = True
            for _ in self:
                pass

    def __iter__(self) -> Iterator[Step]:
        """Make one step after the other and yield it: the body runs between two steps, and is part of them for a resume."""
        if self.parts.task.loss is None:
            raise ConfigError(
                "this run has no loss: give Run(loss=...), or make the steps yourself with `for step in run.steps():`"
            )
        return self._open("for step in run").steps(opened=False)

    def steps(self) -> Iterator[Step]:
        """Yield each step before it is made: the body makes it, with `forward_backward` and `update`."""
        return self._open("for step in run.steps()").steps(opened=True)

    def stop(self) -> None:
        """End after this step, saved, as `break` does; for code that does not stand in the loop's body."""
        self._open("run.stop()").wishes.asked_to_stop = True

    def keep(self, name: str, held: Any) -> Any:
        """Make an object of yours part of every checkpoint, and put it back as it was where this run was resumed.

        Call it before the first step.

        `held` is a tensor, a dictionary or list of JSON values and tensors (keys: strings or integers), a `torch.Generator`, a
        metric of torchmetrics, or has state_dict and load_state_dict. Returns it. It is refused if what it would save right
        after a resume is not what was read. Of several processes all must keep it, and that of rank 0 is saved.
        """
        self.parts.whole.kept.add(name, held)
        return held

    def __enter__(self) -> Self:
        """Open the directory; go on from its newest intact checkpoint, or commit step 0."""
        refuse_training_at_import()
        if self.sitting is not None:
            raise ConfigError("this run is open already")
        sitting = Sitting(self.parts, configuration=self.configuration)
        sitting.open()
        self.sitting, self.parts = sitting, sitting.parts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what is not saved yet and close everything.

        `break` ends the run like a stop: the step counts as made, and a resume goes on with the next one. After an
        exception the half-made step is not saved: the newest checkpoint stands, and `crash/` says what happened. A run
        that was stopped by a signal leaves with exit status 130 or 143.
        """
        sitting, self.sitting = self._open("run.__exit__()"), None
        sitting.close(problem)

    def _open(self, asked: str) -> Sitting:
        if self.sitting is None:
            raise ConfigError(
                f"`{asked}` outside `with run:`\n"
                "  without it an exception in your code could not be told from `break`, and a half-made step would be saved\n"
                "  write `with run:` around it, or call run.train()"
            )
        return self.sitting

    # --- at any time ---------------------------------------------------------------------------------------------

    def scores(self, *names: str) -> dict[str, float]:
        """Score splits with the averaged weights where there are any; changes nothing. Returns {"SPLIT/SCORE": value}. Collective.

        Without names all but those that are for the end of the run.
        """
        scoring = self.parts.scoring
        with self.parts.numerics():
            return numbers(scoring.scores(names or scoring.names(at_end=False)))

    def sample(self) -> str:
        """What the run's `sample` function makes of the model as it is evaluated; changes nothing. Collective."""
        if self.parts.sample is None:
            raise ConfigError("this run has no sample function: give Run(sample=...)")
        with self.parts.numerics():
            return self.parts.scoring.sample(self.parts.sample)

    def panels(self) -> Panels:
        """What the run's `panels` function makes of the model as it is evaluated; changes nothing. Collective.

        Each reason why there are not more is a line on the console.
        """
        make = self.parts.panels
        if make is None:
            raise ConfigError("this run has no panels function: give Run(panels=...)")
        with self.parts.numerics():
            gallery = self.parts.scoring.panels(lambda model: made(make, model))
        for line in gallery.told:
            self.parts.say(f"warning: {line}")
        return Panels(step=self.state.step, panels=gallery.panels)

    def save(self) -> None:
        """Write a checkpoint in the background as soon as this step and its body are over."""
        self._open("run.save()").between.ask_to_save()

    def load(self, found: Contents) -> list[str]:
        """Take over the weights and all other state of a checkpoint, to score or use it; a run of other settings may.

        Returns a line for each thing in which this run's data are not the checkpoint's.
        """
        self.parts.whole.precision.settle(found.state["described"]["precision"])
        self.parts.layout.settle(found.state["described"].get("channels_last", False))
        self.parts.compiling.settle(found.state["described"]["compile"])
        snapshot.restore(self.parts.whole, found, where=f"step {found.step}")
        now = json.loads(json.dumps(self.parts.described["data"]))
        return differences({"data": found.state["described"]["data"]}, {"data": now})


def _check_splits(evaluate: Mapping[str, Split] | None, *, seed: int) -> None:
    """Raise where what is to be scored is no split, or cannot be read."""
    if evaluate is not None and not isinstance(evaluate, Mapping):
        raise ConfigError(
            f"evaluate is a {type(evaluate).__name__}: scores are called SPLIT/SCORE, so each split needs a name\n"
            '  write evaluate={"held-out": surefoot.Split(data)}'
        )
    for name, split in (evaluate or {}).items():
        if not isinstance(split, Split):
            raise ConfigError(
                f"evaluate[{name!r}] is a {type(split).__name__}: write surefoot.Split(...) around the data"
            )
        check_split(name, split.dataset, seed=seed)
