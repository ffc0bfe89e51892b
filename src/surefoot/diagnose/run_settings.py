"""The settings of a run that findings depend on, and the text to type for other values."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.config.train_settings import TrainSettings, clipping
from surefoot.errors import ConfigError
from surefoot.tracking.format import as_typed
from surefoot.tracking.run_reader import Standing

_NESTED = ("optimizer", "schedule", "model", "data", "augmentation")


@dataclass(frozen=True)
class RunDescription:
    """The settings of a run; unknown ones are None.

    `identity` is compared when it goes on (`identity` in a checkpoint's state.json); `written` are settings by dotted
    name, as in config.toml; `program`, "recipe", "file" or "script", says how a setting is given.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    program: str = "script"
    kinds: Mapping[str, str] = field(default_factory=dict)  # the class of each module by its name
    standing: Standing = "unknown"
    name: str = "RUN"  # as `surefoot resume` takes it
    processors: int | None = None
    memory_bytes: int | None = None  # of the machine
    saved_step: int = 0  # of the newest checkpoint; records may be missing, or not written yet

    @property
    def steps(self) -> int | None:
        """The length of the run."""
        return _parse_number(self.identity.get("length"))

    @property
    def schedule_steps(self) -> int | None:
        """The length that the schedule was made for."""
        return _parse_number(self.identity.get("schedule_of_steps")) or self.steps

    @property
    def shape(self) -> str | None:
        shape = _mapping(self.identity.get("schedule")).get("shape")
        return shape if isinstance(shape, str) else None

    @property
    def warmup(self) -> int:
        """Steps until the full rate; 0 if unknown."""
        schedule = _mapping(self.identity.get("schedule"))
        while "first" in schedule:
            schedule = _mapping(schedule["first"])
        return _parse_number(schedule.get("warmup")) or 0

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """Name and settings, of the first model if there are several."""
        optimizer = _mapping(self.identity.get("optimizer"))
        return optimizer if "name" in optimizer else _mapping(next(iter(optimizer.values()), {}))

    @property
    def lr(self) -> float | None:
        rate = self.optimizer.get("lr")
        return float(rate) if isinstance(rate, int | float) else None

    @property
    def clip(self) -> tuple[str, float] | None:
        """Kind and limit of clipping the gradient."""
        try:
            return clipping(self.identity.get("clip"))
        except ConfigError:
            return None

    @property
    def batch_size(self) -> int | None:
        """Samples or tokens of one step."""
        return _parse_number(self.identity.get("batch_size"))

    @property
    def samples(self) -> int | None:
        """Samples of one epoch."""
        data = _mapping(self.identity.get("data"))
        return _parse_number(_mapping(data.get("plan")).get("samples")) or _parse_number(data.get("samples"))

    @property
    def workers(self) -> int:
        """Processes that read samples; 0 if unknown."""
        return _parse_number(self.written.get("workers")) or 0

    @property
    def label_smoothing(self) -> float:
        """Label smoothing of the training loss; 0 if the settings have none."""
        named = [*_named(self.identity.get("identity")), *self.written.items()]
        values = (value for name, value in named if name.rpartition(".")[2] == "label_smoothing")
        return max((float(value) for value in values if isinstance(value, int | float)), default=0.0)

    @property
    def max_bad_steps(self) -> int:
        """The number of steps in a row that may be skipped; 0 is valid."""
        limit = _parse_number(self.identity.get("max_bad_steps"))
        return TrainSettings.max_bad_steps if limit is None else limit

    def present(self, name: str) -> Any:
        """The value of a setting by its dotted name; None if unknown."""
        warmup = f"{self.warmup} steps" if self.identity.get("schedule") else None
        nested = {"schedule.warmup": warmup, "schedule.name": self.shape} | {
            f"optimizer.{key}": value for key, value in {**self.optimizer, "lr": self.lr}.items()
        }
        if name in nested or name.startswith("optimizer."):
            return nested.get(name)
        written = self.written.get(name)
        return self.identity.get(name) if written is None and "." not in name else written

    @property
    def rate_test(self) -> str:
        """The text to type to test learning rates from the run's start; a finished run has no next steps for it."""
        in_script = "print(surefoot.tune.find_lr(run)) where this run is built, into a new directory"
        return in_script if self.program == "script" else f"surefoot find-lr {self.name} --checkpoint 0"

    def go_on(self, length: str = "") -> str:
        """The text to type to continue the run, or to make it longer; a script is started again."""
        return (
            "start its script again" + (f" with Run(length={length!r})" if length else "")
            if self.program == "script"
            else f"surefoot resume {self.name}" + (f' --length "{length}"' if length else "")
        )

    def replay(self, step: int | str) -> str:
        if self.program == "script":
            return f"print(surefoot.load(run).replay({step})) where this run is built"
        return f"surefoot replay {self.name} --step {step}"

    @property
    def lr_in_text(self) -> str:
        """As it stands behind "the learning rate"."""
        return "" if self.lr is None else f", {self.lr:g},"

    def lr_divided(self, by: float, *, digits: int = 3, otherwise: str = "") -> str:
        """The text to type for a fraction of the base rate; `otherwise` if that is not known."""
        return self.typed("optimizer.lr", float(f"{self.lr / by:.{digits}g}")) if self.lr else otherwise

    def typed(self, name: str, value: Any) -> str:
        """The text to type for another value of a setting, with the current one: a flag, or code if the run is not a recipe's.

        >>> RunDescription(program="recipe", identity={"optimizer": {"name": "adamw", "lr": 3e-3}}).typed("optimizer.lr", 3e-4)
        '--optimizer.lr 0.0003 (now 0.003)'
        >>> RunDescription(identity={"batch_size": 8}).typed("batch_size", 64)
        'Run(batch_size=64) (now 8)'
        """
        now = self.present(name)
        note = "" if now is None else f" (now {as_typed(now)})"
        leaf = name.rpartition(".")[2]
        flag = name if self.program == "recipe" or name in self.written else leaf if leaf in self.written else None
        if flag is not None and self.program != "script":
            quote = '"' * (" " in as_typed(value))
            return f"--{flag.replace('_', '-')} {quote}{as_typed(value)}{quote}{note}"
        if name.startswith("optimizer."):
            return f"{self.optimizer.get('name', 'the optimizer')}({leaf}={value!r}){note}"
        if name == "schedule.name":
            return f"a schedule of shape {value}{note}"
        if name.partition(".")[0] in _NESTED:
            return f"{leaf}={value!r} for the {name.partition('.')[0]}{note}"
        return f"Run({name}={value!r}){note}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_number(value: Any) -> int | None:
    """A number of samples, steps or tokens: 64, or "4096 tokens"."""
    match = re.fullmatch(r"(\d+)(?: \w+)?", str(value))
    return int(match[1]) if match and not isinstance(value, bool) else None


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """The names and values in nested settings."""
    for name, setting in _mapping(value).items():
        yield name, setting
        yield from _named(setting)


_LINE = re.compile(r"( *)\((\w+(?:-\w+)?)\): (?:(\d+) x )?(\w+)\(")


def kinds_of_modules(printed: str) -> dict[str, str]:
    """The class of each module by its dotted name, from the `repr` of a model; the model itself is "".

    >>> kinds_of_modules("Net(\\n  (act): ReLU()\\n  (blocks): ModuleList(\\n    (0-1): 2 x Linear(in_features=1)\\n  )\\n)")
    {'': 'Net', 'act': 'ReLU', 'blocks': 'ModuleList', 'blocks.0': 'Linear', 'blocks.1': 'Linear'}
    """
    opening, *lines = printed.splitlines() or [""]
    kinds = {"": opening.partition("(")[0]} if "(" in opening else {}
    names = {0: [""]}  # of the last line at each depth: several where a line stands for several modules
    for match in filter(None, map(_LINE.match, lines)):
        depth = len(match[1]) // 2
        parents = names.get(depth - 1, [""])
        names[depth] = [f"{parent}.{leaf}" if parent else leaf for parent in parents for leaf in _leaves(match[2])]
        kinds |= dict.fromkeys(names[depth], match[4])
    return kinds


def kinds_of_models(printed: Mapping[str, str]) -> dict[str, str]:
    """The same of a run's models by name: where there are several, their modules are called MODEL.MODULE, as in its records."""
    return {
        f"{model}.{name}" if len(printed) > 1 else name: kind
        for model, text in printed.items()
        for name, kind in kinds_of_modules(text).items()
    }


def _leaves(written: str) -> list[str]:
    """The names that "3" or "0-3" stands for."""
    first, _, last = written.partition("-")
    if not (first.isdigit() and last.isdigit()):
        return [written]
    return [str(number) for number in range(int(first), int(last) + 1)]
