"""The only list of settings: meaning, check, role in a resume, and intervals. `run/validate.py`
checks combinations. Imports no torch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from surefoot.config.durations import (
    Every,
    Interval,
    Length,
    every,
    log_interval,
    planned,
    save_interval,
    seconds,
)
from surefoot.config.order import Order, check_order
from surefoot.config.paths import path_text
from surefoot.config.ramps import of_each_value
from surefoot.config.setting import Declared, cadences, number, ordered, setting
from surefoot.config.tree import check_type, field_hints, wrong_type
from surefoot.errors import ConfigError, Setting

# any length will do to check the form of a duration
_ANY_LENGTH = Length(steps=10_000, samples_per_epoch=10_000, batch_size=1)


def problems_of(settings: Declared) -> dict[str, ConfigError]:
    """Return the problem of each invalid setting, by its name. Settings of `TrainSettings` must
    also have the right type.
    """
    hints = field_hints(TrainSettings)
    problems = {}
    for field in dataclasses.fields(settings):
        problem = _problem_of(field, getattr(settings, field.name), hints)
        if problem is not None:
            problems[field.name] = problem
    return problems


def problem_of_value(name: str, value: Any) -> ConfigError | None:
    """Return the problem of a value of a setting that every run has, or None."""
    field = next(field for field in dataclasses.fields(TrainSettings) if field.name == name)
    return _problem_of(field, value, field_hints(TrainSettings))


def _problem_of(
    field: dataclasses.Field[Any], value: Any, hints: Mapping[str, Any]
) -> ConfigError | None:
    check = field.metadata["check"]
    if check is None or value is None:
        return wrong_type(field.name, value, hints[field.name]) if field.name in hints else None
    try:
        if field.metadata["role"] == "cadence":
            check(value, setting=field.name, length=_ANY_LENGTH)
        else:
            check(value, setting=field.name)
    except ConfigError as problem:
        return problem
    return None


def _check_run_dir(value: Any, *, setting: str) -> None:
    check_type(setting, value, str | Path)
    path_text(str(value), setting=setting)


_decay = number(min_value=0, below=1, kind=int | float)
_length = partial(
    planned, samples_per_epoch=_ANY_LENGTH.samples_per_epoch, batch_size=_ANY_LENGTH.batch_size
)

ClipKind = Literal["norm", "value", "adaptive", "auto", "off"]


def clipping(text: Any, *, setting: str = "clip") -> tuple[ClipKind, float]:
    """Parse "norm 1.0", "value 0.5", "adaptive 0.01", "auto 0.9" or "off" to its kind and its limit
    (infinity for "off").

    >>> clipping("norm 1.0"), clipping("off")
    (('norm', 1.0), ('off', inf))
    """
    words = text.split() if isinstance(text, str) else []
    match words:
        case ["off"]:
            return "off", math.inf
        case ["norm" | "value" | "adaptive" | "auto" as kind, number]:
            limit = _number(number)
            highest = 1 if kind == "auto" else math.inf
            if 0 < limit < highest:
                return cast("ClipKind", kind), limit
    limit = _number(text)
    norm = f"norm {limit}" if 0 < limit < math.inf else "norm 1.0"
    examples = (norm, "value 0.5", "adaptive 0.01", "auto 0.9", "off")
    raise ConfigError(
        "clip-not-a-limit",
        problem=f"{setting} = {text!r} is not a kind of limit on the gradient and its value",
        reason="norm: of all gradients; value: of each element; adaptive: of each unit, as a fraction"
        " of its weights; auto: this quantile of the last 100 norms",
        remedy=[Setting(setting, example) for example in examples],
        setting=setting,
        value=text,
    )


def _number(value: Any) -> float:
    """Return a value as a number, or NaN."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


@ordered
@dataclass(kw_only=True, eq=False, repr=False)
class TrainSettings(Declared):
    """The settings of every run: keywords of `Run`, flags, and keys of TOML files. Durations are
    text with a unit.
    """

    init_from: str | Path | None = setting(
        None, identity=True, path=True, group="what is trained", changes_at="never"
    )
    """Initial weights: a .safetensors file, a checkpoint, or a run. Only used at step 0. None: a
    new model.
    """
    init_optimizer: bool = setting(
        False, identity=True, absent_by_default=True, changes_at="never", needs="init_from"
    )
    """Also take the optimizer's moments and step counts from the run of `init_from`, by the names of
    parameters, if the optimizer is of the same kind. False: the optimizer begins anew.
    """
    seed: int = setting(
        0, check=number(min_value=0, below=1 << 64), identity=True, changes_at="never"
    )
    """Seed of all random numbers of the run."""
    length: str = setting(
        check=_length, identity=True, group="how long", changes_at="step", most_used=True
    )
    """Length of the training, "2500 steps" or "30 epochs", rounded up to a whole step."""
    stop_after: str | None = setting(None, check=_length, one_session=True)
    """End this session after this length, such as "1 epochs"; the schedule stays, and the run can
    resume. None: train to the end.
    """
    time_limit: str | None = setting(None, check=seconds, one_session=True, shared=False)
    """Save and end the session before this time has passed, such as "90 min". None: no limit."""
    batch_size: int | str | None = setting(
        None, identity=True, group="batches", changes_at="step", most_used=True
    )
    """Samples per step over all micro-batches and processes. "4096 tokens" counts tokens with
    padding, if samples differ in length. "64, 128 from 20%" changes on the way. None: as the
    DataLoader says; other data need a value."""
    micro_batch_size: int | str | None = setting(None, identity=True, changes_at="step")
    """Samples (or tokens) per forward and backward pass; divides batch_size. Smaller sizes mean
    more gradient accumulation. None: one pass per process."""
    order: Order | None = setting(
        None, check=check_order, identity=True, by_fingerprint=True, changes_at="never"
    )
    """Order of the training samples: "shuffled" (a permutation per epoch), "sequential", "lanes"
    (contiguous, for a carried state), or `sf.data.Weighted(weights)`. None: shuffled, or as the
    DataLoader says."""
    workers: int | None = setting(
        None,
        check=number(min_value=0),
        per_rank=True,
    )
    """Processes that load samples; 0 loads them in the training process. Does not change results.
    None: 0, or as the DataLoader says.
    """
    clip: str = setting(
        "off", check=of_each_value(clipping), identity=True, group="optimization", changes_at="step"
    )
    """Gradient clipping: "norm 1.0" (global norm), "value 0.5" (each element), "adaptive 0.01"
    (each unit), "auto 0.9" (quantile of recent norms) or "off". "norm 1.0, off from 50%" changes on
    the way."""
    ema: float | None = setting(None, check=_decay, identity=True, changes_at="step")
    """Decay of averaged weights, such as 0.999. Evaluations then use the averaged weights. None: no
    average.
    """
    ema_ramp: bool = setting(True, identity=True, absent_by_default=True, changes_at="never")
    """Let the decay rise to `ema`: at most (1 + n) / (10 + n) at step n. False: a constant decay
    after a first copy, as in torch's AveragedModel.
    """
    ema_start: str | None = setting(
        None, check=_length, identity=True, absent_by_default=True, changes_at="never"
    )
    """When averaging starts, such as "500 steps" or "2 epochs". The average is the current weights
    until then. None: at step 0.
    """
    ema_every: str = setting(
        "1 steps", check=_length, identity=True, absent_by_default=True, changes_at="never"
    )
    """How often the average moves, by 1 - decay each time."""
    max_bad_steps: int = setting(5, check=number(min_value=0), identity=True, changes_at="step")
    """Consecutive non-finite steps that a run survives, checked at each record. Non-finite steps
    are never applied.
    """
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = setting(
        "fp32", identity=True, group="precision and speed", changes_at="step", most_used=True
    )
    """Precision of the passes. auto uses the measured table for this machine and these layers, and
    keeps its choice for the run. fp8 is bf16 with linear layers in 8 bits (extra `quant`)."""
    channels_last: bool | Literal["auto"] = setting(False, identity=True, changes_at="never")
    """Use the channels-last memory format for images. auto uses the same table as precision = auto.
    """
    compile: bool | Literal["auto"] = setting(False, identity=True, changes_at="never")
    """Use torch.compile. auto compiles if the measured table shows a gain on this machine, and
    keeps its choice for the run.
    """
    activation_checkpointing: Literal["off", "blocks", "selective"] = setting("off", observer=True)
    """Recompute blocks in the backward pass to save memory; selective keeps matrix products and
    attention. Results stay the same.
    """
    activation_checkpointing_modules: Sequence[str] | None = setting(None, observer=True)
    """Modules to recompute, by name or class, such as "layers.*". None: the model's repeated
    blocks.
    """
    device: str = setting("auto", per_rank=True)
    """Training device: "cpu", "cuda" or "mps"; auto is the accelerator if there is one."""
    deterministic: bool = setting(False, observer=True)
    """Use only CUDA kernels that are reproducible bit for bit, which are slower."""
    evaluate_every: str = setting(
        "1 epochs", check=every, cadence=True, group="evaluation", needs="splits"
    )
    """How often the splits are evaluated. They are always evaluated after the last step."""
    evaluate_at_start: bool = setting(False, observer=True, needs="splits")
    """Also evaluate the splits before the first step. This evaluation does not affect best, early
    stopping or plateau. In the first body of `run.steps()`, `step.metrics` has its scores.
    """
    sample_every: str | None = setting(None, check=every, cadence=True, needs="sample_fn")
    """How often a sample is shown. None: only at the end."""
    sample_on_all_ranks: bool = setting(False, observer=True, needs="sample_fn")
    """Let every rank draw samples, each with random numbers of its own; the record has all texts.
    False: rank 0 alone draws.
    """
    log_every: str = setting("auto", check=log_interval, cadence=True, group="records")
    """How often a record is written; the host waits for the device only then. Any value but auto
    also prints each record. auto: after step 10, then every 50 steps, or 5% of the run if that is
    shorter, so that epochs end with a record."""
    layer_stats_every: str | None = setting("200 steps", check=every, cadence=True)
    """How often per-layer statistics of gradients, weights and updates are recorded. These steps
    copy the weights. None: never.
    """
    trackers: str | Sequence[str] | None = setting(None, observer=True)
    """Experiment trackers that also receive the records: "wandb", "mlflow", "trackio", or several,
    "wandb,mlflow".
    """
    tensorboard: bool | Literal["auto"] = setting("auto", observer=True)
    """Write TensorBoard files to the run's directory. auto writes them if the package tensorboard
    can be imported.
    """
    text_log: bool = setting(False, observer=True)
    """Also write what the console says, and every record, as plain lines to log.txt in the run's
    directory.
    """
    report: bool = setting(True, observer=True)
    """Write report.html, a page about the run, when it ends."""
    run_dir: str | Path | None = setting(
        None,
        check=_check_run_dir,
        observer=True,
        path=True,
        group="checkpoints",
        changes_at="never",
        most_used=True,
    )
    """Directory of the run. The run resumes if the directory has a checkpoint. `{n}`, as in
    "runs/gpt-{n}", is the next free number, or the newest after a restart. None: nothing is
    written.
    """
    save_every: str = setting("auto", check=save_interval, cadence=True, needs="run_dir")
    """How often a checkpoint is written, in steps or time; also at start and end. auto: every 5
    min, or 60 s if a save takes <0.6 s.
    """
    keep_last: int = setting(3, check=number(min_value=1), observer=True, needs="run_dir")
    """Number of newest checkpoints to keep, besides the first, the best and the checkpoints of
    keep_every.
    """
    keep_best: int = setting(1, check=number(min_value=1), observer=True)
    """Number of checkpoints with the best values of the score of `best` to keep."""
    keep_every: str | None = setting(None, check=every, cadence=True, needs="run_dir")
    """Interval of checkpoints that are kept permanently, such as "10%". None: no such checkpoints.
    """
    sync_batch_norm: bool = setting(False, identity=True, group="processes", changes_at="never")
    """Compute batch-norm statistics over all processes. Results then depend on the number of
    processes.
    """
    exact_sums: bool = setting(True, identity=True, changes_at="never")
    """Add the gradients of a step's micro-batches in an order that does not depend on the number of
    processes, so that results have the same bits on any number. False adds them in the order of the
    processes, to rounding."""
    check_ranks_every: str = setting("1000 steps", check=every, cadence=True)
    """How often ranks compare their weights; each comparison happens at the next record. A
    difference ends the run.
    """
    check_state: bool = setting(True, one_session=True, group="checkpoints")
    """Run a micro-batch twice at the start, and refuse the model if state changes that no
    checkpoint saves.
    """

    def train_settings(self) -> dict[str, Any]:
        """Return the settings that every run has, as keywords of `Run`."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(TrainSettings)
        }


@dataclass
class Timetable:
    """All values that the length of a run determines. Step numbers count completed steps."""

    settings: TrainSettings
    length: Length
    began: Length  # with which the run began: intervals in percent refer to it
    every: dict[str, Interval]  # by setting name
    stop_step: int  # the session ends here; the schedule does not change
    limit_s: float | None
    epoch: Interval  # the end of each epoch, if the length is in epochs

    def evaluate_due(self, done: int) -> bool:
        return self.every["evaluate_every"].due(done) or done == self.length.steps

    def sample_due(self, done: int) -> bool:
        """Return True if `sample_every` asks for a sample after step `done`; False after the last
        step, which has its own sample.
        """
        return self.every["sample_every"].due(done) and done < self.length.steps

    def log_due(self, done: int) -> bool:
        return self.every["log_every"].due(done) or done == self.length.steps


def timetable(
    settings: TrainSettings,
    *,
    samples_per_epoch: int,
    batch_size: int,
    began_steps: int | None = None,
    before: tuple[int, int] = (0, 0),
) -> Timetable:
    """Return the timetable for data of this size. `began_steps` is the length with which a resumed
    run began, and `before` is as in `Length`. Raises `ConfigError` with the name of an invalid
    setting.
    """
    plan = partial(
        planned, samples_per_epoch=samples_per_epoch, batch_size=batch_size, before=before
    )
    length = plan(settings.length)
    stop_step = length.steps
    if settings.stop_after is not None:
        stop_after = plan(settings.stop_after, setting="stop_after")
        stop_step = min(stop_after.steps, length.steps)
    limit_s = None
    if settings.time_limit is not None:
        limit_s = seconds(settings.time_limit, setting="time_limit")
    epoch: Interval = Every()
    if length.in_epochs:
        epoch = every("1 epochs", length=length)
    began = length
    if began_steps is not None:
        began = dataclasses.replace(length, steps=began_steps)
    every_setting = cadences(settings, length=began)
    return Timetable(settings, length, began, every_setting, stop_step, limit_s, epoch)
