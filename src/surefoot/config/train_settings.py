"""The one list of settings: what each is, how it is checked, and what a resume does with it. Torch-free.

Everything else is derived from the fields: flags and their help, config.toml, the table in docs/settings.md, which runs are
the same at a resume, what ranks must share, the timetable. What is wrong only beside another setting is in `run/validate.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from surefoot.config.durations import Every, Length, every, planned, seconds
from surefoot.config.tree import field_hints, type_problem
from surefoot.errors import ConfigError

Role = Literal["identity", "per_rank", "one_session", "cadence", "observer"]
Check = Callable[..., Any]
T = TypeVar("T")

_ANY_LENGTH = Length(
    steps=10_000, samples_per_epoch=10_000, batch_size=1
)  # whether a text is a duration depends on none


def setting(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    check: Check | None = None,
    identity: bool = False,
    per_rank: bool = False,
    one_session: bool = False,
    cadence: bool = False,
    observer: bool = False,
    by_fingerprint: bool = False,
    shared: bool = True,
    after: str | None = None,
) -> Any:
    """Declare a setting: its default, its check `check(value, setting=name)`, and exactly one role.

    identity: a resume with another value is refused; `by_fingerprint` if hashes of what it computes are compared instead.
    per_rank: may differ between ranks, and from session to session. one_session: a resume forgets it. cadence: when something
    recurs; its `check` also takes the `length` of the run, and gives an `Every`. observer: may change at a resume. All but those
    of one rank must be the same on all ranks, unless `shared` is False. `after` names the field that it follows (`ordered`).
    """
    given = (("identity", identity), ("per_rank", per_rank), ("one_session", one_session), ("cadence", cadence))
    roles = [role for role, is_given in (*given, ("observer", observer)) if is_given]
    if len(roles) != 1:
        raise TypeError(
            f"a setting has exactly one role of {', '.join(typing.get_args(Role))}; this one has {roles or 'none'}"
        )
    metadata = {"role": roles[0], "check": check, "by_fingerprint": by_fingerprint, "after": after}
    metadata["shared"] = shared and not per_rank
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def default(value: Any) -> Any:
    """Give an inherited setting another default; its check, text and role stay."""
    return dataclasses.field(default=value)


@dataclass(kw_only=True, eq=False, repr=False)
class Declared:
    """A class of settings: each of its own fields is declared by `setting(...)`, or else it fails at import."""

    def __init_subclass__(cls) -> None:
        inherited = {field.name: field for field in dataclasses.fields(cls)}
        for name, annotation in inspect.get_annotations(cls).items():
            own, where = cls.__dict__.get(name), f"{cls.__name__}.{name}"
            is_declared = isinstance(own, dataclasses.Field) and "role" in own.metadata
            if name not in inherited and not is_declared:
                raise TypeError(f"{where} is not declared by setting(...): what would a resume do with it?")
            if name in inherited:
                hint = (
                    inherited[name].type if isinstance(annotation, str) else typing.get_type_hints(cls.__mro__[1])[name]
                )
                if is_declared or not isinstance(own, dataclasses.Field) or annotation != hint:
                    raise TypeError(f"{where}: of an inherited setting only the default may change, by default(...)")
                own.metadata = inherited[name].metadata

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name in {field.name for field in dataclasses.fields(self)}:
            kind = type(self).__name__
            raise ConfigError(
                f"{name} cannot be assigned: the settings of a {kind} are checked once, when it is made\n"
                f"  give it there: {kind}(..., {name}={value!r})"
            )
        super().__setattr__(name, value)


def ordered(kind: type[T]) -> type[T]:
    """Put each field of a class behind the one that its `after` names ("" for none): in its signature, help and files."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    order: list[str] = list(vars(kind.__mro__[1])["__dataclass_fields__"])
    own = [name for name in inspect.get_annotations(kind) if name not in order]
    last = order[-1] if order else ""
    for name in own:
        after = fields[name].metadata["after"]
        last = last if after is None else after
        order.insert(order.index(last) + 1 if last else 0, name)
        last = name
    signature = inspect.signature(vars(kind)["__init__"])
    kind.__dataclass_fields__ = {name: fields[name] for name in order}  # type: ignore[attr-defined]
    kind.__signature__ = signature.replace(parameters=[signature.parameters[name] for name in order])  # type: ignore[attr-defined]
    return kind


def names_of(kind: type[Declared] | Declared, role: Role) -> list[str]:
    """The settings of one role.

    >>> names_of(TrainSettings, "one_session")
    ['stop_after', 'time_limit', 'check_state']
    """
    return [field.name for field in dataclasses.fields(kind) if field.metadata["role"] == role]


def shared_by_ranks(settings: Declared) -> dict[str, Any]:
    """The settings that every rank must have been given alike."""
    return {
        field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.metadata["shared"]
    }


def identity_of(settings: Declared, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What makes it this run and no other, as far as values tell: as given, or as it was `resolved` for the run."""
    identity = (field for field in dataclasses.fields(settings) if field.metadata["role"] == "identity")
    given = {field.name: getattr(settings, field.name) for field in identity if not field.metadata["by_fingerprint"]}
    return {**given, **resolved}


def cadences(settings: Declared, *, length: Length) -> dict[str, Every]:
    """When each thing recurs in a run of that length, by the name of its setting."""
    return {
        field.name: field.metadata["check"](getattr(settings, field.name), length=length, setting=field.name)
        for field in dataclasses.fields(settings)
        if field.metadata["role"] == "cadence"
    }


def problems_of(settings: Declared) -> list[str]:
    """What is wrong with each setting by itself; those of `TrainSettings` must also be of their type."""
    hints, problems = dict(field_hints(TrainSettings)), []
    for field in dataclasses.fields(settings):
        name, check = field.name, field.metadata["check"]
        value = getattr(settings, name)
        problem = None
        if name in hints and (check is None or value is None):
            problem = type_problem(name, value, hints[name], shown=repr)
        if problem is None and check is not None and value is not None:
            length = {"length": _ANY_LENGTH} if field.metadata["role"] == "cadence" else {}
            try:
                check(value, setting=name, **length)
            except ConfigError as wrong:
                problem = str(wrong)
        problems += [] if problem is None else [problem]
    return problems


def at_least(limit: int, what: str) -> Check:
    """A check for a whole number; `what` says of what.

    >>> at_least(0, "steps")(-1, setting="warmup")
    Traceback (most recent call last):
    surefoot.errors.ConfigError: warmup = -1: steps, 0 or more
    """

    def check(value: Any, *, setting: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < limit:
            raise ConfigError(f"{setting} = {value!r}: {what}, {limit} or more")

    return check


def _seed(value: Any, *, setting: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ConfigError(f"{setting} = {value!r}: a number from 0 to 2**64 - 1")


def _decay(value: Any, *, setting: str) -> None:
    if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(f"{setting} = {value!r}: a number from 0 to below 1 is needed, such as 0.999")


_length = partial(planned, samples_per_epoch=_ANY_LENGTH.samples_per_epoch, batch_size=_ANY_LENGTH.batch_size)

ClipKind = Literal["norm", "value", "adaptive", "auto", "off"]
_CLIP_KINDS: dict[str, ClipKind] = {"norm": "norm", "value": "value", "adaptive": "adaptive", "auto": "auto"}


def clipping(text: Any, *, setting: str = "clip") -> tuple[ClipKind, float]:
    """The kind and the number in "norm 1.0", "value 0.5", "adaptive 0.01", "auto 0.9" or "off" (no limit, so infinity).

    >>> clipping("norm 1.0"), clipping("off")
    (('norm', 1.0), ('off', inf))
    """
    match text.split() if isinstance(text, str) else []:
        case ["off"]:
            return "off", math.inf
        case ["norm" | "value" | "adaptive" | "auto" as kind, number]:
            try:
                limit = float(number)
            except ValueError:
                limit = math.nan
            if 0 < limit < (1 if kind == "auto" else math.inf):
                return _CLIP_KINDS[kind], limit
    try:
        limit = math.nan if isinstance(text, bool) else float(text)
    except (TypeError, ValueError):
        limit = math.nan
    if 0 < limit < math.inf:
        typed = f'--{setting} "norm {limit}"' if isinstance(text, str) else f'{setting}="norm {limit}"'
        raise ConfigError(
            f"{setting} = {text!r} does not say what it is a limit of\n  try: {typed}, a limit on the norm of the whole gradient"
        )
    raise ConfigError(
        f"{setting} = {text!r} is no limit on the gradient\n"
        "  write it as 'norm 1.0' (of all of it), 'value 0.5' (of each number), 'adaptive 0.01' (of each unit, as a fraction\n"
        "  of its weights), 'auto 0.9' (of all of it, that quantile of the last 100 norms) or 'off'"
    )


def _directory(value: Any, *, setting: str) -> None:
    if not str(value):
        raise ConfigError(f"{setting} is empty: give the path of the run's directory, or leave it out to save nothing")


@ordered
@dataclass(kw_only=True, eq=False, repr=False)
class TrainSettings(Declared):
    """What every run has, as keywords of `Run`, flags and keys of files. Durations are text with a unit."""

    init: str | Path | None = setting(None, identity=True)
    """Weights to start from: a .safetensors file, a checkpoint, or a run; only at step 0. None: a fresh model."""
    seed: int = setting(0, check=_seed, identity=True)
    """The only source of randomness."""
    length: str = setting(check=_length, identity=True)
    """How long to train: "2500 steps" or "30 epochs", rounded up to a whole step."""
    stop_after: str | None = setting(None, check=_length, one_session=True)
    """End early, keep the schedule, resume later. None: train to the end."""
    time_limit: str | None = setting(None, check=seconds, one_session=True, shared=False)
    """Save and end before this much time has passed, such as "90 min". None: no limit."""
    batch_size: int | str = setting(identity=True)
    """Samples of one step, over all micro-batches and processes; or "4096 tokens", with their padding, if samples differ in length."""
    micro_batch_size: int | str | None = setting(None, identity=True)
    """Samples (or tokens) of one forward and backward pass; divides batch_size. Smaller means more gradient accumulation.
    None: one pass per process."""
    workers: int = setting(0, check=at_least(0, "the number of processes that read samples"), per_rank=True)
    """Processes that read samples; 0 reads them in the training process. Changes no result."""
    clip: str = setting("norm 1.0", check=clipping, identity=True)
    """Gradient limit: "norm 1.0" (of all), "value 0.5" (each number), "adaptive 0.01" (each unit), "auto 0.9" or "off"."""
    ema: float | None = setting(None, check=_decay, identity=True)
    """Decay of averaged weights, which are then the ones evaluated, such as 0.999. None: no average."""
    max_bad_steps: int = setting(5, check=at_least(0, "how many bad steps in a row a run survives"), identity=True)
    """Non-finite steps in a row before the run ends, which is noticed at the next record. Such steps are never applied."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = setting("auto", identity=True)
    """Number format of the passes; auto is what the committed table gives for this machine and these layers, and stays with the
    run. fp8 is bf16 with linear layers in 8 bits (extra `fp8`)."""
    channels_last: bool | Literal["auto"] = setting("auto", identity=True)
    """Lay images out with the channels of a pixel side by side for convolutions; auto is looked up beside precision = auto."""
    compile: bool | Literal["auto"] = setting(False, identity=True)
    """Use torch.compile; auto does if the committed table of facts says that it pays on this machine, and stays with the run."""
    activation_checkpointing: Literal["off", "blocks", "selective"] = setting("off", observer=True)
    """Recompute blocks, or (selective) all in them but matrix products and attention, in the backward pass: saves memory, changes
    no bit."""
    checkpointed_blocks: Sequence[str] | None = setting(None, observer=True)
    """Modules to recompute, by name or class, such as "layers.*". None: the model's repeated blocks."""
    device: str = setting("auto", per_rank=True)
    """Where to train: "cpu", "cuda" or "mps"; auto is the accelerator if there is one."""
    deterministic: bool = setting(False, observer=True)
    """Use only CUDA kernels that repeat bit for bit; slower."""
    evaluate_every: str = setting("1 epochs", check=every, cadence=True)
    """How often the splits are evaluated; always after the last step."""
    sample_every: str | None = setting(None, check=every, cadence=True)
    """How often a sample is shown. None: once, at the end."""
    log_every: str = setting("50 steps", check=every, cadence=True)
    """How often a record is written. Only then does the host wait for the device."""
    watch_every: str | None = setting("200 steps", check=every, cadence=True)
    """How often per-layer gradient, weight and update statistics are recorded; such a step keeps its weights twice. None: never."""
    trackers: str | Sequence[str] | None = setting(None, observer=True)
    """Experiment trackers that get the records too: "wandb", "mlflow", "trackio", or several, "wandb,mlflow"."""
    report: bool = setting(True, observer=True)
    """Write report.html, a page on the run, when it ends."""
    out: str | Path | None = setting(None, check=_directory, observer=True)
    """The run's directory. It resumes if a checkpoint is there. None: nothing is written."""
    save_every: str = setting("5 min", check=partial(every, time=True), cadence=True)
    """How often a checkpoint is written, in steps or time; always at the start and the end."""
    keep_last: int = setting(3, check=at_least(1, "how many of the newest checkpoints to keep"), observer=True)
    """Newest checkpoints to keep, besides the first, the best and those of keep_every."""
    keep_every: str | None = setting(None, check=every, cadence=True)
    """Checkpoints to keep for good, such as "10%". None: no more."""
    sync_batch_norm: bool = setting(False, identity=True)
    """Batch normalization over the batches of all processes (CUDA); results then depend on how many there are."""
    compare_ranks_every: str = setting("1000 steps", check=every, cadence=True)
    """How often ranks check that their weights are equal, at the next record; a difference ends the run."""
    check_state: bool = setting(True, one_session=True)
    """Pass the first micro-batch twice when the run begins, and refuse what changes then and no checkpoint holds."""

    def train_settings(self) -> dict[str, Any]:
        """The settings that every run has, as keywords of `Run`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainSettings)}
