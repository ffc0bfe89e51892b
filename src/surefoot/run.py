"""A training run: the parts put together, and what is done between steps. The only file that knows all the others.

`Run` opens and closes what lives over time (directory, loader, writer, signals) and carries out what the loop finds due.
How a step is made is in `loop.py`, how arguments become its Task and State in `assembly.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from surefoot import assembly, crash, narration, snapshot
from surefoot.assembly import Built, Model
from surefoot.checkpoint.compare import differences, refuse_differences
from surefoot.checkpoint.disk import DISK, Files
from surefoot.checkpoint.format import Contents
from surefoot.checkpoint.initial import load_initial_weights
from surefoot.clock import Clock
from surefoot.config import clipping
from surefoot.data.samples import check_samples, fingerprint
from surefoot.directory import RunDirectory, environment, machine
from surefoot.divergence import BadSteps
from surefoot.durations import every, planned, seconds
from surefoot.errors import CheckpointError, ConfigError, DivergedError
from surefoot.evaluate import Split
from surefoot.loop import Loss, Step, Task, steps
from surefoot.meter import Meter, Window
from surefoot.optimizers.specs import OptimizerSpec
from surefoot.precision import precision as chosen_precision
from surefoot.saving import Saving, refused
from surefoot.schedules import Schedule, constant
from surefoot.scoring import Scoring
from surefoot.seeding import stream_key
from surefoot.signals import Signals
from surefoot.sinks import Console, JsonLines, Record, Sink, TensorBoard
from surefoot.snapshot import Kept, Whole
from surefoot.stopping import EarlyStopping, watched
from surefoot.supply import Supply
from surefoot.world import deterministic_kernels, one_process


class Run:
    """One training run: `run.train()`, or `for step in run:`, or `for step in run.steps():` to make the steps yourself.

    A run is a pure function of its arguments, `seed` and the step. Used in `with run:` (or alone), it goes on by itself
    where `out` holds a checkpoint. Durations are text with a unit: "200 steps", "2 epochs", "5%" of the run, and for
    `save_every` and `time_limit` also "90 min".

    model: an `nn.Module`, or better a callable that builds one (called under the run's seed); or several by name.
    loss: a function of (model, batch) that returns a scalar mean, or a counted `Mean`; None where the caller makes the steps.
    train: a map-style data set, a `TensorDataset` or tuple of tensors, a `Mixture`, token `Windows`.
    batch_size: samples of one step, all micro-batches together; `micro_batch_size` of one forward and backward pass.
    count: targets in a batch over which the loss is a mean (default: its first dimension); called on the host.
    evaluate: {name: Split} scored every `evaluate_every` and after the last step.
    best: "min SPLIT/SCORE" or "max ...": the checkpoint of the best value is kept. `early_stopping` watches a score too.
    init: weights to start from (a .safetensors file, checkpoint or run directory); only at step 0.
    sample: a function of the model that returns text to show after the last step.
    out: the run's directory; None keeps everything in memory and nothing on disk.

    Raises `ConfigError` or `DataError` for what cannot be run, before anything is written.
    """

    def __init__(
        self,
        *,
        model: Model | Mapping[str, Model],
        train: Any,
        batch_size: int,
        length: str,
        optimizer: OptimizerSpec | Built | Mapping[str, OptimizerSpec | Built],
        loss: Loss | None = None,
        schedule: Schedule | None = None,
        evaluate: Mapping[str, Split] | None = None,
        out: str | Path | None = None,
        seed: int = 0,
        micro_batch_size: int | None = None,
        count: Callable[[Any], int] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        clip: str = "norm 1.0",
        precision: str = "auto",
        compile: bool = False,
        device: str = "auto",
        workers: int = 0,
        deterministic: bool = False,
        log_every: str = "50 steps",
        evaluate_every: str = "1 epochs",
        save_every: str = "5 min",
        keep: int = 3,
        keep_every: str | None = None,
        stop_after: str | None = None,
        time_limit: str | None = None,
        max_bad_steps: int = 5,
        ema: float | None = None,
        best: str | None = None,
        early_stopping: EarlyStopping | None = None,
        init: str | Path | None = None,
        sample: Callable[[Any], str] | None = None,
        console: bool = True,
        disk: Files = DISK,
    ) -> None:
        # what is asked for, checked before anything is built
        self.micro_batch_size = assembly.even_micro_batches(batch_size, micro_batch_size)
        self.device = one_process(device).device
        plan = assembly.data_plan(train, seed=seed, samples=check_samples(train, seed=seed), batch_size=batch_size)
        self.supply = Supply(train, plan, seed, self.micro_batch_size, self.device, workers, count, collate)
        self.length = planned(length, samples_per_epoch=plan.samples, batch_size=batch_size)
        self.schedule = (schedule or constant()).resolved(self.length)
        self.log_at = every(log_every, length=self.length, setting="log_every")
        self.evaluate_at = every(evaluate_every, length=self.length, setting="evaluate_every")
        save_at = every(save_every, length=self.length, time=True, setting="save_every")
        keep_at = every(keep_every, length=self.length, setting="keep_every") if keep_every else None
        self.stop_at = self.length.steps
        if stop_after is not None:
            stop = planned(stop_after, samples_per_epoch=plan.samples, batch_size=batch_size, setting="stop_after")
            self.stop_at = min(stop.steps, self.length.steps)
        self.time_limit_s = seconds(time_limit, setting="time_limit") if time_limit else None
        self.early_stopping, self.watch = early_stopping, watched(best, early_stopping, splits=evaluate or {})
        self.init, self.sample_text, self.deterministic = init, sample, deterministic

        # the parts of a step
        models = assembly.built_models(model, seed=seed, device=self.device)
        self.state = assembly.built_state(models, optimizer, ema=ema, device=self.device)
        self.precision = chosen_precision(precision, self.device)
        forwards = {name: torch.compile(held, dynamic=False) if compile else held for name, held in models.items()}
        self.task = Task(
            forward=forwards["model"] if list(models) == ["model"] else forwards,
            loss=loss,
            key=stream_key(seed, "train"),
            precision=self.precision,
            clip=clipping(clip),
            factors=self.schedule.factors(self.length),
            max_bad_steps=max_bad_steps,
        )
        self.feed = self.supply.feed(workers=workers)
        self.scoring = Scoring(
            self.state, self.supply, splits=evaluate or {}, loss=loss, precision=self.precision, compiled=compile
        )
        self.described: dict[str, Any] = {
            "seed": seed,
            "length": f"{self.length.steps} steps",
            "batch_size": batch_size,
            "micro_batch_size": self.micro_batch_size,
            "optimizer": assembly.described_optimizers(optimizer, self.state),
            "schedule": vars(self.schedule),
            "clip": clip,
            "precision": self.precision.name,
            "compile": compile,
            "ema": ema,
            "max_bad_steps": max_bad_steps,
            "early_stopping": None if early_stopping is None else vars(early_stopping),
            "data": {"plan": plan.described(), **fingerprint(train)},
        }

        # what lives over time
        self.clock, self.meter = Clock(), Meter()
        self.whole = Whole(self.state, self.precision, self.meter, self.clock, self.watch, Kept())
        self.console = Console(self.length.steps) if console else None
        self.sinks: list[Sink] = [self.console] if self.console else []
        self.signals = Signals(lambda: narration.standing(self.directory, self.saved_step))
        self.directory = None if out is None else RunDirectory(Path(out))
        self.saving: Saving | None = None
        if self.directory is not None:
            self.saving = Saving(self.directory, every=save_at, keep=keep, keep_every=keep_at, disk=disk, say=self._say)
        self.metrics: JsonLines | None = None
        self.configuration: str | None = None  # config.toml; the command line sets it, a script's is written for it
        self.opened = self.asked_to_stop = False
        self.numerics = ExitStack()  # settings of torch that hold while the run is open
        self.first_step = 0  # of this sitting
        self.started_at = self.looped_at = time.monotonic()
        self.bad_steps = BadSteps()
        self.last_scores: dict[str, float] = {}

    # --- three ways to train -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Make all steps that are left."""
        for _ in self:
            pass

    def __iter__(self) -> Iterator[Step]:
        """Make one step after the other and yield it: the body runs between two steps, and is part of them for a resume."""
        if self.task.loss is None:
            raise ConfigError(
                "this run has no loss: give Run(loss=...), or make the steps yourself with `for step in run.steps():`"
            )
        return self._driven(opened=False)

    def steps(self) -> Iterator[Step]:
        """Yield each step before it is made: the body makes it, with `forward_backward` and `update`."""
        return self._driven(opened=True)

    def stop(self) -> None:
        """End after this step, saved, as `break` does; for code that does not stand in the loop's body."""
        self.asked_to_stop = True

    def keep(self, name: str, held: Any) -> Any:
        """Make an object of yours part of every checkpoint, and put it back as it was where this run was resumed.

        `held` is a tensor, a dictionary or list of JSON values and tensors, or has state_dict and load_state_dict. Returns it.
        """
        self.whole.kept.add(name, held)
        return held

    # --- what the loop finds due ---------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """True when no further step is to be made."""
        if (
            self.asked_to_stop
            or self.signals.stop is not None
            or self.state.step >= self.stop_at
            or self.out_of_patience
        ):
            return True
        if self.time_limit_s is None:
            return False
        longest_s = self.saving.longest_s if self.saving else 0.0
        return time.monotonic() - self.started_at + 2 * longest_s + 1 > self.time_limit_s

    @property
    def out_of_patience(self) -> bool:
        """True when early stopping has ended the run."""
        return (
            self.early_stopping is not None
            and self.watch is not None
            and self.watch.waited >= self.early_stopping.patience
        )

    def evaluate_due(self, done: int) -> bool:
        """After the last step, and every `evaluate_every`."""
        return bool(self.scoring.splits) and (self.evaluate_at.due(done) or done == self.length.steps)

    def log_due(self, done: int) -> bool:
        """After the last step, and every `log_every`."""
        return self.log_at.due(done) or done == self.length.steps

    def save_due(self, done: int) -> bool:
        """After the last step, every `save_every`, at a new best score, when asked by a signal, and again after a failure."""
        if self.saving is None:
            return False
        return done == self.length.steps or self.signals.save or self.saving.due(done)

    def scores(self) -> dict[str, float]:
        """Score every split with the averaged weights where there are any; changes nothing. Returns {"SPLIT/SCORE": value}."""
        return self.scoring.scores()

    def evaluate(self, step: Step) -> None:
        """Score every split after a step, record it, and watch the score that decides what is best."""
        step.scores = self.last_scores = self.scores()
        self._write({"kind": "scores", "step": self.state.step, **step.scores})
        if self.watch is not None:
            self._watch_score(step.scores)

    def log(self) -> None:
        """Wait for the device, write the record of the steps since the last one, and end a run that has diverged."""
        window = self.meter.read()
        times = self.clock.window()
        values: dict[str, Any] = dict(window.values)
        trained_s = times["training_s"] + times["waiting_s"]
        if "targets" in values and trained_s > 0:
            values["targets_per_s"] = values["targets"] / trained_s
        first = next(iter(self.state.trained.values())).optimizer.param_groups[0]
        values["learning_rate"] = first["lr"]
        done = self.state.step - self.first_step
        values["left_s"] = (time.monotonic() - self.looped_at) / max(done, 1) * (self.length.steps - self.state.step)
        self._write({"kind": "train", "step": self.state.step, **values, **times})
        self._watch_divergence(window)

    def save(self) -> None:
        """Copy the state and write it as a checkpoint in the background."""
        if self.saving is None:
            raise ConfigError("this run has no directory to save to: give Run(out=...)")
        self.signals.save = False
        self.saving.save(self._packed, protected=self._best)

    def sample(self) -> str:
        """What the run's `sample` function makes of the model as it is evaluated; changes nothing."""
        if self.sample_text is None:
            raise ConfigError("this run has no sample function: give Run(sample=...)")
        return self.scoring.sample(self.sample_text)

    def load(self, found: Contents) -> None:
        """Take over the weights and all other state of a checkpoint, to score or use it; a run of other settings may."""
        snapshot.restore(self.whole, found, where=f"step {found.step}", device=self.device)

    # --- opening and closing -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Open the directory; go on from its newest intact checkpoint, or commit step 0."""
        if self.opened:
            raise ConfigError("this run is open already")
        self.signals.install()
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        self.opened = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what is not saved yet and close everything.

        `break` ends the run like a stop: the step counts as made, and a resume goes on with the next one. After an
        exception the half-made step is not saved: the newest checkpoint stands, and `crash/` says what happened. A run
        that was stopped by a signal leaves with exit status 130 or 143.
        """
        try:
            if problem is None or kind is GeneratorExit:
                self._finish()
            elif isinstance(problem, Exception) and self.directory is not None:
                self._record_crash(problem, self.directory)
        finally:
            self.opened = False
            self._release()
        if self.signals.stop is not None and problem is None:
            raise SystemExit(128 + self.signals.stop)

    def _open(self) -> None:
        self.started_at = time.monotonic()
        self.numerics.enter_context(self.precision.numerics())
        if self.deterministic:
            self.numerics.enter_context(deterministic_kernels(self.device))
        found = None
        if self.directory is not None and self.saving is not None:
            self.directory.open()
            found = self.saving.newest()
        if found is None and self.init is not None and self.state.step == 0:
            self._say(load_initial_weights(self.state.models, Path(self.init)))
            for name, average in self.state.averages.items():
                average.restart(self.state.models[name])
        if self.directory is not None and self.saving is not None:
            if found is None:
                self.directory.write_text("config.toml", self.configuration or narration.script_toml(self.described))
                self.saving.finish(0, self._packed)
            else:
                self._resume(found)
                if self.configuration is not None:
                    self.directory.write_text("config.toml", self.configuration)
            now = machine(self.device, deterministic=self.deterministic)
            self.directory.add_sitting(
                {"step": self.state.step, "machine": now, **environment(), "data": self.described["data"]}
            )
            self.metrics = JsonLines(self.directory.metrics)
            tensorboard = TensorBoard(self.directory.path / "tensorboard", from_step=self.state.step)
            self.sinks = [*([self.console] if self.console else []), self.metrics, tensorboard]
            if found is not None:
                if found.log is not None and not self.metrics.holds(*found.log):
                    self._say(
                        f"warning: {self.directory.metrics} is not what it was at step {found.step}: records were lost"
                    )
                self._write({"kind": "resumed", "step": self.state.step})
        self.first_step = self.state.step
        self._say(narration.header(self))

    def _resume(self, found: Contents) -> None:
        where = f"step-{found.step:08d}"
        saved, now = dict(found.state["described"]), json.loads(json.dumps(self.described))
        why = refused(saved, now, extends_exactly=self.schedule.extends_exactly, step=found.step)
        if why is not None:
            raise CheckpointError(
                f"cannot resume {where}: length was {saved['length']}, now {now['length']}\n  {why}\n"
                "  to train on from its weights: another --out, with --init"
            )
        refuse_differences(saved | {"length": now["length"]}, now, where=where)
        for line in differences(found.state["machine"], machine(self.device, deterministic=self.deterministic)):
            self._say(f"note: {line}: the run goes on, equal to rounding and no longer bit for bit")
        snapshot.restore(self.whole, found, where=where, device=self.device)
        self.bad_steps.in_a_row = list(found.state["skipped_in_a_row"])
        if self.saving is not None:
            self.saving.begun_step = self.saving.writer.saved = found.step

    def _driven(self, *, opened: bool) -> Iterator[Step]:
        with nullcontext() if self.opened else self:
            self.whole.kept.refuse_unclaimed()
            if self.state.step >= self.length.steps or self.out_of_patience:
                self._say(narration.finished(self))
                return
            self.feed.start(self.state.step)
            self.looped_at = time.monotonic()
            self.clock.start()
            try:
                yield from steps(
                    self.task,
                    self.state,
                    feed=self.feed.micro_batches,
                    record=self.meter.add,
                    clock=self.clock.enter,
                    duties=self,
                    length=self.length.steps,
                    opened=opened,
                )
            except Exception as problem:
                cause = crash.explained(problem, step=self.state.step, micro_batches=self.supply.again(self.state.step))
                if cause is None:
                    raise
                raise cause from problem
            finally:
                self.feed.close()

    def _finish(self) -> None:
        if self.state.step >= self.length.steps > self.first_step and self.sample_text is not None:
            self._write({"kind": "sample", "step": self.state.step, "text": self.sample()})
        if self.saving is not None:
            self.saving.finish(self.state.step, self._packed, protected=self._best)
        if self.state.step > self.first_step or self.signals.stop is not None:
            self._say(narration.ending(self))

    def _release(self) -> None:
        self.signals.restore()
        self.numerics.close()
        if self.saving is not None:
            self.saving.writer.close()
        for sink in self.sinks:
            sink.close()
        self.sinks, self.metrics = [self.console] if self.console else [], None
        if self.directory is not None:
            self.directory.close()

    # --- what goes wrong -----------------------------------------------------------------------------------------

    def _watch_score(self, scores: dict[str, float]) -> None:
        assert self.watch is not None
        if self.watch.score not in scores:
            raise ConfigError(f"cannot watch {self.watch.score!r}: scored are {', '.join(scores)}")
        if self.watch.improved(self.state.step, scores[self.watch.score]) and self.saving is not None:
            self.saving.asked = True

    def _watch_divergence(self, window: Window) -> None:
        self.bad_steps.saw(window.skipped, done=self.state.step)
        if not self.bad_steps.latched(self.state, self.task.max_bad_steps):
            return
        first = self.bad_steps.in_a_row[0] if self.bad_steps.in_a_row else self.state.step
        strange = crash.strange_samples(self.supply.again(first))
        stands = narration.standing(self.directory, self.saved_step)
        evaluated_since = self.watch is not None and (self.watch.step or 0) > first
        alone = len(self.state.trained) == 1 and self.task.loss is not None  # other updates may have been applied
        if (
            self.saving is not None
            and alone
            and not (self.precision.loss_scale or self.whole.kept.objects or evaluated_since)
        ):
            # skipped steps changed nothing, so this is still the state after `first` steps
            self.state.step, self.bad_steps.in_a_row = first, []
            for trained in self.state.trained.values():
                trained.bad_in_a_row.zero_()
            self.saving.finish(first, self._packed, protected=self._best)
            stands = f"weights are those after step {first}, saved as {self.saving.store.path(first)}"
        optimizer, schedule = self.described["optimizer"], self.schedule
        raise DivergedError(narration.divergence(first, strange, stands, optimizer=optimizer, schedule=schedule))

    def _record_crash(self, problem: Exception, directory: RunDirectory) -> None:
        if self.saving is not None:
            self.saving.writer.wait()
            self.saving.say_failure()
        stands = narration.standing(self.directory, self.saved_step)
        found = crash.report(
            problem,
            step=self.state.step,
            micro_batches=self.supply.again(self.state.step),
            how_to_go_on=stands,
        )
        try:
            (directory.path / "crash").mkdir(exist_ok=True)
            directory.write_text(f"crash/step-{self.state.step:08d}.json", json.dumps(found, indent=1))
        except (OSError, CheckpointError) as another:  # the error that ended the run must not be hidden by this one
            self._say(f"warning: {another}")

    @property
    def saved_step(self) -> int | None:
        """The last step that is safe on disk; None where nothing is."""
        return None if self.saving is None else self.saving.saved_step

    @property
    def _best(self) -> tuple[int, ...]:
        return () if self.watch is None or self.watch.step is None else (self.watch.step,)

    def _packed(self) -> Contents:
        contents = snapshot.packed(
            self.whole,
            described=self.described,
            machine=machine(self.device, deterministic=self.deterministic),
            stopped_early=self.out_of_patience,
            skipped_in_a_row=self.bad_steps.in_a_row,
        )
        return contents if self.metrics is None else replace(contents, log=self.metrics.state())

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.say(text)
