"""What can be said of a run's settings before its data are read and its model is built: all that is wrong, at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from surefoot.activations import check_how
from surefoot.batching import batching
from surefoot.checkpoint.changes import change_names
from surefoot.checkpoint.store import check_keep
from surefoot.compiling import compiling
from surefoot.config import clipping
from surefoot.durations import every, planned, run_length, seconds
from surefoot.errors import ConfigError
from surefoot.optim.ema import check_decay
from surefoot.plateau import Plateau, refuse_end_before_reduction
from surefoot.precision import precision as chosen_precision
from surefoot.schedules.lr_schedule import Joined, Schedule
from surefoot.sinks.tracking.names import tracker_names
from surefoot.stopping import EarlyStopping
from surefoot.synchronised_norms import check_device
from surefoot.world import device_called

_SEEDS = 1 << 64
_MANY = 10_000  # steps in a pass, as long as nobody knows
_NOT_WRONG = {"out", "deterministic", "init", "parallel", "report", "check_state"}  # whatever their value


def check_settings(
    *,
    length: str,
    batch_size: int | str,
    seed: int = 0,
    micro_batch_size: int | str | None = None,
    schedule: Schedule | Joined | None = None,
    clip: str = "off",
    precision: str = "auto",
    compile: bool | str = False,
    activation_checkpointing: str = "off",
    checkpointed_blocks: Sequence[str] | None = None,
    sync_batch_norm: bool = False,
    device: str = "auto",
    workers: int = 0,
    log_every: str | None = None,
    evaluate_every: str | None = None,
    sample_every: str | None = None,
    save_every: str | None = None,
    compare_ranks_every: str | None = None,
    watch_every: str | None = None,
    trackers: str | Sequence[str] | None = None,
    keep: int = 1,
    keep_every: str | None = None,
    stop_after: str | None = None,
    time_limit: str | None = None,
    max_bad_steps: int = 0,
    ema: float | None = None,
    early_stopping: Any = None,
    plateau: Any = None,
    plateau_factor: float | None = None,
    accept_change: str | Sequence[str] | None = None,
    **others: Any,
) -> None:
    """Raise one `ConfigError` with everything that is wrong with settings of `surefoot.Run`, whatever it is to train.

    What depends on the size of the data (a length in epochs) is checked as far as that goes. `others` may be the settings of
    a recipe whose values cannot be wrong.
    """
    if strange := others.keys() - _NOT_WRONG:
        raise TypeError(f"check_settings() knows no {', '.join(sorted(strange))}")
    _refuse_types(schedule)
    problems: list[str] = []

    def check(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except ConfigError as problem:
            problems.append(str(problem))
            return None

    sizes = check(lambda: batching(batch_size, micro_batch_size))
    size = 1 if sizes is None or sizes.unit == "tokens" else sizes.batch_size
    samples = size * _MANY
    whole = check(lambda: planned(length, samples_per_epoch=samples, batch_size=size))
    if whole is not None:
        settings = {"log_every": log_every, "evaluate_every": evaluate_every, "sample_every": sample_every}
        settings |= {"keep_every": keep_every, "compare_ranks_every": compare_ranks_every, "watch_every": watch_every}
        for name, text in settings.items():
            check(partial(every, text, length=whole, setting=name))
        check(lambda: every(save_every, length=whole, time=True, setting="save_every"))
        known = run_length(length, samples_per_epoch=2 * samples, batch_size=size) == whole.steps
        if schedule is not None and known and "epoch" not in str(schedule.described()):
            check(lambda: schedule.resolved(whole))
    if stop_after is not None:
        check(lambda: planned(stop_after, samples_per_epoch=samples, batch_size=size, setting="stop_after"))
    if time_limit is not None:
        check(lambda: seconds(time_limit, setting="time_limit"))
    check(lambda: tracker_names(trackers))
    check(lambda: clipping(clip))
    check(lambda: compiling(compile))
    check(lambda: check_keep(keep))
    check(lambda: change_names(accept_change))
    if ema is not None:
        check(lambda: check_decay(ema))
    check(lambda: _check_plateau(plateau, plateau_factor, early_stopping))
    check(lambda: check_how(activation_checkpointing, checkpointed_blocks))
    place = check(lambda: device_called(device))
    if place is not None:
        check(lambda: chosen_precision(precision, place))
        if sync_batch_norm:
            check(lambda: check_device(place))
    wrong = {
        f"seed = {seed}: a number from 0 to 2**64 - 1": not 0 <= seed < _SEEDS,
        f"workers = {workers}: the number of processes that read samples, 0 or more": workers < 0,
        f"early_stopping = {early_stopping}: how many evaluations to wait, 1 or more": isinstance(early_stopping, int)
        and early_stopping < 1,
        f"max_bad_steps = {max_bad_steps}: how many bad steps in a row a run survives, 0 or more": max_bad_steps < 0,
    }
    problems += [problem for problem, found in wrong.items() if found]
    if problems:
        raise ConfigError("\n".join(problems))


def _check_plateau(plateau: Any, factor: float | None, early_stopping: Any) -> None:
    """Raise where the numbers of a configuration make no plateau, or one that could never lower a rate."""
    if factor is not None and plateau is None:
        raise ConfigError(
            f"plateau_factor = {factor} says nothing without a plateau\n  give its patience too: --plateau 3"
        )
    if isinstance(plateau, int):
        watch = "min any/score"  # which one, the recipe knows
        made = Plateau(watch, plateau) if factor is None else Plateau(watch, plateau, factor)
        if isinstance(early_stopping, int) and early_stopping >= 1:
            refuse_end_before_reduction(made, EarlyStopping(watch, early_stopping))


def _refuse_types(schedule: Any) -> None:
    """What a caller in Python may mistake; the command line knows types."""
    if schedule is not None and not isinstance(schedule, Schedule | Joined):
        raise ConfigError(f"schedule = {schedule!r} is no schedule: give surefoot.warmup_cosine(...) or the like")


def json_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they will be read from a checkpoint; `ConfigError` for what is no JSON."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"settings must be JSON, to be compared when the run goes on: {problem}") from problem
    return found
