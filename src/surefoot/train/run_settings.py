"""The keywords of `Run`: the settings of every run, and the keywords that only code can set."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from surefoot import schedules
from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.config.accepted_changes import change_names
from surefoot.config.order import check_order
from surefoot.config.parallel import Kind, Strategy
from surefoot.config.setting import ordered, setting
from surefoot.config.train_settings import TrainSettings
from surefoot.data.pipeline import TrainData
from surefoot.errors import ConfigError, out_of_range
from surefoot.optim.build import Source
from surefoot.schedules.joined import AnySchedule
from surefoot.tracking.record import refuse_own
from surefoot.train.buffer_rules import BufferRule, check_rules
from surefoot.train.evaluate import Split
from surefoot.train.loop import Loss
from surefoot.train.loss_accumulator import check_loss
from surefoot.train.patience import EarlyStopping, ReduceLROnPlateau

if TYPE_CHECKING:
    from surefoot.tracking.panels import Panel

Makes = Callable[[Any], "Iterable[Panel]"]

Model = nn.Module | Callable[..., nn.Module]


def _schedule(value: Any, *, setting: str) -> None:
    if isinstance(value, AnySchedule):
        return
    kind = type(value).__name__
    name = str(getattr(value, "__name__", kind))
    if isinstance(value, ReduceLROnPlateau) or name == "ReduceLROnPlateau":
        what = "depends on a metric and not on the step"
        remedy = 'write plateau=sf.ReduceLROnPlateau("min val/loss", patience=3)'
    elif name in dir(schedules) and getattr(schedules, name) is value:
        what = "is the function itself"
        remedy = f"call it: {setting}=sf.schedules.{name}(...)"
    elif callable(value):
        what = "is a plain function, which is ambiguous"
        remedy = (
            "write sf.schedules.from_function(fn) if fn(step) returns a factor for the learning"
            " rate, or sf.schedules.from_scheduler(fn) if fn(optimizer) returns a scheduler"
        )
    elif hasattr(value, "step"):
        what = "is of another optimizer, and a run builds its own"
        remedy = f"write sf.schedules.from_scheduler(lambda optimizer: {kind}(optimizer, ...))"
    else:
        name = repr(value)
        what = "is not a schedule"
        remedy = "use sf.schedules.cosine(...), for example"
    raise ConfigError(
        "schedule-of-another-form",
        problem=f"{setting} = {name} {what}",
        remedy=remedy,
        setting=setting,
        value=value,
    )


def _rule(value: Any, *, setting: str) -> None:
    rule = {"early_stopping": EarlyStopping, "plateau": ReduceLROnPlateau}[setting]
    rules = [value]
    if setting == "early_stopping" and isinstance(value, list | tuple):
        rules = list(value)
    for each in rules:
        if not isinstance(each, rule):
            meaning = f'such as sf.{rule.__name__}("min val/loss", patience=3)'
            raise out_of_range(setting, value, meaning)


def _model_settings(value: Any, *, setting: str) -> None:
    is_plain = isinstance(value, Mapping)
    if is_plain:
        for name, of_name in value.items():
            if not isinstance(name, str) or not isinstance(of_name, bool | int | float | str):
                is_plain = False
    if not is_plain:
        raise out_of_range(setting, value, 'numbers or texts by name, such as {"dropout": 0.1}')


def _unit(value: Any, *, setting: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z]+", value):
        raise out_of_range(setting, value, 'one lower-case word in the plural, such as "tokens"')


def _splits(value: Any, *, setting: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            "splits-without-names",
            problem=f"{setting} is a {type(value).__name__}",
            reason="metrics are named SPLIT/METRIC, so each split needs a name",
            remedy=f'write {setting}={{"val": sf.Split(data)}}',
            setting=setting,
            found=type(value).__name__,
        )
    for name, split in value.items():
        if not isinstance(split, Split):
            raise ConfigError(
                "split-not-wrapped",
                problem=f"{setting}[{name!r}] is a {type(split).__name__}",
                remedy="wrap the data in sf.Split(...)",
                setting=setting,
                split=name,
            )


def _derived(value: Any, *, setting: str) -> None:
    if not isinstance(value, Mapping) or not all(map(callable, value.values())):
        meaning = 'functions by name, such as {"perplexity": sf.metrics.perplexity}'
        raise out_of_range(setting, value, meaning)
    refuse_own(value)


def _accept_change(value: Any, *, setting: str) -> None:  # noqa: ARG001
    change_names(value)


@ordered
@dataclass(kw_only=True, eq=False, repr=False)
class RunSettings(TrainSettings):
    """The keywords of `Run`."""

    model: Model | Mapping[str, Model] = setting(
        identity=True, by_fingerprint=True, after="", changes_at="never"
    )
    """A model or, preferably, a factory that is called under the run's seed; or a dictionary of
    these by name. The loss then gets a dictionary of models.
    """
    model_settings: Mapping[str, Any] | None = setting(
        None,
        check=_model_settings,
        identity=True,
        absent_by_default=True,
        changes_at="step",
    )
    """Keywords with which the factory of the model is called, such as {"dropout": 0.1}. They may
    change while the run goes on (`model.dropout`), so none of them may decide a parameter.
    """
    loss: Loss | None = setting(
        None, check=check_loss, identity=True, by_fingerprint=True, changes_at="step"
    )
    """`loss(model, batch)` returns a scalar mean or an `sf.Mean`, alone or in a tuple with
    `(outputs, targets)` or a dictionary of `sf.Mean`. If None, your code runs the steps."""
    train_data: Any = setting(identity=True, by_fingerprint=True, changes_at="epoch")
    """Training data: a map-style data set, a `DataLoader` of one, a `TensorDataset`, a tuple of
    tensors, a `Mixture`, `sf.data.TrainWindows` of tokens, or a stream: an `IterableDataset`, a
    generator function, or an `sf.data.Stream`."""
    early_stopping: EarlyStopping | Sequence[EarlyStopping] | None = setting(
        None, check=_rule, identity=True, after="time_limit", changes_at="step"
    )
    """Rule that ends the run if a metric stops improving, or a list of rules, of which the first
    that applies ends it.
    """
    collate_fn: Callable[[list[Any]], Any] | None = setting(
        None, identity=True, by_fingerprint=True, after="order", changes_at="epoch"
    )
    """Function that collates a list of samples into a batch, as in `DataLoader`. None: torch's
    `default_collate`, or the DataLoader's.
    """
    count_fn: Callable[[Any], int] | None = setting(
        None, identity=True, by_fingerprint=True, changes_at="never"
    )
    """Number of targets in a batch, computed on the host. If None, the size of the first dimension
    is used.
    """
    count_unit: str = setting("targets", check=_unit, observer=True)
    """Name of the targets in the console, the report page and TensorBoard, such as "tokens"."""
    optimizer: Source | Mapping[str, Source] = setting(
        identity=True, after="workers", group="optimization", changes_at="step"
    )
    """Optimizer such as `surefoot.optim.adamw(...)`, a class or function that builds a
    `torch.optim.Optimizer`, or several by name.
    """
    schedule: AnySchedule | None = setting(None, check=_schedule, identity=True, changes_at="step")
    """Learning-rate factor over the run, such as `surefoot.schedules.cosine(...)`. If None, the
    factor is constant.
    """
    plateau: ReduceLROnPlateau | None = setting(None, check=_rule, identity=True, changes_at="step")
    """Rule that lowers the learning rate if a metric stops improving; `evaluate_every` must then be
    equal at a resume.
    """
    splits: Mapping[str, Split] | None = setting(
        None, check=_splits, observer=True, after="deterministic", group="evaluation"
    )
    """Data sets to evaluate, as a dictionary of `Split` by name, such as "val"."""
    best: str | None = setting(None, observer=True, after="evaluate_at_start")
    """Score whose best checkpoint is kept, such as "min val/loss" or "max val/accuracy". It need
    not be the metric of early stopping.
    """
    sample_fn: Callable[[Any], str | Sequence[str]] | None = setting(None, observer=True)
    """`sample_fn(model)` returns a text or a list of texts to print, such as generated text. Of
    several models it gets the first.
    """
    derived: Mapping[str, Callable[[Mapping[str, float]], float]] | None = setting(
        None, check=_derived, observer=True, after="layer_stats_every"
    )
    """Functions of a training record's values, recorded by name: {"perplexity":
    surefoot.metrics.perplexity}.
    """
    loss_note: str | None = setting(None, observer=True)
    """What only the training loss contains, such as "label smoothing 0.1". The console then marks
    it beside the losses of splits.
    """
    panels_fn: Makes | None = setting(None, observer=True, after="trackers")
    """`panels_fn(model)` is called at the end and yields panels for the report page; after 60 s no
    further panel is computed. Of several models it gets the first.
    """
    console: bool = setting(True, per_rank=True, after="report")
    """Print progress."""
    parallel: Kind | Strategy = setting(
        "auto", observer=True, after="keep_every", group="processes"
    )
    """Parallel strategy "none", "ddp", "fsdp" or `surefoot.fsdp(...)`; "auto" means DDP for several
    processes.
    """
    buffers: Mapping[str, BufferRule] | None = setting(
        None,
        check=check_rules,
        identity=True,
        absent_by_default=True,
        after="sync_batch_norm",
        changes_at="never",
    )
    """What a step of several micro-batches leaves in buffers that passes change, by patterns of
    names: {"queue": "in order", "*.seen": "sum"}. The rules are mean, sum, max, min and in order.
    None: the mean in normalizations of torch; others go from one micro-batch to the next.
    """
    identity: Mapping[str, Any] | None = setting(
        None, identity=True, after="check_ranks_every", group="extras", changes_at="never"
    )
    """Your own JSON that must be equal at a resume, such as the steps of data preparation."""
    extra_files: Mapping[str, str | bytes] | None = setting(None, observer=True)
    """Files to write into the run's directory, such as a tokenizer: {name: text or bytes}."""
    describe_fn: Callable[[Any], str] | None = setting(None, observer=True)
    """Function from a batch of one sample to text, for `surefoot replay`. If None, shapes and
    values are printed.
    """
    predict_example: str | None = setting(None, observer=True)
    """Input in the `surefoot predict` command that the run prints at its end; "" if the command
    needs no input.
    """
    sample_summary: str = setting("", observer=True)
    """How `sample_fn` draws, such as "temperature 0.7"; printed above each sample."""
    data_summary: Sequence[str] = setting((), observer=True, shared=False)
    """Lines on the data that `surefoot plan` prints; the start of a run prints the first line."""
    accept_change: str | Sequence[str] | None = setting(
        None, check=_accept_change, one_session=True, after="check_state", needs="run_dir"
    )
    """Parts ("loss", "model", "collate", "data", "optimizer") that may compute differently from
    this session on.
    """
    disk: Disk = setting(DISK, per_rank=True)
    """Object that writes files of checkpoints, `surefoot.checkpoint.filesystem.Disk`; tests pass
    one whose disk is full or fails.
    """


def read_train_data(settings: RunSettings) -> TrainData:
    """Return the training data as the settings describe them, or as a `DataLoader` does."""
    if settings.order is not None:  # before other checks, because an array cannot be compared
        check_order(settings.order, setting="order")
    if isinstance(settings.train_data, DataLoader):
        from surefoot.data.torch_loader import read_loader

        names = ("seed", "batch_size", "order", "workers", "collate_fn")
        return read_loader(settings.train_data, **{name: getattr(settings, name) for name in names})
    return TrainData(
        settings.train_data,
        settings.order or "shuffled",
        settings.batch_size,
        settings.workers or 0,
        settings.collate_fn,
    )
