"""The run settings that findings depend on, and the flag or code that changes each setting."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.config.averaging import Averaging, averaging_of
from surefoot.config.train_settings import TrainSettings, clipping
from surefoot.errors import ConfigError
from surefoot.optim.optimizers import OPTIMIZERS
from surefoot.tracking.format import as_typed
from surefoot.tracking.run_reader import Standing

_FAR_ABOVE_USUAL = 10.0  # times the usual rate; from there on a tenth of a rate is no remedy
_USUAL_RATE = 1e-2  # of an optimizer that surefoot does not have
_NESTED = ("optimizer", "schedule", "model", "data", "augmentation")


@dataclass(frozen=True)
class RunDescription:
    """The settings of a run. Unknown settings are None.

    `identity` is compared at a resume (state.json). `written` has settings by dotted name, as in
    config.toml. `program` is "recipe", "file" or "script", and determines the form of a setting.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    program: str = "script"
    kinds: Mapping[str, str] = field(default_factory=dict)  # the class of each module by its name
    standing: Standing = "unknown"
    name: str = "RUN"  # the directory in the form for `surefoot resume`
    processors: int | None = None
    memory_bytes: int | None = None  # the machine's memory
    saved_step: int = 0  # step of the newest checkpoint, which may be ahead of the records
    keeps_best: bool = True
    monitored: tuple[str, str] | None = (
        None  # direction and name of the score that chooses the best checkpoint
    )

    @property
    def steps(self) -> int | None:
        return _parse_number(self.identity.get("length"))

    @property
    def schedule_steps(self) -> int | None:
        return _parse_number(self.identity.get("schedule_of_steps")) or self.steps

    @property
    def shape(self) -> str | None:
        shape = _mapping(self.identity.get("schedule")).get("shape")
        return shape if isinstance(shape, str) else None

    @property
    def warmup(self) -> int:
        """The number of warm-up steps, or 0 if unknown."""
        schedule = _mapping(self.identity.get("schedule"))
        while "first" in schedule:
            schedule = _mapping(schedule["first"])
        return _parse_number(schedule.get("warmup")) or 0

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The name and settings of the optimizer (of the first model if there are several)."""
        optimizer = _mapping(self.identity.get("optimizer"))
        return optimizer if "name" in optimizer else _mapping(next(iter(optimizer.values()), {}))

    @property
    def optimizer_count(self) -> int:
        optimizer = _mapping(self.identity.get("optimizer"))
        return 1 if "name" in optimizer else len(optimizer)

    @property
    def lr(self) -> float | None:
        rate = self.optimizer.get("lr")
        return float(rate) if isinstance(rate, int | float) else None

    @property
    def clip(self) -> tuple[str, float] | None:
        """The kind and limit of gradient clipping."""
        try:
            return clipping(self.identity.get("clip"))
        except ConfigError:
            return None

    @property
    def averaging(self) -> Averaging | None:
        """How the evaluated weights are averaged; None without `ema`."""
        return averaging_of(self.identity)

    @property
    def batch_size(self) -> int | None:
        """Samples or tokens per step."""
        return _parse_number(self.identity.get("batch_size"))

    @property
    def samples(self) -> int | None:
        """Samples per epoch."""
        data = _mapping(self.identity.get("data"))
        return _parse_number(_mapping(data.get("plan")).get("samples")) or _parse_number(
            data.get("samples")
        )

    @property
    def workers(self) -> int:
        """The number of data loader processes, or 0 if unknown."""
        return _parse_number(self.written.get("workers")) or 0

    @property
    def label_smoothing(self) -> float:
        """The label smoothing of the training loss, or 0."""
        named = [*_named(self.identity.get("identity")), *self.written.items()]
        values = (value for name, value in named if name.rpartition(".")[2] == "label_smoothing")
        return max(
            (float(value) for value in values if isinstance(value, int | float)), default=0.0
        )

    @property
    def max_bad_steps(self) -> int:
        """The allowed number of consecutive skipped steps."""
        limit = _parse_number(self.identity.get("max_bad_steps"))
        return TrainSettings.max_bad_steps if limit is None else limit

    def present(self, name: str) -> Any:
        """Return the value of a setting by its dotted name, or None if unknown."""
        warmup = f"{self.warmup} steps" if self.identity.get("schedule") else None
        nested = {"schedule.warmup": warmup, "schedule.name": self.shape} | {
            f"optimizer.{key}": value for key, value in {**self.optimizer, "lr": self.lr}.items()
        }
        if name in nested or name.startswith("optimizer."):
            return nested.get(name)
        written = self.written.get(name)
        return self.identity.get(name) if written is None and "." not in name else written

    @property
    def in_shell(self) -> str:
        """The run's path as it is typed on a command line."""
        return shlex.quote(self.name)

    @property
    def rate_test(self) -> str:
        """The command or code for a learning-rate test from step 0. A finished run has no next
        steps to test.
        """
        in_script = (
            "print(sf.tune.find_lr(run)) in the script that builds the run, with a new run_dir"
        )
        return (
            in_script
            if self.program == "script"
            else f"surefoot find-lr {self.in_shell} --checkpoint 0"
        )

    def go_on(self, length: str = "") -> str:
        """Return the command or code that continues the run or extends the run to `length`. A
        script is started again.
        """
        return (
            "run its script again" + (f" with Run(length={length!r})" if length else "")
            if self.program == "script"
            else f"surefoot resume {self.in_shell}" + (f' --length "{length}"' if length else "")
        )

    def replay(self, step: int | str) -> str:
        return self._typed_or_called(
            f"replay {self.in_shell} --step {step}", f"load(run).replay({step})"
        )

    def evaluate_best(self, score: str) -> str:
        """Return the command or code that evaluates the best checkpoint, or the setting that keeps
        one by `score`.
        """
        if not self.keeps_best:
            return self.typed("best", f"min {score}")
        return self._typed_or_called(
            f"evaluate {self.in_shell} --checkpoint best", 'load(run).evaluate(checkpoint="best")'
        )

    def profile(self) -> str:
        return self._typed_or_called(f"profile {self.in_shell}", "profile.measure(run)")

    def _typed_or_called(self, command: str, call: str) -> str:
        script = f"print(sf.{call}) in the script that builds the run"
        return script if self.program == "script" else f"surefoot {command}"

    @property
    def lr_in_text(self) -> str:
        """The value of the learning rate, as text that follows "the learning rate"."""
        return "" if self.lr is None else f", {self.lr:g},"

    def lr_divided(self, by: float, *, digits: int = 3, otherwise: str = "") -> str:
        """Return the flag or code for the base learning rate divided by `by`, or for the usual rate
        of the optimizer if that would still be far above it; return `otherwise` if the base is
        unknown.
        """
        if not self.lr:
            return otherwise
        rate = self.lr / by
        declared = OPTIMIZERS.get(str(self.optimizer.get("name")).lower())
        usual = _USUAL_RATE if declared is None else declared.first_run[0]
        if by > 1 and rate > _FAR_ABOVE_USUAL * usual:
            rate = usual
        return self.typed("optimizer.lr", float(f"{rate:.{digits}g}"))

    def typed(self, name: str, value: Any) -> str:
        """Return the flag or code that sets a setting to another value, with a note of the current
        value.

        >>> RunDescription(
        ...     program="recipe", identity={"optimizer": {"name": "adamw", "lr": 3e-3}}
        ... ).typed("optimizer.lr", 3e-4)
        '--optimizer.lr 0.0003 (now 0.003)'
        >>> RunDescription(identity={"batch_size": 8}).typed("batch_size", 64)
        'Run(batch_size=64) (now 8)'
        """
        now = self.present(name)
        note = "" if now is None else f" (now {as_typed(now)})"
        leaf = name.rpartition(".")[2]
        flag = (
            name
            if self.program == "recipe" or name in self.written
            else leaf
            if leaf in self.written
            else None
        )
        if flag is not None and self.program != "script":
            quote = '"' * (" " in as_typed(value))
            return f"--{flag.replace('_', '-')} {quote}{as_typed(value)}{quote}{note}"
        if name.startswith("optimizer."):
            return f"{self.optimizer.get('name', 'the optimizer')}({leaf}={value!r}){note}"
        if name == "schedule.name":
            return f"a {value} schedule{note}"
        if name.partition(".")[0] in _NESTED:
            return f"{leaf}={value!r} for the {name.partition('.')[0]}{note}"
        return f"Run({name}={value!r}){note}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_number(value: Any) -> int | None:
    match = re.fullmatch(r"(\d+)(?: \w+)?", str(value))
    return int(match[1]) if match and not isinstance(value, bool) else None


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    for name, setting in _mapping(value).items():
        yield name, setting
        yield from _named(setting)


_LINE = re.compile(r"( *)\((\w+(?:-\w+)?)\): (?:(\d+) x )?(\w+)\(")


def kinds_of_modules(printed: str) -> dict[str, str]:
    """Map each module's dotted name to its class, from the `repr` of a model. The model's name is
    "".

    >>> kinds_of_modules(
    ...     "Net(\\n  (act): ReLU()\\n  (blocks): ModuleList(\\n    (0-1): 2 x Linear(in_features=1)\\n  )\\n)"
    ... )
    {'': 'Net', 'act': 'ReLU', 'blocks': 'ModuleList', 'blocks.0': 'Linear', 'blocks.1': 'Linear'}
    """
    opening, *lines = printed.splitlines() or [""]
    kinds = {"": opening.partition("(")[0]} if "(" in opening else {}
    names = {0: [""]}  # names of the last line per depth; a line may describe several modules
    for match in filter(None, map(_LINE.match, lines)):
        depth = len(match[1]) // 2
        parents = names.get(depth - 1, [""])
        names[depth] = [
            f"{parent}.{leaf}" if parent else leaf
            for parent in parents
            for leaf in _leaves(match[2])
        ]
        kinds |= dict.fromkeys(names[depth], match[4])
    return kinds


def kinds_of_models(printed: Mapping[str, str]) -> dict[str, str]:
    """Map module names to classes for all models. With several models, names are MODEL.MODULE, as
    in the records.
    """
    return {
        f"{model}.{name}" if len(printed) > 1 else name: kind
        for model, text in printed.items()
        for name, kind in kinds_of_modules(text).items()
    }


def _leaves(written: str) -> list[str]:
    first, _, last = written.partition("-")
    if not (first.isdigit() and last.isdigit()):
        return [written]
    return [str(number) for number in range(int(first), int(last) + 1)]
