"""The variants of a comparison: combinations of settings, and their names in directories and
tables.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, product
from typing import Any, Literal

from surefoot.errors import ConfigError
from surefoot.tracking.format import as_typed

Direction = Literal["min", "max"]
_LONGEST = 80  # characters of a name: a directory's name may have 255 bytes, a table's column fewer


@dataclass(frozen=True)
class Variant:
    """A run of a comparison; `name` is the name of its directory.

    `varied` holds the settings that the user varied, `settings` all settings that differ between
    runs, both by dotted name. Runs that differ only in the seed are repeats; they share a `group`.
    """

    name: str
    group: str
    varied: Mapping[str, Any]
    settings: Mapping[str, Any]


def grid(vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of the values; the last setting changes fastest.

    >>> grid({"optimizer.name": ["adamw", "sgd"], "optimizer.lr": [0.1, 0.2]})[1]
    {'optimizer.name': 'adamw', 'optimizer.lr': 0.2}
    >>> grid({})
    []
    """
    if not vary:
        return []
    return [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]


def names(combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a short and unique name for each combination of settings, valid as a directory name on
    every system.

    >>> names([{"optimizer.name": name, "optimizer.lr": 0.001} for name in ("adamw", "sgd")])
    ['name=adamw,lr=0.001', 'name=sgd,lr=0.001']
    >>> names([{"optimizer.name": "adamw", "schedule.name": "wsd"}, {"data.path": "a/b"}])
    ['optimizer.name=adamw,schedule.name=wsd', 'path=a_b']
    >>> names([{"data.path": "a/b"}, {"data.path": "a:b"}, {}])
    ['path=a_b', 'path=a_b-2', 'base']
    """
    short = short_names(set(chain.from_iterable(combinations)))
    unique_names: list[str] = []
    for combination in combinations:
        pairs = []
        for setting, value in combination.items():
            plain = re.sub(r"[^A-Za-z0-9_.+%-]+", "_", as_typed(value))
            pairs.append(f"{short[setting]}={plain}")
        text = ",".join(pairs) or "base"
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST - 9]}-{sha256(text.encode()).hexdigest()[:8]}"
        name = text
        number = 1
        while name in unique_names:  # two paths may give the same text
            number += 1
            name = f"{text}-{number}"
        unique_names.append(name)
    return unique_names


def group_labels(variants: Sequence[Variant]) -> dict[str, str]:
    """Map the name of each group of repeats to a label: its settings without the settings that all
    groups share.

    A variant keeps its name if the name does not list settings (a trial, a run's directory) or if
    its label is not unique.

    >>> settings = [{"schedule.name": "constant", "optimizer.lr": lr} for lr in (0.1, 0.2)]
    >>> group_labels(
    ...     [Variant(name, name, values, values) for name, values in zip(names(settings), settings)]
    ... )
    {'name=constant,lr=0.1': 'lr=0.1', 'name=constant,lr=0.2': 'lr=0.2'}
    """
    groups = {variant.group: variant for variant in variants}
    varied: dict[str, None] = {}
    for variant in variants:
        varied |= dict.fromkeys(variant.varied)
    unlike = []  # the settings that differ between groups
    for setting in varied:
        values = {repr(_effective(variant, setting)) for variant in groups.values()}
        if len(values) > 1:
            unlike.append(setting)
    short = short_names(unlike)
    labels = {}
    for group, variant in groups.items():
        listed = [setting for setting in unlike if setting in variant.varied] or unlike
        pairs = [f"{short[name]}={as_typed(_effective(variant, name))}" for name in listed]
        labels[group] = ",".join(pairs) if pairs and variant.varied and "=" in group else group
    counts = Counter(labels.values())
    return {group: label if counts[label] == 1 else group for group, label in labels.items()}


def run_labels(variants: Sequence[Variant]) -> dict[str, str]:
    """Map the name of each run to a label; labels of repeats end with the seed."""
    labels = group_labels(variants)
    return {
        variant.name: labels[variant.group] + variant.name.removeprefix(variant.group)
        for variant in variants
    }


def _effective(variant: Variant, setting: str) -> Any:
    return variant.settings.get(setting, variant.varied.get(setting))


def short_names(settings: Iterable[str]) -> dict[str, str]:
    """Map each setting to its last part, or to its full name if several settings share the last
    part.

    >>> short_names(["optimizer.lr", "optimizer.name", "schedule.name"])
    {'optimizer.lr': 'lr', 'optimizer.name': 'optimizer.name', 'schedule.name': 'schedule.name'}
    """
    last_parts = {setting: setting.rpartition(".")[2] for setting in settings}
    counts = Counter(last_parts.values())
    return {setting: last if counts[last] == 1 else setting for setting, last in last_parts.items()}


def flags(settings: Mapping[str, Any]) -> str:
    """Format settings as command-line flags.

    >>> flags({"optimizer.lr": 0.003, "schedule.warmup": "100 steps", "model.tie_embeddings": None})
    "--optimizer.lr 0.003 --schedule.warmup '100 steps' --model.tie-embeddings None"
    """
    words = []
    for setting, value in settings.items():
        words.append(f"--{setting.replace('_', '-')}")
        if isinstance(value, list | tuple):
            words += [as_typed(item) for item in value]
        else:
            words.append(as_typed(value))
    return shlex.join(words)


def refuse_duplicates(
    combinations: Sequence[Mapping[str, Any]], all_settings: Sequence[Mapping[str, Any]]
) -> None:
    """Raise `ConfigError` if two combinations give the same settings; `all_settings` holds the
    settings of each combination.
    """
    for index, (combination, settings) in enumerate(zip(combinations, all_settings, strict=True)):
        if settings in all_settings[:index]:
            same = flags(combination) or "the one without varied settings"
            raise ConfigError(
                "variants-equal",
                problem=f"two variants have the same settings: {same}",
                remedy="remove one variant",
                settings=dict(combination),
            )


def refuse_baseline(baseline: str, labels: Mapping[str, str]) -> None:
    """Raise `ConfigError` if the baseline is not a variant; `labels` maps names to labels."""
    if baseline in ("best", "first", *labels, *labels.values()):
        return
    there = ", ".join(list(labels.values())[:6])
    more = f" and {len(labels) - 6} more" if len(labels) > 6 else ""
    raise ConfigError(
        "baseline-unknown",
        problem=f"baseline = {baseline!r}: no variant has this name",
        remedy=f"choose from {there}{more}, or: best, first",
        setting="baseline",
        value=baseline,
    )
