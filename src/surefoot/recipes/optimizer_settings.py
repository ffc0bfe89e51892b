"""Settings that recipes share: optimizer, schedule, early stopping, plateau and processes. Imports
no torch.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import surefoot as sf
from surefoot.config.keywords import parse_score
from surefoot.config.parallel import DDPSettings, FSDPSettings, Kind, Strategy, strategy_of
from surefoot.config.setting import checked, default, number, ordered, setting
from surefoot.config.train_settings import TrainSettings
from surefoot.config.tree import LEADS, MOST_USED, NEVER, STAYS
from surefoot.distributed.environment import placed
from surefoot.errors import Setting
from surefoot.optim.optimizers import OPTIMIZERS, named
from surefoot.schedules import lr_schedule as schedules
from surefoot.schedules.curves import SHAPES
from surefoot.train.patience import is_of_training, refuse_end_before_reduction, rules_of

if TYPE_CHECKING:
    OptimizerName = str
    ShapeName = str
else:  # the choices of a flag
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    ShapeName = Literal[tuple(SHAPES)]

Watching = TypeVar("Watching")
FRACTION = number(min_value=0, below=1, kind=int | float)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer. Absent settings use the optimizer's defaults; settings of another optimizer
    are refused.
    """

    name: OptimizerName = field(default="adamw", metadata=LEADS | NEVER)
    """Name of the optimizer. Another name drops the preset's optimizer settings, except
    layer-decay, base-width and frozen.
    """
    lr: float | None = field(default=None, metadata=MOST_USED)
    """Base learning rate, reached at the end of warm-up. Default: 3e-3; sgd and adafactor 0.1, lion
    1e-3, muon and schedule_free 1e-2.
    """
    weight_decay: float | None = None
    """Weight decay, decoupled from the gradient except for adam and sgd. Default: 0.1; lion 0.3;
    adam, sgd and adafactor 0.
    """
    decay: Literal["matrices", "all"] = field(default="matrices", metadata=NEVER)
    """Parameters with weight decay: matrices except embeddings; or all, as torch does by default.
    """
    betas: tuple[float, float] | None = None
    """Decay rates of the averages of gradient and squared gradient (muon: in its AdamW part). Not
    for sgd and adafactor.
    """
    eps: float | None = None
    """Constant added to the root of the average squared gradient. Not for sgd, lion and adafactor.
    """
    momentum: float | None = None
    """sgd, muon: momentum, the fraction of the last update that is added."""
    nesterov: bool | None = None
    """sgd, muon: use Nesterov momentum."""
    ns_steps: int | None = None
    """muon: iterations of the orthogonalization."""
    adamw_lr: float | None = None
    """muon: base learning rate of the parameters that AdamW trains. Default: lr."""
    adamw_modules: tuple[str, ...] | None = field(default=None, metadata=NEVER)
    """muon: modules or parameters whose matrices AdamW trains, besides embeddings. Default: the
    head; surefoot plan prints its name.
    """
    beta2_decay: float | None = None
    """adafactor: exponent in step ** beta2_decay, the update weight of the averages."""
    clip_threshold: float | None = None
    """adafactor: maximum root mean square of an update before multiplication by the learning rate.
    """
    min_scale: float | None = None
    """adafactor: minimum of a parameter's root mean square, which scales its update."""
    momentum_decay: float | None = None
    """nadam: decay of the momentum schedule, as in torch."""
    layer_decay: float | None = field(default=None, metadata=STAYS | NEVER)
    """Learning rate of each block as a fraction of the next block's, such as 0.75; the head has lr.
    Default: lr for all blocks.
    """
    base_width: int | None = field(default=None, metadata=STAYS | NEVER)
    """Width at which lr was tuned: hidden matrices and the head use lr x base_width / width.
    Default: lr at any width.
    """
    frozen: tuple[str, ...] | None = field(default=None, metadata=STAYS)
    """Parameters that are not trained, by name, such as "embedding.*". Default: none."""

    def spec(self) -> Any:
        """Return the optimizer for `sf.Run`. Raises `ConfigError` for invalid values."""
        shared = ("name", "lr", "weight_decay", "decay", "layer_decay", "base_width", "frozen")
        settings = {name: value for name, value in vars(self).items() if name not in shared}
        default_lr, default_weight_decay = OPTIMIZERS[self.name].first_run
        plain = partial(
            named,
            self.name,
            lr=default_lr if self.lr is None else self.lr,
            weight_decay=default_weight_decay if self.weight_decay is None else self.weight_decay,
            decay=self.decay,
            settings=settings,
        )
        multipliers: list[Callable[[], Any]] = []
        if self.layer_decay is not None:
            multipliers.append(partial(sf.optim.layer_decay, self.layer_decay))
        if self.base_width is not None:
            multipliers.append(partial(sf.optim.width_scaling, base_width=self.base_width))
        if self.frozen:
            multipliers.append(partial(sf.optim.frozen, *self.frozen))
        *lr_multipliers, _ = checked(*multipliers, plain)
        return plain(lr_multipliers=lr_multipliers)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning-rate schedule, as a factor on the base learning rate. Absent settings use the
    shape's defaults.
    """

    name: ShapeName = "cosine"
    """Shape of the schedule after warm-up."""
    warmup: str | None = None
    """Duration of the warm-up, in which the learning rate rises from near 0. Default: 5%; 30% for
    one_cycle.
    """
    min_lr_ratio: float | None = None
    """Lowest factor on the base learning rate, reached at the last step."""
    power: float | None = None
    """polynomial: exponent of the decay."""
    cooldown: str | None = None
    """wsd: duration of the decay at the end."""
    cooldown_shape: Literal["1-sqrt", "linear"] | None = None
    """wsd: shape of the decay at the end. Default: 1-sqrt."""
    milestones: tuple[str, ...] | None = None
    """multistep: when the learning rate drops, such as 50% 75%, or "every 10 epochs"."""
    gamma: float | None = None
    """multistep: factor on the learning rate at each drop."""
    start_lr_ratio: float | None = None
    """one_cycle: factor on the base learning rate at step 0."""
    rise_shape: Literal["cosine", "linear"] | None = None
    """one_cycle: shape of the rise. Default: cosine."""
    momentum_range: tuple[float, float] | None = None
    """one_cycle: the lowest and the highest momentum (Adam's first beta), such as 0.85 0.95.
    Default: constant momentum.
    """
    cycle: str | None = None
    """cosine_restarts: length of the first cycle."""
    cycle_growth: float | None = None
    """cosine_restarts: factor from one cycle's length to the next."""

    def spec(self) -> schedules.Schedule:
        """Return the schedule for `sf.Run`. Raises `ConfigError` for invalid values."""
        settings = dict(vars(self))
        name = settings.pop("name")
        if self.warmup is None and not SHAPES[self.name].own_rise:
            settings["warmup"] = "5%"
        return schedules.Schedule(name, **settings)


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Early stopping of a run if a metric stops improving. Off without patience."""

    patience: int | None = None
    """Number of evaluations without improvement before the run ends. Default: off."""
    monitor: str | None = None
    """Monitored metric, such as "min val/loss" or "max val/accuracy", or "min train/loss" for the
    training records; of several, "min val/loss, max val/accuracy", the first that stops improving
    ends the run. Default: the recipe's metric.
    """
    min_delta: float | str | None = None
    """Largest change that is no improvement: a number, or a share of the best value, "1%". Default:
    0 (any change is one).
    """

    def spec(self, monitor: str) -> sf.EarlyStopping | list[sf.EarlyStopping] | None:
        """Return the `sf.EarlyStopping`, by default for the recipe's metric, or a list of several;
        None without patience.
        """
        monitors: list[str | None] = [None]  # the recipe's metric
        if self.monitor is not None:
            monitors = [metric.strip() for metric in self.monitor.split(",")]
        rules = []
        for metric in monitors:
            settings = vars(self) | {"monitor": metric}
            rule = _watch_from_flags(sf.EarlyStopping, "early_stopping", settings, monitor)
            if rule is None:
                return None
            rules.append(rule)
        return rules if len(rules) > 1 else rules[0]


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Reductions of the learning rate if a metric stops improving. Off without patience."""

    patience: int | None = None
    """Number of evaluations without improvement before a reduction. Default: off."""
    factor: float | None = None
    """Factor on the learning rate at each reduction. Default: 0.5."""
    monitor: str | None = None
    """Monitored metric, such as "min val/loss" or "max val/accuracy". Default: the recipe's metric.
    """
    min_lr_ratio: float | None = None
    """Lowest factor on the schedule's learning rate after all reductions. Default: 0.01."""
    cooldown: int | None = None
    """Number of evaluations after a reduction that do not count as patience. Default: 0."""
    min_delta: float | str | None = None
    """Largest change that is no improvement: a number, or a share of the best value, "1%". Default:
    0 (any change is one).
    """

    def spec(self, monitor: str) -> sf.ReduceLROnPlateau | None:
        """Return the `sf.ReduceLROnPlateau`, by default for the recipe's metric; None without
        patience.
        """
        return _watch_from_flags(sf.ReduceLROnPlateau, "plateau", vars(self), monitor)


def _watch_from_flags(
    kind: Callable[..., Watching], name: str, settings: Mapping[str, Any], monitor: str
) -> Watching | None:
    """Return the rule of `kind` that flags ask for; None without a flag."""
    flags = {key: value for key, value in settings.items() if value is not None}
    if not flags:
        return None
    if "patience" not in flags:
        key, value = next(iter(flags.items()))
        raise sf.ConfigError(
            "setting-without-patience",
            problem=f"{name}.{key} = {value!r} has no effect without a patience",
            remedy=Setting(f"{name}.patience", 3),
            setting=f"{name}.{key}",
            value=value,
        )
    flags.setdefault("monitor", monitor)
    return kind(**flags)


def refuse_default_data(preset: str | None, path: str | None, meant_for: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a preset needs the user's data and no path is set. `meant_for`
    describes the data per preset.
    """
    if path is None and preset is not None and preset in meant_for:
        raise sf.ConfigError(
            "preset-without-data",
            problem=f"preset = {preset} needs your data, and data.path is not set",
            reason=f"it is meant for {meant_for[preset]}",
            remedy=Setting("data.path", "PATH"),
            setting="preset",
            value=preset,
        )


@ordered
@dataclass(kw_only=True, eq=False, repr=False)
class RecipeSettings(TrainSettings):
    """Settings of every recipe: settings of `Run`, flags for the objects that `Run` takes, and
    numbers of processes.
    """

    clip: str = default("norm 1.0")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = default("auto")
    channels_last: bool | Literal["auto"] = default("auto")
    early_stopping: EarlyStopping = setting(
        EarlyStopping(), identity=True, after="time_limit", changes_at="step"
    )
    """Early stopping if a metric stops improving."""
    optimizer: Optimizer = setting(
        Optimizer(), identity=True, after="workers", group="optimization", changes_at="step"
    )
    """The optimizer. Absent settings use the optimizer's defaults; settings of another optimizer
    are refused.
    """
    schedule: Schedule = setting(Schedule(), identity=True, changes_at="step")
    """The learning-rate schedule, as a factor on the base learning rate. Absent settings use the
    shape's defaults.
    """
    plateau: Plateau = setting(Plateau(), identity=True, changes_at="step")
    """Reductions of the learning rate if a metric stops improving."""
    parallel: Kind = setting("auto", observer=True, after="keep_every", group="processes")
    """Parallel strategy. auto is ddp for several processes; fsdp shards the model over them."""
    ddp: DDPSettings = setting(DDPSettings(), observer=True)
    """Settings of ddp, also if auto chooses it."""
    fsdp: FSDPSettings = setting(FSDPSettings(), observer=True)
    """Settings of fsdp."""
    nproc: int | str = setting(1, observer=True, most_used=True)
    """Processes on this machine. "1:4" starts up to 4, at most one for each micro-batch of a step,
    and fewer after one dies. Another number gives the same bits if micro_batch_size is set;
    otherwise it is another run."""
    max_restarts: int = setting(0, observer=True)
    """Maximum number of restarts of all processes after one dies. They resume from the newest
    checkpoint.
    """

    def check(self) -> None:
        """Raise one `ConfigError` with all problems of the settings that every recipe has."""
        from surefoot.run.validate import check_settings  # imports torch

        try:
            spec = self.schedule.spec()
        except sf.ConfigError:  # reported by the check of the schedule
            spec = None
        checked(
            lambda: check_settings(self, schedule=spec, batch_size=self.batch_size),
            self.strategy,
            lambda: self.steering("min any/score"),
        )

    def run_settings(self, monitor: str | None) -> dict[str, Any]:
        """Return the keywords of `Run` for these settings. `monitor` is the recipe's metric, or
        None if nothing is evaluated.
        """
        settings = self.train_settings() | {"parallel": self.strategy()}
        if monitor is not None:
            settings |= self.steering(monitor)
        elif self.evaluate_every == type(self).evaluate_every:
            # nobody has asked for the interval of the recipe
            settings["evaluate_every"] = TrainSettings.evaluate_every
        return settings

    def strategy(self) -> Strategy:
        """Return the parallel strategy. Raises `ConfigError` for settings of `ddp` under `fsdp`,
        and the reverse.
        """
        return strategy_of(self.parallel, ddp=self.ddp, fsdp=self.fsdp)

    def steering(self, monitor: str) -> dict[str, Any]:
        """Return `best`, `early_stopping` and `plateau` for `Run`. The first metric of early
        stopping that is one of a split selects the best checkpoint, else the recipe's metric.
        """
        stopping, plateau = checked(
            lambda: self.early_stopping.spec(monitor), lambda: self.plateau.spec(monitor)
        )
        rules = rules_of(stopping)
        if plateau is not None:
            for rule in rules:
                refuse_end_before_reduction(plateau, rule)
        best = monitor
        for rule in rules:
            _, metric = parse_score(rule.monitor)
            if not is_of_training(metric, ()):
                best = rule.monitor
                break
        return {"best": best, "early_stopping": stopping, "plateau": plateau}


def note(text: str) -> None:
    """Print a message to standard error on rank 0, even before the ranks have connected."""
    if placed(os.environ).rank == 0:
        print(text, file=sys.stderr)
