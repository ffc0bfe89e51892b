"""Settings with several values, which hold one after another: "64, 128 from 20%". Imports no
torch.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from surefoot.config.batch_size import batching
from surefoot.config.durations import Length, in_steps
from surefoot.config.mixture_weights import WEIGHTS, weight_of
from surefoot.config.setting_change import SettingChange
from surefoot.errors import ConfigError, Remedy, Setting

_STEP = re.compile(r"(.+?)\s+from\s+(.+)", re.IGNORECASE)
_IS_RAMP = re.compile(r"\sfrom\s", re.IGNORECASE)
_ANY_LENGTH = Length(steps=10_000, samples_per_epoch=10_000, batch_size=1)


@dataclass(frozen=True)
class Ramp:
    """The values of a setting over a run: the first one, and later ones, each with the duration
    after which it begins.

    text: the setting as it stands in the journal, as the reason for its changes.
    """

    first: Any
    then: tuple[tuple[Any, str], ...]
    text: str


def ramp_of(value: Any, *, setting: str) -> Ramp | None:
    """Return the values of a setting over a run, or None for a single value. Raises `ConfigError`
    for a text that has "from" and is no such list.

    >>> ramp_of("64, 128 from 20%", setting="batch_size")
    Ramp(first=64, then=((128, '20%'),), text='64, 128 from 20%')
    >>> ramp_of("norm 1.0", setting="clip")
    """
    if not isinstance(value, str) or not _IS_RAMP.search(value):
        return None
    first, *later = (" ".join(part.split()) for part in value.split(","))
    then = []
    for part in later:
        match = _STEP.fullmatch(part)
        if match is None:
            raise _not_a_ramp(value, setting)
        in_steps(match[2], length=_ANY_LENGTH, setting=f"{setting} from")
        then.append((_value(match[1], setting), match[2]))
    if not first or _IS_RAMP.search(f"{first} ") or not then:
        raise _not_a_ramp(value, setting)
    return Ramp(_value(first, setting), tuple(then), ", ".join([first, *later]))


def first_value(value: Any, *, setting: str) -> Any:
    """Return the value of a setting at the beginning of a run.

    >>> first_value("64, 128 from 20%", setting="batch_size"), first_value(32, setting="batch_size")
    (64, 32)
    """
    ramp = ramp_of(value, setting=setting)
    return value if ramp is None else ramp.first


def of_each_value(check: Callable[..., Any]) -> Callable[..., None]:
    """Return a check of a setting that may have several values over a run."""

    def check_each(value: Any, *, setting: str) -> None:
        ramp = ramp_of(value, setting=setting)
        if ramp is None:
            check(value, setting=setting)
            return
        for each in [ramp.first, *(later for later, _ in ramp.then)]:
            check(each, setting=setting)

    return check_each


def check_batch_sizes(batch_size: Any, micro_batch_size: int | str | None) -> None:
    """Raise `ConfigError` for sizes that no step can have. What follows from a later size is the
    micro-batch size.
    """
    ramp = ramp_of(batch_size, setting="batch_size")
    if ramp is None:
        batching(batch_size, micro_batch_size)
        return
    sizes = [batching(ramp.first, micro_batch_size)]
    for size, _ in ramp.then:
        sizes.append(batching(size, None))
    if any(size.unit == "tokens" for size in sizes):
        raise ConfigError(
            "ramp-in-tokens",
            problem=f"batch_size = {batch_size!r}: the values of a ramp are in samples",
            reason="how many steps a batch in tokens makes of an epoch depends on the samples",
            remedy="change it on the way: surefoot change RUN batch_size=...",
            setting="batch_size",
            value=batch_size,
        )


def is_of_mixture(setting: str) -> bool:
    """Return True for the weight of a data set, which a line of the journal has with the others."""
    return setting.startswith(f"{WEIGHTS}.")


def reason_of(setting: str, ramp: Ramp) -> str:
    """Return the reason for the changes of a ramp. That of several weights has a part for each.

    >>> reason_of("train_data.weights.web", Ramp(0.8, ((0.5, "50%"),), "0.8, 0.5 from 50%"))
    'web: 0.8, 0.5 from 50%'
    """
    if is_of_mixture(setting):
        return f"{setting.removeprefix(f'{WEIGHTS}.')}: {ramp.text}"
    return ramp.text


def ramps_of(change: SettingChange) -> dict[str, Ramp]:
    """Return the ramps of whose values a line of the journal has one, by their settings; {} for a
    change that was not known from the start.
    """
    texts = {change.setting: change.because}
    values = {change.setting: change.now}
    if change.setting == WEIGHTS:
        parts = [part.rpartition(": ") for part in change.because.split("; ")]
        texts = {f"{WEIGHTS}.{name}": text for name, _, text in parts}
        values = {f"{WEIGHTS}.{name}": weight for name, weight in change.now.items()}
    ramps = {}
    for setting, text in texts.items():
        ramp = None
        with suppress(ConfigError):  # a reason that only looks like one
            ramp = ramp_of(text, setting=setting)
        if ramp is not None and values.get(setting) in [value for value, _ in ramp.then]:
            ramps[setting] = ramp
    return ramps


def _value(text: str, setting: str) -> Any:
    """Return the weight of a data set, another whole number, or a text."""
    if is_of_mixture(setting):
        return weight_of(text, setting=setting)
    return int(text) if re.fullmatch(r"[0-9]+(_[0-9]+)*", text) else text


def _not_a_ramp(value: str, setting: str) -> ConfigError:
    remedy: Remedy = Setting(setting, "64, 128 from 20%")
    if setting == "clip":
        remedy = Setting(setting, "norm 1.0, off from 50%")
    elif is_of_mixture(setting):
        remedy = 'write the weight as "0.8, 0.5 from 50%"'
    return ConfigError(
        "ramp-not-understood",
        problem=f"{setting} = {value!r} is no list of values, each but the first with a step",
        remedy=remedy,
        setting=setting,
        value=value,
    )
