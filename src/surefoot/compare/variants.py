"""The variants of a comparison: combinations of settings, and the name that each has as a directory and in a table."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, count, product
from typing import Any, Literal

from surefoot.errors import ConfigError
from surefoot.tracking.format import as_typed

Direction = Literal["min", "max"]  # of a score: which is better
_LONGEST = 80  # letters of a name: directories may have 255 bytes, tables less


@dataclass(frozen=True)
class Variant:
    """One run of a comparison, by its directory's name.

    `varied` are the settings that were asked to vary, `settings` all in which the runs are not alike, both by dotted name.
    Runs that differ in nothing but the seed are repeats, of one `group`.
    """

    name: str
    group: str
    varied: Mapping[str, Any]
    settings: Mapping[str, Any]


def grid(vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values, the last setting changing fastest.

    >>> grid({"optimizer.name": ["adamw", "sgd"], "optimizer.lr": [0.1, 0.2]})[1]
    {'optimizer.name': 'adamw', 'optimizer.lr': 0.2}
    >>> grid({})
    []
    """
    return [dict(zip(vary, values, strict=True)) for values in product(*vary.values())] if vary else []


def names(combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each combination of settings: short, its own, and fit for a directory anywhere.

    >>> names([{"optimizer.name": "adamw", "optimizer.lr": 0.001}, {"optimizer.name": "sgd", "optimizer.lr": 1e-1}])
    ['name=adamw,lr=0.001', 'name=sgd,lr=0.1']
    >>> names([{"optimizer.name": "adamw", "schedule.name": "wsd"}, {"data.path": "a/b"}])
    ['optimizer.name=adamw,schedule.name=wsd', 'path=a_b']
    >>> names([{"data.path": "a/b"}, {"data.path": "a:b"}, {}])
    ['path=a_b', 'path=a_b-2', 'base']
    """
    short = short_names({setting for combination in combinations for setting in combination})
    unique_names: list[str] = []
    for combination in combinations:
        plain = {name: re.sub(r"[^A-Za-z0-9_.+%-]+", "_", as_typed(value)) for name, value in combination.items()}
        text = ",".join(f"{short[name]}={value}" for name, value in plain.items()) or "base"
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST - 9]}-{sha256(text.encode()).hexdigest()[:8]}"
        others = (f"{text}-{number}" for number in count(2))  # two paths may be one text
        unique_names.append(next(name for name in chain([text], others) if name not in unique_names))
    return unique_names


def group_labels(variants: Sequence[Variant]) -> dict[str, str]:
    """A label for each group of repeats by its name: its settings without those that all groups share.

    Nothing is cut off. A variant that was not named by its settings (a trial, a run's directory) keeps its name. So do variants with equal
    labels.

    >>> settings = [{"schedule.name": "constant", "optimizer.lr": lr} for lr in (0.1, 0.2)]
    >>> group_labels([Variant(name, name, values, values) for name, values in zip(names(settings), settings)])
    {'name=constant,lr=0.1': 'lr=0.1', 'name=constant,lr=0.2': 'lr=0.2'}
    """
    groups = {variant.group: variant for variant in variants}
    varied = dict.fromkeys(setting for variant in variants for setting in variant.varied)
    apart = [name for name in varied if len({repr(_effective(variant, name)) for variant in groups.values()}) > 1]
    short, labels = short_names(apart), dict[str, str]()
    for group, variant in groups.items():
        own = [setting for setting in apart if setting in variant.varied] or apart
        text = ",".join(f"{short[setting]}={as_typed(_effective(variant, setting))}" for setting in own)
        labels[group] = text if text and variant.varied and "=" in group else group
    return {group: label if list(labels.values()).count(label) == 1 else group for group, label in labels.items()}


def run_labels(variants: Sequence[Variant]) -> dict[str, str]:
    """A label for the name of each single run; repeats have their seed behind it, as in their names."""
    labels = group_labels(variants)
    return {variant.name: labels[variant.group] + variant.name.removeprefix(variant.group) for variant in variants}


def _effective(variant: Variant, setting: str) -> Any:
    return variant.settings.get(setting, variant.varied.get(setting))


def short_names(settings: Iterable[str]) -> dict[str, str]:
    """Settings by their last part, as long as no two would be called the same.

    >>> short_names(["optimizer.lr", "optimizer.name", "schedule.name"])
    {'optimizer.lr': 'lr', 'optimizer.name': 'optimizer.name', 'schedule.name': 'schedule.name'}
    """
    known = list(settings)
    last = [setting.rpartition(".")[2] for setting in known]
    return {setting: leaf if last.count(leaf) == 1 else setting for setting, leaf in zip(known, last, strict=True)}


def flags(settings: Mapping[str, Any]) -> str:
    """Settings as they are typed.

    >>> flags({"optimizer.lr": 0.003, "schedule.warmup": "100 steps", "model.tie_embeddings": None})
    "--optimizer.lr 0.003 --schedule.warmup '100 steps' --model.tie-embeddings None"
    """
    words = []
    for setting, value in settings.items():
        words += [
            f"--{setting.replace('_', '-')}",
            *map(as_typed, value if isinstance(value, list | tuple) else [value]),
        ]
    return shlex.join(words)


def refuse_duplicates(combinations: Sequence[Mapping[str, Any]], all_settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` where two combinations come to the same settings (`all_settings`): one would be trained for nothing."""
    for index, (combination, settings) in enumerate(zip(combinations, all_settings, strict=True)):
        if settings in all_settings[:index]:
            same = flags(combination) or "that without further settings"
            raise ConfigError(f"two variants are the same: {same}\n  leave one of them out")


def refuse_baseline(baseline: str, labels: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a baseline that is not a variant; `labels` holds the label of each name."""
    if baseline in ("best", "first", *labels, *labels.values()):
        return
    there = ", ".join(list(labels.values())[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
    raise ConfigError(f"--baseline {baseline!r}: no variant of that name; there are: {there}\n  or: best, first")
