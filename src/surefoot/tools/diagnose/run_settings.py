"""The run settings that findings depend on, and the flag or code that changes each setting."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.config.averaging import Averaging, averaging_of
from surefoot.config.setting_change import SettingChange
from surefoot.config.train_settings import TrainSettings, clipping
from surefoot.errors import ConfigError
from surefoot.optim.optimizers import OPTIMIZERS
from surefoot.tracking.format import as_typed
from surefoot.tracking.run_reader import Standing
from surefoot.train.changed_settings import in_words

_FAR_ABOVE_USUAL = 10.0  # times the usual rate; from there on a tenth of a rate is no remedy
_USUAL_RATE = 1e-2  # of an optimizer that surefoot does not have
_NESTED = ("optimizer", "schedule", "model", "data", "augmentation")
# what a remedy changes on record where the run goes on; another length or schedule is a plan of the
# whole run, for which a remedy says more
_ON_RECORD = ("batch_size", "clip", "ema", "max_bad_steps", "optimizer", "early_stopping")
# a change of any other setting makes the loss another quantity, such as one of dropout
_KEEP_THE_LOSS = (
    "batch_size",
    "clip",
    "early_stopping",
    "ema",
    "length",
    "max_bad_steps",
    "micro_batch_size",
    "optimizer",
    "precision",
    "schedule",
)
_BESIDE_STEPS = ("early_stopping", "ema", "length", "max_bad_steps")
"""A change of them changes nothing of what a step computes."""


@dataclass(frozen=True)
class RunDescription:
    """The settings of a run. Unknown settings are None.

    `identity` is compared at a resume (state.json). `written` has settings by dotted name, as in
    config.toml. `program` is "recipe", "file" or "script", and determines the form of a setting.
    `changes` are those of the journal that hold in the next step, and `in_force` has the values of
    all settings that can change, as the next step has them. `goes_on`: steps are left in which a
    change would hold.
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
    problems: tuple[str, ...] = ()  # a line about each file that cannot be read
    keeps_best: bool = True
    # direction and name of the score that chooses the best checkpoint
    monitored: tuple[str, str] | None = None
    changes: tuple[SettingChange, ...] = ()
    in_force: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    planned_steps: int | None = None  # by the journal; None: the length of the identity

    @property
    def steps(self) -> int | None:
        return self.planned_steps or _parse_number(self.identity.get("length"))

    @property
    def schedule_steps(self) -> int | None:
        return _parse_number(self.identity.get("schedule_of_steps")) or self.steps

    @property
    def shape(self) -> str | None:
        """The name of the schedule that the user has chosen, the last one after changes."""
        schedule = _mapping(self.in_force.get("schedule")) or _last_part(self.identity)[0]
        shape = schedule.get("shape")
        return shape if isinstance(shape, str) else None

    @property
    def warmup(self) -> int:
        """The number of warm-up steps, or 0 if unknown."""
        schedule = _mapping(self.identity.get("schedule"))
        while "first" in schedule:
            schedule = _mapping(schedule["first"])
        return _parse_number(schedule.get("warmup")) or 0

    @property
    def last_warmup(self) -> tuple[int, int | None]:
        """The number of warm-up steps of the schedule since its last change, and the steps that it
        has from there on.
        """
        schedule, begin = _last_part(self.identity)
        if not begin:
            lengths = [steps for steps in (self.schedule_steps, self.steps) if steps is not None]
            return self.warmup, max(lengths, default=None)
        steps = None if self.steps is None else self.steps - begin
        return _parse_number(schedule.get("warmup")) or 0, steps

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The name and settings of the optimizer (of the first model if there are several)."""
        values = dict(_mapping(self.identity.get("optimizer")))
        if self.optimizer_count != 1:
            values = dict(_mapping(next(iter(values.values()), {})))
        prefix = self._recorded("optimizer.")
        for name, value in self.in_force.items():
            if name.startswith(prefix):
                values[name.removeprefix(prefix)] = value
        return values

    @property
    def optimizer_count(self) -> int:
        optimizer = _mapping(self.identity.get("optimizer"))
        return 1 if "name" in optimizer else len(optimizer)

    def _recorded(self, name: str) -> str:
        """Return the name of a setting in the journal, which names one of several optimizers.

        >>> several = RunDescription(identity={"optimizer": {"critic": {}, "actor": {}}})
        >>> several._recorded("optimizer.lr"), RunDescription()._recorded("optimizer.lr")
        ('optimizer.critic.lr', 'optimizer.lr')
        """
        if not name.startswith("optimizer.") or self.optimizer_count < 2:
            return name
        first = next(iter(self.identity["optimizer"]))
        return f"optimizer.{first}.{name.removeprefix('optimizer.')}"

    @property
    def lr(self) -> float | None:
        rate = self.optimizer.get("lr")
        return float(rate) if isinstance(rate, int | float) else None

    @property
    def clip(self) -> tuple[str, float] | None:
        """The kind and limit of gradient clipping."""
        try:
            return clipping(self.present("clip"))
        except ConfigError:
            return None

    @property
    def averaging(self) -> Averaging | None:
        """How the evaluated weights are averaged; None without `ema`."""
        return averaging_of({**self.identity, "ema": self.present("ema")})

    @property
    def batch_size(self) -> int | None:
        """Samples or tokens per step."""
        return _parse_number(self.present("batch_size"))

    @property
    def samples(self) -> int | None:
        """Samples per epoch."""
        data = _mapping(self.identity.get("data"))
        plan = _mapping(data.get("plan"))
        return _parse_number(plan.get("samples")) or _parse_number(data.get("samples"))

    @property
    def workers(self) -> int:
        """The number of data loader processes, or 0 if unknown."""
        return _parse_number(self.written.get("workers")) or 0

    @property
    def label_smoothing(self) -> float:
        """The label smoothing of the training loss, or 0."""
        largest = 0.0
        for name, value in [*_named(self.identity.get("identity")), *self.written.items()]:
            is_smoothing = name.rpartition(".")[2] == "label_smoothing"
            if is_smoothing and isinstance(value, int | float):
                largest = max(largest, float(value))
        return largest

    @property
    def max_bad_steps(self) -> int:
        """The allowed number of consecutive skipped steps."""
        limit = _parse_number(self.present("max_bad_steps"))
        return TrainSettings.max_bad_steps if limit is None else limit

    @property
    def precisions(self) -> set[str]:
        """The precisions of all steps."""
        names = {self.present("precision")}
        names |= {change.was for change in self.changes if change.setting == "precision"}
        return names

    def changed_at(self, *names: str) -> int:
        """Return the step from which on the last change of one of these settings holds, or 0.
        "optimizer" names all of its settings.

        >>> change = SettingChange(1, 300, "optimizer.lr", 0.001, 0.0001)
        >>> described = RunDescription(changes=(change,))
        >>> described.changed_at("clip", "optimizer"), described.changed_at("clip")
        (300, 0)
        """
        return self._last_change(lambda name: name in names)

    @property
    def loss_changed_at(self) -> int:
        """The step from which on the loss is another quantity, or 0."""
        return self._last_change(lambda name: name not in _KEEP_THE_LOSS)

    @property
    def steps_changed_at(self) -> int:
        """The step from which on steps compute something else, such as with another rate or batch
        size, or 0.
        """
        return self._last_change(lambda name: name not in _BESIDE_STEPS)

    def _last_change(self, counts: Callable[[str], bool]) -> int:
        last = 0
        for change in self.changes:
            if any(counts(setting.partition(".")[0]) for setting in change.names):
                last = max(last, change.from_step)
        return last

    def present(self, name: str) -> Any:
        """Return the value of a setting by its dotted name, or None if unknown."""
        if self.in_force.get(name) not in (None, "auto"):
            return self.in_force[name]
        if name == "schedule.warmup":
            return f"{self.warmup} steps" if self.identity.get("schedule") else None
        if name == "schedule.name":
            return self.shape
        if name == "optimizer.lr":
            return self.lr
        if name.startswith("optimizer."):
            return self.optimizer.get(name.removeprefix("optimizer."))
        written = self.written.get(name)
        if written is None and "." not in name:
            return self.identity.get(name)
        return written

    @property
    def in_shell(self) -> str:
        """The run's path as it is typed on a command line."""
        return shlex.quote(self.name)

    @property
    def rate_test(self) -> str:
        """The command or code for a learning-rate test from step 0. A finished run has no next
        steps to test.
        """
        if self.program == "script":
            return (
                "print(sf.tune.find_lr(run)) in the script that builds the run, with a new run_dir"
            )
        return f"surefoot find-lr {self.in_shell} --checkpoint 0"

    def go_on(self, length: str = "") -> str:
        """Return the command or code that continues the run or extends the run to `length`. A
        script is started again.
        """
        if self.program == "script":
            again = "run its script again"
            if length and self.in_force:
                return f"{self.change({'length': length})}, then {again}"
            return f"{again} with Run(length={length!r})" if length else again
        resume = f"surefoot resume {self.in_shell}"
        return f'{resume} --length "{length}"' if length else resume

    def change(self, values: Mapping[str, Any]) -> str:
        """Return the command that changes settings of the run while it goes on.

        >>> RunDescription(name="runs/a").change({"clip": "norm 1.0", "batch_size": 64})
        "surefoot change runs/a clip='norm 1.0' batch_size=64"
        """
        typed = [f"{name}={shlex.quote(in_words(value))}" for name, value in values.items()]
        return f"surefoot change {self.in_shell} {' '.join(typed)}"

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
        if self.program == "script":
            return f"print(sf.{call}) in the script that builds the run"
        return f"surefoot {command}"

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
        value; or the command that changes it on record, while the run goes on.

        >>> identity = {"optimizer": {"name": "adamw", "lr": 3e-3}}
        >>> RunDescription(program="recipe", identity=identity).typed("optimizer.lr", 3e-4)
        '--optimizer.lr 0.0003 (now 0.003)'
        >>> RunDescription(identity={"batch_size": 8}).typed("batch_size", 64)
        'Run(batch_size=64) (now 8)'
        """
        if self._changes_on_record(name, value):
            change = self.change({self._recorded(name): value})
        else:
            change = self._flag(name, value) or self._code(name, value)
        now = self.present(name)
        return change if now is None else f"{change} (now {as_typed(now)})"

    def _changes_on_record(self, name: str, value: Any) -> bool:
        """Return True if a setting can get this value while the run goes on."""
        now = self.in_force.get(self._recorded(name))
        if not self.goes_on or now is None or name.partition(".")[0] not in _ON_RECORD:
            return False
        # batches in tokens, and a decay that is to begin or end, belong to the whole run
        of_samples = name != "batch_size" or (isinstance(now, int) and isinstance(value, int))
        keeps_groups = name != "optimizer.weight_decay" or bool(now) == bool(value)
        return of_samples and keeps_groups

    def _flag(self, name: str, value: Any) -> str:
        """Return the flag that sets a setting, or "" if the program of the run has none."""
        leaf = name.rpartition(".")[2]
        if self.program == "script":
            return ""
        if self.program == "recipe" or name in self.written:
            flag = name
        elif leaf in self.written:
            flag = leaf
        else:
            return ""
        text = as_typed(value)
        if " " in text:
            text = f'"{text}"'
        return f"--{flag.replace('_', '-')} {text}"

    def _code(self, name: str, value: Any) -> str:
        """Return the code that sets a setting."""
        section = name.partition(".")[0]
        leaf = name.rpartition(".")[2]
        if name.startswith("optimizer."):
            return f"{self.optimizer.get('name', 'the optimizer')}({leaf}={value!r})"
        if name == "schedule.name":
            return f"a {value} schedule"
        if section in _NESTED:
            return f"{leaf}={value!r} for the {section}"
        return f"Run({name}={value!r})"


def _last_part(identity: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Return the schedule since its last change, and the step at which it begins."""
    schedule = _mapping(identity.get("schedule"))
    begin = 0
    while schedule.get("shape") == "continued":
        begin += _parse_number(schedule.get("at")) or 0
        schedule = _mapping(schedule.get("second"))
    return schedule, begin


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
    kinds = {}
    opening, *lines = printed.splitlines() or [""]
    if "(" in opening:
        kinds[""] = opening.partition("(")[0]
    names = {0: [""]}  # names of the last line per depth; a line may describe several modules
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        names[depth] = []
        for parent in names.get(depth - 1, [""]):
            for leaf in _leaves(match[2]):
                names[depth].append(f"{parent}.{leaf}" if parent else leaf)
        for name in names[depth]:
            kinds[name] = match[4]
    return kinds


def kinds_of_models(printed: Mapping[str, str]) -> dict[str, str]:
    """Map module names to classes for all models. With several models, names are MODEL.MODULE, as
    in the records.
    """
    if len(printed) == 1:
        return kinds_of_modules(*printed.values())
    kinds = {}
    for model, text in printed.items():
        for name, kind in kinds_of_modules(text).items():
            kinds[f"{model}.{name}"] = kind
    return kinds


def _leaves(written: str) -> list[str]:
    first, _, last = written.partition("-")
    if not (first.isdigit() and last.isdigit()):
        return [written]
    return [str(number) for number in range(int(first), int(last) + 1)]
