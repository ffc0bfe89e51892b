"""Shared by recipes: settings of an optimizer and of a schedule, and an error that lists all problems at once. Torch-free."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import surefoot as sf
from surefoot.config.parallel import DDPSettings, FSDPSettings, Kind, Strategy, strategy_of
from surefoot.config.setting import checked, default, ordered, setting
from surefoot.config.train_settings import TrainSettings, number
from surefoot.config.tree import LEADS, STAYS
from surefoot.distributed.environment import placed
from surefoot.optim.optimizers import OPTIMIZERS, named
from surefoot.schedules import lr_schedule as schedules
from surefoot.schedules.curves import SHAPES
from surefoot.train.patience import refuse_end_before_reduction

if TYPE_CHECKING:
    OptimizerName = str
    ShapeName = str
else:  # the choices of a flag
    OptimizerName, ShapeName = Literal[tuple(OPTIMIZERS)], Literal[tuple(SHAPES)]

Watching = TypeVar("Watching")
FRACTION = number("a fraction, at least 0 and below 1", least=0, below=1, kind=int | float)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients become updates. Settings not given have the optimizer's defaults; settings of another optimizer are refused."""

    name: OptimizerName = field(default="adamw", metadata=LEADS)
    """The optimizer. With another one, a preset's own settings of it are forgotten, except layer-decay, base-width and frozen."""
    lr: float | None = None
    """Base learning rate, reached at the end of warm-up. Default: 3e-3; sgd and adafactor 0.1, lion 1e-3, muon and
    schedule_free 1e-2."""
    weight_decay: float | None = None
    """Decay of weights, decoupled from the gradient except for adam and sgd. Default: 0.1; lion 0.3; adam, sgd and
    adafactor 0."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters that decay: matrices without embeddings; or all, as torch does by default."""
    betas: tuple[float, float] | None = None
    """Decay rates of the averages of gradient and squared gradient; for muon those of its AdamW part. All but sgd and
    adafactor."""
    eps: float | None = None
    """Added to the root of the average squared gradient. All but sgd, lion and adafactor."""
    momentum: float | None = None
    """sgd, muon: fraction of the last update that is kept."""
    nesterov: bool | None = None
    """sgd, muon: look ahead along the momentum."""
    ns_steps: int | None = None
    """muon: iterations of the orthogonalization."""
    adamw_lr: float | None = None
    """muon: base learning rate of what AdamW trains. Default: lr."""
    adamw_modules: tuple[str, ...] | None = None
    """muon: modules or parameters whose matrices AdamW trains, besides embeddings. Default: the head, as plan shows it."""
    beta2_decay: float | None = None
    """adafactor: the averages move by step ** beta2_decay."""
    clip_threshold: float | None = None
    """adafactor: limit on the root mean square of an update before its learning rate."""
    min_scale: float | None = None
    """adafactor: lower limit of a parameter's root mean square, by which updates are scaled."""
    momentum_decay: float | None = None
    """nadam: how the momentum rises over the steps."""
    layer_decay: float | None = field(default=None, metadata=STAYS)
    """Learning rate of each block as a fraction of the next one's, such as 0.75; the head has lr. Default: lr for all."""
    base_width: int | None = field(default=None, metadata=STAYS)
    """Width at which lr was found: hidden matrices and the head have lr x base_width / width. Default: lr at any width."""
    frozen: tuple[str, ...] | None = field(default=None, metadata=STAYS)
    """Parameters that are not trained, by name, such as "embedding.*". Default: none."""

    def spec(self) -> Any:
        """The optimizer for `sf.Run`; `ConfigError` for values that cannot be."""
        shared = ("name", "lr", "weight_decay", "decay", "layer_decay", "base_width", "frozen")
        own = {name: value for name, value in vars(self).items() if name not in shared}
        rate, strength = OPTIMIZERS[self.name].first_run
        plain = partial(
            named,
            self.name,
            lr=rate if self.lr is None else self.lr,
            weight_decay=strength if self.weight_decay is None else self.weight_decay,
            decay=self.decay,
            settings=own,
        )
        *rates, _ = checked(
            lambda: [] if self.layer_decay is None else [sf.optim.layer_decay(self.layer_decay)],
            lambda: [] if self.base_width is None else [sf.optim.width_scaling(base_width=self.base_width)],
            lambda: [] if not self.frozen else [sf.optim.frozen(*self.frozen)],
            plain,
        )
        return plain(lr_multipliers=[multiplier for group in rates for multiplier in group])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the run, as a factor on the base rate. Settings not given have the shape's defaults."""

    name: ShapeName = "cosine"
    """Shape of the schedule after warm-up."""
    warmup: str | None = None
    """How long the learning rate rises from near 0. Default: 5%; 30% for one_cycle."""
    min_lr_ratio: float | None = None
    """Lowest factor on the base rate, reached at the last step."""
    power: float | None = None
    """polynomial: exponent of the fall."""
    cooldown: str | None = None
    """wsd: how long the learning rate falls at the end."""
    cooldown_shape: Literal["1-sqrt", "linear"] | None = None
    """wsd: shape of that fall. Default: 1-sqrt."""
    milestones: tuple[str, ...] | None = None
    """multistep: when the learning rate drops, such as 50% 75%, or "every 10 epochs"."""
    gamma: float | None = None
    """multistep: factor on the learning rate at each drop."""
    start_lr_ratio: float | None = None
    """one_cycle: factor on the base rate at step 0."""
    momentum_range: tuple[float, float] | None = None
    """one_cycle: the lowest and the highest momentum (Adam's first beta), such as 0.85 0.95. Default: momentum stays."""
    cycle: str | None = None
    """cosine_restarts: length of the first cycle."""
    cycle_growth: float | None = None
    """cosine_restarts: factor from one cycle's length to the next."""

    def spec(self) -> schedules.Schedule:
        """The schedule for `sf.Run`; `ConfigError` for values that cannot be."""
        own = dict(vars(self))
        if self.warmup is None and not SHAPES[self.name].own_rise:
            own["warmup"] = "5%"
        return schedules.Schedule(own.pop("name"), **own)


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End the run if a metric stops improving. Without patience it never ends early."""

    patience: int | None = None
    """End after this number of evaluations without improvement. Default: never."""
    monitor: str | None = None
    """The metric, such as "min val/loss" or "max val/accuracy". Default: the recipe's."""
    min_delta: float | None = None
    """Smallest change that counts as an improvement. Default: 0, any change."""

    def spec(self, monitor: str) -> sf.EarlyStopping | None:
        """The object for `sf.Run`, which monitors the recipe's metric by default; None without patience."""
        return _of_flags(sf.EarlyStopping, "early_stopping", vars(self), monitor)


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Lower the learning rate if a metric stops improving. Without patience it is never lowered."""

    patience: int | None = None
    """Lower it after this number of evaluations without improvement. Default: never."""
    factor: float | None = None
    """Factor on the learning rate. Default: 0.5."""
    monitor: str | None = None
    """The metric, such as "min val/loss" or "max val/accuracy". Default: the recipe's."""
    min_lr_ratio: float | None = None
    """Lowest factor on the schedule's rate, of all reductions together. Default: 0.01."""
    cooldown: int | None = None
    """Number of evaluations after a reduction that use up no patience. Default: 0."""
    min_delta: float | None = None
    """Smallest change that counts as an improvement. Default: 0, any change."""

    def spec(self, monitor: str) -> sf.ReduceLROnPlateau | None:
        """The object for `sf.Run`, which monitors the recipe's metric by default; None without patience."""
        return _of_flags(sf.ReduceLROnPlateau, "plateau", vars(self), monitor)


def _of_flags(kind: Callable[..., Watching], name: str, settings: Mapping[str, Any], monitor: str) -> Watching | None:
    flags = {key: value for key, value in settings.items() if value is not None}
    if flags and "patience" not in flags:
        key, value = next(iter(flags.items()))
        raise sf.ConfigError(
            f"{name}.{key} = {value!r} changes nothing without a patience\n"
            f"  give one too: --{name.replace('_', '-')}.patience 3"
        )
    return kind(**({"monitor": monitor} | flags)) if flags else None


def refuse_default_data(preset: str | None, path: str | None, meant_for: Mapping[str, str]) -> None:
    """Raise `ConfigError` where a preset is for data of the user's (what, `meant_for` says) and none are given."""
    if path is None and preset is not None and preset in meant_for:
        raise sf.ConfigError(
            f"--preset {preset} is for data of yours, and data.path is absent\n  give {meant_for[preset]}"
        )


@ordered
@dataclass(kw_only=True, eq=False, repr=False)
class RecipeSettings(TrainSettings):
    """Settings of every recipe: flags for objects that `Run` takes, and for the start of processes.

    A recipe may choose more than a plain loop does; the header says so.
    """

    clip: str = default("norm 1.0")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = default("auto")
    channels_last: bool | Literal["auto"] = default("auto")
    early_stopping: EarlyStopping = setting(EarlyStopping(), identity=True, after="time_limit")
    """End the run if a metric stops improving."""
    optimizer: Optimizer = setting(Optimizer(), identity=True, after="workers", group="optimization")
    """How gradients become updates. A setting that is absent has the optimizer's default; a foreign one is refused."""
    schedule: Schedule = setting(Schedule(), identity=True)
    """The learning rate over the run, as a factor on the base rate. Settings not given have the shape's defaults."""
    plateau: Plateau = setting(Plateau(), identity=True)
    """Lower the learning rate if a metric stops improving."""
    parallel: Kind = setting("auto", observer=True, after="keep_every", group="processes")
    """How several processes work together; auto is ddp if there are several. fsdp spreads the model over them."""
    ddp: DDPSettings = setting(DDPSettings(), observer=True)
    """How ddp works, which is parallel = auto among several processes too."""
    fsdp: FSDPSettings = setting(FSDPSettings(), observer=True)
    """How parallel = fsdp works."""
    nproc: int | str = setting(1, observer=True)
    """Processes on this machine that train together, or "1:4": as many as divide a step, and fewer if some died.
    Changes no result beyond rounding if micro_batch_size is given; without it another number is another run."""
    max_restarts: int = setting(0, observer=True)
    """How often to start all processes again if one died; they go on from the newest checkpoint."""

    def check(self) -> None:
        """Raise one `ConfigError` with everything that is wrong with the settings that every recipe has."""
        from surefoot.run.validate import check_settings  # imports torch

        try:
            spec = self.schedule.spec()
        except sf.ConfigError:  # which is told by itself
            spec = None
        checked(lambda: check_settings(self, schedule=spec), self.strategy, lambda: self.steering("min any/score"))

    def run_settings(self, monitor: str | None) -> dict[str, Any]:
        """The keywords of `Run` that these settings are; `monitor` is the recipe's metric, None for a run that evaluates nothing."""
        return {
            **self.train_settings(),
            "parallel": self.strategy(),
            **({} if monitor is None else self.steering(monitor)),
        }

    def strategy(self) -> Strategy:
        """How several processes work together; `ConfigError` for settings of `ddp` under `fsdp`, and the other way round."""
        return strategy_of(self.parallel, ddp=self.ddp, fsdp=self.fsdp)

    def steering(self, monitor: str) -> dict[str, Any]:
        """`best`, `early_stopping` and `plateau` for `Run`; the best is chosen by what early stopping monitors."""
        stopping, plateau = checked(lambda: self.early_stopping.spec(monitor), lambda: self.plateau.spec(monitor))
        if stopping is not None and plateau is not None:
            refuse_end_before_reduction(plateau, stopping)
        return {
            "best": monitor if stopping is None else stopping.monitor,
            "early_stopping": stopping,
            "plateau": plateau,
        }


def note(text: str) -> None:
    """Print a message, not a result, on rank 0 alone; the ranks may not have met yet."""
    if placed(os.environ).rank == 0:
        print(text, file=sys.stderr)
