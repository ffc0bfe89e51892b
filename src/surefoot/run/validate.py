"""The validation of a run's settings before its data and model are built."""

from collections.abc import Callable

from surefoot.config.averaging import OF_AVERAGE
from surefoot.config.batch_size import batching
from surefoot.config.durations import planned
from surefoot.config.extras import trackers_of
from surefoot.config.ramps import check_batch_sizes, first_value
from surefoot.config.train_settings import TrainSettings, problems_of
from surefoot.distributed.world import device_called
from surefoot.errors import ConfigError, Setting, SurefootError, together
from surefoot.schedules.joined import AnySchedule
from surefoot.train.precision import precision as chosen_precision

_MANY = 10_000  # assumed steps per epoch before the data size is known


def check_settings(
    settings: TrainSettings, *, schedule: AnySchedule | None, batch_size: int | str | None
) -> None:
    """Raise one `ConfigError` with all problems of a run's settings that do not depend on the size
    of the data.

    `batch_size` is the setting, or the batch size of a `DataLoader`.
    """
    by_setting = problems_of(settings)
    wrong = set(by_setting)
    problems: list[SurefootError] = [*by_setting.values()]

    def check(*names: str, by: Callable[[], object]) -> None:
        if wrong.isdisjoint(names):
            try:
                by()
            except ConfigError as problem:
                problems.append(problem)

    check("batch_size", by=lambda: check_batch_sizes(batch_size, settings.micro_batch_size))
    check("length", by=lambda: _check_length(settings, schedule, batch_size))
    check("trackers", by=lambda: trackers_of(settings.trackers, out=settings.run_dir))
    if settings.tensorboard is True and settings.run_dir is None:
        problems.append(
            ConfigError(
                "tensorboard-without-directory",
                problem="tensorboard = True: its files are in the run directory, and this run has"
                " none",
                remedy=Setting("run_dir", "DIR"),
                setting="tensorboard",
                value=True,
            )
        )
    if settings.text_log and settings.run_dir is None:
        problems.append(
            ConfigError(
                "text-log-without-directory",
                problem="text_log = True: log.txt is in the run directory, and this run has none",
                remedy=Setting("run_dir", "DIR"),
                setting="text_log",
                value=True,
            )
        )
    how = settings.activation_checkpointing
    blocks = settings.activation_checkpointing_modules
    if how != "off" or blocks is not None:
        from surefoot.train.activation_checkpointing import check_how

        check(
            "activation_checkpointing",
            "activation_checkpointing_modules",
            by=lambda: check_how(how, blocks),
        )
    check("device", by=lambda: device_called(settings.device))
    check(
        "device",
        "precision",
        by=lambda: chosen_precision(settings.precision, device_called(settings.device)),
    )
    problems += _unused_averaging(settings)
    if problems:
        # several checks need a device
        different = {str(problem): problem for problem in problems}
        raise together([*different.values()])


def _unused_averaging(settings: TrainSettings) -> list[ConfigError]:
    if settings.ema is not None:
        return []
    unused = []
    for name in OF_AVERAGE:
        value = getattr(settings, name)
        if value != getattr(TrainSettings, name):
            problem = ConfigError(
                "average-setting-without-average",
                problem=f"{name} = {value!r} has no effect: ema is None, so no weights are averaged",
                remedy=[Setting("ema", 0.999), ("leave out", Setting(name))],
                setting=name,
                value=value,
            )
            unused.append(problem)
    return unused


def _check_length(
    settings: TrainSettings, schedule: AnySchedule | None, batch_size: int | str | None
) -> None:
    try:
        first = first_value(batch_size, setting="batch_size")
        sizes = batching(first, settings.micro_batch_size)
    except ConfigError:  # reported by the check of batch_size
        return
    size = 1 if sizes.unit == "tokens" else sizes.batch_size
    length = planned(settings.length, samples_per_epoch=size * _MANY, batch_size=size)
    of_more_data = planned(settings.length, samples_per_epoch=2 * size * _MANY, batch_size=size)
    is_known = length.steps == of_more_data.steps
    if isinstance(schedule, AnySchedule) and is_known and "epoch" not in str(schedule.to_dict()):
        schedule.resolved(length)
