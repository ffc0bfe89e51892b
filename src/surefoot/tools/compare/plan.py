"""The plan of a comparison in compare.toml, written before any training and read by each session
that continues it.

The file has the settings of the first variant in the form of a config.toml, then [program] and
[comparison] with the variants.
"""

import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomlkit

from surefoot.config.keywords import parse_score
from surefoot.config.paths import read_regular
from surefoot.config.toml import origins, program, to_toml, values
from surefoot.config.user_code import refuse_unresolved
from surefoot.errors import ConfigError, Setting
from surefoot.tools.compare.variants import Direction, Variant, flags
from surefoot.tracking.format import as_typed

FILE = "compare.toml"
_TABLE = "comparison"
_OPTIONAL = ("target", "metric", "baseline", "search", "found")


@dataclass(frozen=True)
class Planned:
    """The plan of a comparison.

    `base` holds the settings of all runs by dotted name; `origins` holds the source of each
    setting. `threads` per run are part of the plan because results depend on them bit for bit.
    Relative paths start at `started_in`. `metric` is "min SPLIT/METRIC" if it differs from the
    monitored metric of the runs. `found` holds facts from building one run: `score`, `splits`, and
    the automatic choices of `precision` (with the reason in `chosen`) and `compile`.
    """

    program: Mapping[str, Any]
    base: Mapping[str, Any]
    origins: Mapping[str, str]
    variants: Sequence[Variant]
    threads: int
    started_in: str
    target: float | None = None
    metric: str | None = None
    baseline: str = "best"
    search: Mapping[str, Any] | None = None
    found: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]

    @property
    def settled(self) -> dict[str, Any]:
        """The automatic choices of precision and compilation, as settings of all runs."""
        choices = {}
        if "chosen" in self.found and self.base.get("precision") == "auto":
            choices["precision"] = self.found["precision"]
        if "compile" in self.found and self.base.get("compile") == "auto":
            choices["compile"] = self.found["compile"]
        return choices

    @property
    def watch(self) -> tuple[Direction, str] | None:
        """The direction and name of the metric that ranks the variants; None without a metric."""
        score = self.metric or self.found.get("score")
        return None if score is None else parse_score(score)

    def settings(self, name: str) -> dict[str, Any]:
        """Return the settings of a variant; the common settings of all runs if no variant has that
        name.
        """
        settings = dict(self.base)
        for variant in self.variants:
            if variant.name == name:
                settings |= variant.settings
        return settings


def to_text(plan: Planned, config: Any) -> str:
    """Serialize a plan to TOML; `config` has the values of `plan.base`."""
    known = {}
    for name in ("threads", "started_in", *_OPTIONAL):
        value = getattr(plan, name)
        if value is not None:
            known[name] = value
    table = _toml(known)
    rows = tomlkit.aot()
    rows.extend(_toml(vars(variant)) for variant in plan.variants)
    table.add("variants", rows)
    document = tomlkit.document()
    document.add(_TABLE, table)
    head = "# the plan of a comparison; the same command, or `surefoot compare` with this directory, continues it\n"
    return head + to_toml(config, plan.origins, plan.program) + "\n" + tomlkit.dumps(document)


def from_text(text: str, *, where: str) -> Planned:
    """Parse a plan from the text of `to_text`; raise `ConfigError` for any other text."""
    try:
        table: Any = tomllib.loads(text)[_TABLE]
        program_table = program(text, where=where)
        settings = values(text, where=where)
        base = {key: value for key, value in settings.items() if not key.startswith(f"{_TABLE}.")}
        plan = Planned(
            program=program_table,
            base=base,
            origins=origins(text),
            variants=[Variant(**_plain(row)) for row in table["variants"]],
            threads=table["threads"],
            started_in=str(table["started_in"]),
            **{name: _plain(table[name]) for name in _OPTIONAL if name in table},
        )
    except (TypeError, KeyError, tomllib.TOMLDecodeError) as problem:
        raise _not_a_plan(where, problem) from problem
    refuse_unresolved(Path(plan.started_in), file=where)  # user code is imported from there
    return plan


def read(directory: Path) -> Planned | None:
    """Read the plan in a comparison's directory; return None if the directory has no plan."""
    path = directory / FILE
    try:
        return from_text(read_regular(path).decode(), where=str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as problem:
        raise _not_a_plan(str(path), problem) from problem


def _not_a_plan(where: str, problem: Exception) -> ConfigError:
    return ConfigError(
        "comparison-plan-damaged",
        problem=f"{where} is not a plan of a comparison; missing or damaged: {problem}",
        path=where,
    )


def continue_plan(old: Planned, new: Planned, *, where: Path, threads_given: bool) -> Planned:
    """Return the plan that continues `old`, with the additional variants of `new`. The plan keeps
    the threads of `old`.

    Raises `ConfigError` if `new` is another comparison, or if the threads differ and
    `threads_given` is true.
    """
    problems = _of_program(old.program, new.program)
    if threads_given and new.threads != old.threads:
        problems.append(
            f"threads was {old.threads}, now {new.threads}: results depend on it bit for bit"
        )
    if (old.search is None) != (new.search is None):
        problems.append("only one of the two comparisons is a search")
    elif old.search is not None and new.search is not None:
        for name in ("space", "sampler", "pruner", "seed"):
            if old.search[name] != new.search[name]:
                problems.append(f"the {name} of the search differs")
        problems += _of_settings(old.base, new.base)
    else:
        for name in old.names:
            if name in new.names:
                problems += _of_settings(old.settings(name), new.settings(name))
            else:
                problems.append(f"{name} is no longer among the variants")
    if problems:
        differences = list(dict.fromkeys(problems))
        raise ConfigError(
            "comparison-differs",
            problem=f"{where} contains a different comparison",
            reason="\n".join(some_of(differences)),
            remedy=("another directory:", Setting("out", "DIR")),
            path=where,
            differences=differences,
        )
    if old.search is None:
        return replace(new, threads=old.threads, started_in=old.started_in, found=old.found)
    metric = new.metric or old.metric  # the metric that the search optimizes
    return replace(old, target=new.target, metric=metric, baseline=new.baseline, search=new.search)


def automatic_choices(facts: Mapping[str, Any], *, settings: Container[str]) -> list[str]:
    """Return a line per automatic choice in a plan's `facts`, with the flag that fixes the choice
    if the flag is among `settings`.

    >>> automatic_choices({"precision": "bf16", "chosen": "1.3 times as fast as fp32"}, settings=())
    ['precision: bf16, chosen once for all runs (1.3 times as fast as fp32); another machine may choose differently']
    >>> automatic_choices({"precision": "fp32", "compile": False}, settings={"compile"})
    ['compile: False, chosen once for all runs; another machine may choose differently; --compile False keeps it']
    """
    lines = []
    if "chosen" in facts:
        choice = name = facts["precision"]
        fixed = ""
        if facts.get("channels_last", False):
            choice += ", channels last"
        elif "precision" in settings:
            fixed = f"; --precision {name} keeps it"
        lines.append(
            f"precision: {choice}, chosen once for all runs ({facts['chosen']});"
            f" another machine may choose differently{fixed}"
        )
    if "compile" in facts:
        fixed = f"; --compile {facts['compile']} keeps it" if "compile" in settings else ""
        lines.append(
            f"compile: {facts['compile']}, chosen once for all runs; another machine may choose differently{fixed}"
        )
    return lines


def some_of(lines: list[str]) -> list[str]:
    """Return the first three lines, and a line with the number of the others."""
    if len(lines) <= 3:
        return lines
    return [*lines[:3], f"... and {len(lines) - 3} more"]


def _of_program(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed == ["sha256"]:
        return [f"{now['path']} has changed since the comparison started"]
    return [f"{name} was {before.get(name)}, now {now.get(name)}" for name in changed]


def _of_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in {**before, **now}:
        old = before.get(name)
        new = now.get(name)
        # compared as text, because a list in a file is a tuple in a configuration
        if name != "run_dir" and as_typed(old) != as_typed(new):
            lines.append(f"was {flags({name: old})}, now {flags({name: new})}")
    return lines


def _toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        table = tomlkit.table()
        table.update({name: _toml(entry) for name, entry in value.items()})
        return table
    if value is None:  # TOML has no null
        return "None"
    return list(value) if isinstance(value, tuple) else value


def _plain(table: Any) -> Any:
    if isinstance(table, dict):
        return {name: _plain(value) for name, value in table.items()}
    return None if table == "None" else table
