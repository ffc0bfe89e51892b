"""A search over settings with Optuna, stored in a database beside the runs: a killed search loses
and repeats no trial.

The settings of trial n depend on the seed, n, and the results that were known when the trial began.
An interrupted trial continues.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from surefoot.config.extras import needed_for
from surefoot.errors import ConfigError
from surefoot.tools.compare.trials import TO_THE_END, TrialOutcome, outcome_of
from surefoot.tools.compare.variants import grid
from surefoot.tracking.format import as_typed

FILE = "search.db"
Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "halving", "none"]
Space = Mapping[str, Mapping[str, Any]]
_STARTUP = 5  # trials before pruning starts, and random trials before TPE starts
_LOG_FROM = 10.0  # ratio of the ends from which a range is searched on a logarithmic scale


def parameter(setting: str, text: str) -> dict[str, Any]:
    """Parse the search space of a setting, a range ("1e-4..1e-2") or choices ("adamw,sgd"), into
    JSON values.

    A positive range is searched on a logarithmic scale if its end is at least 10 times its start.
    The suffix ",log" or ",linear" overrides this scale. A range between integers yields integers.

    >>> parameter("optimizer.lr", "1e-4..1e-2")
    {'kind': 'range', 'low': 0.0001, 'high': 0.01, 'log': True}
    >>> parameter("model.layers", "2..4"), parameter("optimizer.name", "adamw,sgd")
    ({'kind': 'range', 'low': 2, 'high': 4, 'log': False}, {'kind': 'choice', 'of': ['adamw', 'sgd']})
    """
    if ".." not in text:
        choices = [part.strip() for part in text.split(",")]
        if "" in choices or len(set(choices)) < len(choices):
            raise ConfigError(
                "vary-choices-not-distinct",
                problem=f"vary = {setting}={text}: a value is empty or repeated",
                remedy="list each value once, separated by commas",
                setting=setting,
                value=text,
            )
        return {"kind": "choice", "of": choices}
    ends, _, scale = text.partition(",")
    start, _, end = ends.partition("..")
    low = _end(start, setting, text)
    high = _end(end, setting, text)
    scale = scale.strip()
    if scale not in ("", "log", "linear"):
        raise ConfigError(
            "vary-scale-unknown",
            problem=f"vary = {setting}={text}: {scale!r} is no scale of a range",
            remedy=f"write {ends},log or {ends},linear",
            setting=setting,
            value=text,
            scale=scale,
        )
    if isinstance(low, float) or isinstance(high, float):
        low = float(low)
        high = float(high)
    if not low < high:
        raise ConfigError(
            "vary-range-empty",
            problem=f"vary = {setting}={text}: the range starts at {low} and ends at {high}",
            remedy="write the lower end first",
            setting=setting,
            value=text,
            low=low,
            high=high,
        )
    if scale == "log" and low <= 0:
        raise ConfigError(
            "vary-log-range-not-positive",
            problem=f"vary = {setting}={text}: a logarithmic range must start above 0",
            remedy=f"write {ends},linear",
            setting=setting,
            value=text,
            low=low,
        )
    log = scale == "log"
    if scale == "":
        log = low > 0 and high / low >= _LOG_FROM
    return {"kind": "range", "low": low, "high": high, "log": log}


def trial_name(number: int) -> str:
    """Return the name of a trial.

    >>> trial_name(3)
    'trial-003'
    """
    return f"trial-{number:03d}"


def corners(space: Space) -> list[dict[str, str]]:
    """Return the settings that validate a search space: all combinations of choices, at the low and
    the high ends of all ranges.

    >>> choice = {"kind": "choice", "of": ["x", "y"]}
    >>> corners({"a": choice, "b": {"kind": "range", "low": 1, "high": 2, "log": False}})
    [{'a': 'x', 'b': '1'}, {'a': 'y', 'b': '1'}, {'a': 'x', 'b': '2'}, {'a': 'y', 'b': '2'}]
    """
    combinations: list[dict[str, str]] = []
    for end in ("low", "high"):
        values = {}
        for setting, spec in space.items():
            if spec["kind"] == "choice":
                values[setting] = [str(choice) for choice in spec["of"]]
            else:
                values[setting] = [repr(spec[end])]
        for combination in grid(values):
            if combination not in combinations:  # of choices only
                combinations.append(combination)
    return combinations


class Search:
    """A chooser that lets Optuna choose each trial; `begin(name, settings)` writes the settings for
    the trial's process.
    """

    def __init__(
        self,
        directory: Path,
        space: Space,
        *,
        trials: int,
        seed: int,
        sampler: Sampler,
        pruner: Pruner,
        direction: Literal["min", "max"],
        begin: Callable[[str, dict[str, str]], None],
    ) -> None:
        self.optuna = _imported()
        self.directory = directory
        self.space = space
        self.total = trials
        self.seed = seed
        self.sampler = sampler
        self.begin = begin
        pruners = {
            "median": self.optuna.pruners.MedianPruner(n_startup_trials=_STARTUP),
            "halving": self.optuna.pruners.SuccessiveHalvingPruner(),
            "none": self.optuna.pruners.NopPruner(),
        }
        self.study = self.optuna.create_study(
            storage=f"sqlite:///{(directory / FILE).resolve()}",
            study_name="surefoot",
            direction="minimize" if direction == "min" else "maximize",
            pruner=pruners[pruner],
            load_if_exists=True,
        )
        self.going: dict[str, Any] = {}  # running Optuna trials by name
        trials_made = self.study.get_trials(deepcopy=False)
        self.left_running = [trial for trial in trials_made if trial.state.name == "RUNNING"]
        self.over = len(trials_made) - len(self.left_running)

    def next(self) -> str | None:
        """Return a trial that an earlier session left running, else a new trial; None after the
        last trial.
        """
        while self.left_running:
            frozen = self.left_running.pop(0)
            self.study.sampler = self._sampler(frozen.number)
            trial = self.optuna.Trial(self.study, frozen._trial_id)
            name = self._choose(trial)  # keeps stored settings
            outcome = outcome_of(self.directory, name)
            if outcome is None or outcome["status"] not in TO_THE_END:
                return name
            # the trial ended, but Optuna was not informed
            self.ended(name, TrialOutcome(outcome["status"]))
            self.over += 1
        number = len(self.study.get_trials(deepcopy=False))
        if number >= self.total:
            return None
        self.study.sampler = self._sampler(number)
        return self._choose(self.study.ask())

    def saw(self, name: str, step: int, score: float) -> bool:
        """Report a score to Optuna, and return True if the trial should be pruned."""
        trial = self.going[name]
        if math.isfinite(score) and step not in self._scores(trial):
            trial.report(score, step)
        return bool(trial.should_prune())

    def ended(self, name: str, outcome: TrialOutcome) -> None:
        """Report the outcome of a trial to Optuna. A diverged trial counts as pruned. A stopped
        trial continues in a later session.
        """
        trial = self.going.pop(name)
        states = self.optuna.trial.TrialState
        scores = self._scores(trial).values()
        match outcome.status:
            case "stopped":
                return
            case "finished" if scores:
                is_smallest_best = self.study.direction.name == "MINIMIZE"
                self.study.tell(trial, min(scores) if is_smallest_best else max(scores))
            case "pruned" | "diverged":
                self.study.tell(trial, state=states.PRUNED)
            case _:
                self.study.tell(trial, state=states.FAIL)

    def _scores(self, trial: Any) -> dict[int, float]:
        """Return the scores of a trial that were reported, by step."""
        stored = self.study.get_trials(deepcopy=False)[trial.number]
        scores: dict[int, float] = stored.intermediate_values
        return scores

    def _sampler(self, number: int) -> Any:
        # random numbers depend only on seed and trial number
        seed = (self.seed * 1_000_003 + number) % 2**32
        if self.sampler == "random":
            return self.optuna.samplers.RandomSampler(seed=seed)
        return self.optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)

    def _choose(self, trial: Any) -> str:
        for setting, spec in self.space.items():
            if spec["kind"] == "choice":
                trial.suggest_categorical(setting, tuple(spec["of"]))
            elif isinstance(spec["low"], int):
                trial.suggest_int(setting, spec["low"], spec["high"], log=spec["log"])
            else:
                trial.suggest_float(setting, spec["low"], spec["high"], log=spec["log"])
        name = trial_name(trial.number)
        self.going[name] = trial
        self.begin(name, {setting: as_typed(value) for setting, value in trial.params.items()})
        return name


def _end(text: str, setting: str, typed: str) -> int | float:
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if math.isfinite(float(text)):
            return float(text)
    raise ConfigError(
        "vary-end-not-a-number",
        problem=f"vary = {setting}={typed}: {text!r} is not a number",
        remedy="give the ends of a range as numbers, such as 1e-4..1e-2",
        setting=setting,
        value=typed,
        end=text,
    )


def _imported() -> Any:
    with needed_for("--trials", "optuna"), warnings.catch_warnings(action="ignore"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
