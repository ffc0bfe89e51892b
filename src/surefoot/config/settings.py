"""What every run has, whatever it trains."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from surefoot.config.strategy import Sharding, strategy_of
from surefoot.errors import ConfigError

Kind = Literal["norm", "value", "adaptive", "auto", "off"]
_KINDS: dict[str, Kind] = {"norm": "norm", "value": "value", "adaptive": "adaptive", "auto": "auto"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What every run has; a recipe's Config adds its parts. Durations are text with a unit."""

    preset: str | None = None
    """A complete configuration to start from; files and flags change it. Absent: the defaults."""
    out: str | None = None
    """Directory of the run; it goes on by itself where there is a checkpoint. Absent: nothing is written."""
    seed: int = 0
    """All randomness of the run comes from this number."""
    length: str
    """How long to train: "200 steps" or "30 epochs" (rounded up to a whole step)."""
    batch_size: int | str
    """Samples of one step, all micro-batches together; or "4096 tokens" with their padding, where samples differ in length."""
    micro_batch_size: int | str | None = None
    """Samples (or tokens) of one forward and backward pass; divides batch_size. Absent: the whole batch, of
    several processes batch_size / processes each."""
    clip: str = "norm 1.0"
    """Limit on the gradient: "norm 1.0" (of all), "value 0.5" (each number), "adaptive 0.01" (each unit), "auto 0.9" or "off"."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Number format of the passes; auto is bf16 on a CUDA device that computes in it, and on a CPU if a table of what was measured
    says that it is faster, else fp32. What it chose stays with the run. fp8 is bf16 with linear layers in 8 bits (extra `fp8`)."""
    compile: bool | Literal["auto"] = False
    """Compile the model with torch.compile; auto does if a table of what was measured says that it is faster. What it chose stays
    with the run."""
    activation_checkpointing: Literal["off", "blocks", "selective"] = "off"
    """What the backward pass computes again instead of keeping it: blocks, or (selective) all in them but the results of matrix
    products and attention. Saves memory, costs time, changes no bit."""
    checkpointed_blocks: tuple[str, ...] | None = None
    """Which modules are computed again, by name or class, such as "layers.*". Absent: the model's own repeated blocks."""
    sync_batch_norm: bool = False
    """On CUDA: batch normalisation over the micro-batches of all processes together; results then depend on how many there are."""
    device: str = "auto"
    """Where to train: "cpu", "cuda", "mps"; auto is the accelerator where there is one."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """How several processes work together; auto is ddp where there are several. fsdp spreads the model over them."""
    sharding: Sharding = dataclasses.field(default_factory=Sharding)
    nproc: int | str = 1
    """Processes on this machine that train together, or "1:4": as many as divide a step, and fewer where some died.
    Changes no result beyond rounding, where micro_batch_size is given; without it another number is another run."""
    max_restarts: int = 0
    """How often to start all processes again where one died; they go on from the newest checkpoint."""
    workers: int = 0
    """Processes that read samples; 0 reads them in the training process. Changes no result."""
    deterministic: bool = False
    """On CUDA: only kernels that give the same bits in every run, where there are such; slower."""
    log_every: str = "50 steps"
    """When a record is written; the one moment at which the host waits for the device."""
    evaluate_every: str = "1 epochs"
    """When the splits are scored; always after the last step too."""
    sample_every: str | None = None
    """When a sample is shown, besides the one at the end. Absent: only then."""
    save_every: str = "5 min"
    """When a checkpoint is written, in steps or time; always at the start and after the last step too."""
    watch_every: str | None = "200 steps"
    """Of which steps the gradient, weights and update of every layer are recorded, for diagnosis; such a step keeps its weights
    twice. Changes no result. None: of no step."""
    report: bool = True
    """Write report.html, a page on the run, into its directory whenever it ends."""
    check_state: bool = True
    """Pass the first micro-batch twice when the run begins, and refuse what changes then and no checkpoint holds. Changes no result."""
    compare_ranks_every: str = "1000 steps"
    """When the weights of several ranks are compared with each other (at the next record); a difference ends the run."""
    trackers: str | None = None
    """Experiment trackers to tell as well: wandb, mlflow, trackio, or several of them, "wandb,mlflow". Absent: none."""
    keep_last: int = 3
    """Newest checkpoints to keep, besides the first, the best and those of keep_every."""
    keep_every: str | None = None
    """Checkpoints to keep for good, such as "10%". Absent: none."""
    stop_after: str | None = None
    """End early without changing the schedule, to be resumed. Absent: train to the end."""
    time_limit: str | None = None
    """Save and end before this much time is over, such as "90 min". Absent: no limit."""
    max_bad_steps: int = 5
    """Steps in a row with a loss or gradient that is not finite, past which the run ends. That is noticed at the next
    record (log_every); the weights are those of the last good step whenever that is."""
    ema: float | None = None
    """Decay of averaged weights, which are then the ones evaluated, such as 0.999. Absent: none."""
    early_stopping: int | None = None
    """End after this many evaluations without a better score. Absent: never."""
    plateau: int | None = None
    """Lower the learning rate after this many evaluations without a better score. Absent: never."""
    plateau_factor: float | None = None
    """With plateau: what the learning rate is multiplied by. Absent: 0.5."""
    init: str | None = None
    """Weights to start from: a .safetensors file, a checkpoint, or a run. Absent: a fresh model."""


def clipping(text: Any) -> tuple[Kind, float]:
    """The kind and the number in "norm 1.0", "value 0.5", "adaptive 0.01", "auto 0.9" or "off" (no limit, so infinity).

    >>> clipping("norm 1.0"), clipping("off")
    (('norm', 1.0), ('off', inf))
    """
    match text.split() if isinstance(text, str) else []:
        case ["off"]:
            return "off", math.inf
        case ["norm" | "value" | "adaptive" | "auto" as kind, number]:
            try:
                most = float(number)
            except ValueError:
                most = math.nan
            if 0 < most < (1 if kind == "auto" else math.inf):
                return _KINDS[kind], most
    if (limit := _alone(text)) is not None:
        typed = f'--clip "norm {limit}"' if isinstance(text, str) else f'clip="norm {limit}"'
        raise ConfigError(
            f"clip = {text!r} does not say what it is a limit of\n  try: {typed}, a limit on the norm of the whole gradient"
        )
    raise ConfigError(
        f"clip = {text!r} is no limit on the gradient\n"
        "  write it as 'norm 1.0' (of all of it), 'value 0.5' (of each number), 'adaptive 0.01' (of each unit, as a fraction\n"
        "  of its weights), 'auto 0.9' (of all of it, that quantile of the last 100 norms) or 'off'"
    )


def _alone(given: Any) -> float | None:
    """The number above 0 that was given without a kind, as a number or as text."""
    try:
        number = float(given)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < math.inf and not isinstance(given, bool) else None


def run_arguments(config: Settings) -> dict[str, Any]:
    """What `surefoot.Run` takes of a recipe's configuration: the settings that every run has, by name, but the preset's.

    `early_stopping` and `plateau` are here numbers of evaluations to wait. Which score that is about only the recipe knows, so
    where they are not None the recipe must put an `EarlyStopping` and a `Plateau` (with `plateau_factor`) in their place.

    >>> run_arguments(Settings(length="2 epochs", batch_size=8))["batch_size"]
    8
    """
    elsewhere = ("preset", "plateau_factor", "parallel", "sharding", "nproc", "max_restarts")
    own = [field.name for field in dataclasses.fields(Settings) if field.name not in elsewhere]
    return {name: getattr(config, name) for name in own} | {"parallel": strategy_of(config.parallel, config.sharding)}
