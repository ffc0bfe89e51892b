"""A run read from its directory: curves from metrics.jsonl, settings from config.toml, initial
weights' hashes from step 0.

No model is built, and tensors are read only to compare the bits of runs with equal scores. Records
that a later resume superseded are not part of a curve.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.checkpoint.format import DamageError
from surefoot.checkpoint.reader import open_checkpoint, read_manifest
from surefoot.checkpoint.store import Store
from surefoot.checkpoint.tensor_file import Stored
from surefoot.config.keywords import parse_score
from surefoot.config.setting_change import SettingChange, in_effect
from surefoot.errors import CheckpointError, ConfigError
from surefoot.tools.compare.statistics import ScoreDifference
from surefoot.tools.compare.variants import Direction, Variant
from surefoot.tracking.jsonl import records
from surefoot.tracking.record import Record, scores_in
from surefoot.tracking.run_reader import (
    RunFiles,
    read_settings,
    read_state,
)
from surefoot.tracking.run_reader import read_run as read_run_files
from surefoot.train.recorded_settings import values_by_step


@dataclass(frozen=True)
class Trained:
    """The curves and settings of a run that was trained or interrupted.

    `loss`: (step, mean training loss since the previous record). `scores`: (step, score). `times`:
    (step, seconds of training and of waiting for data so far). `order`: settings of the sample
    order, and hashes of the weights of step 0, or None. `store`: its checkpoints. `settings`: at the
    beginning of the run. `changes`: of settings, those that its steps have had.
    """

    settings: Mapping[str, Any]
    watch: tuple[Direction, str] | None
    loss: list[tuple[int, float]]
    scores: list[tuple[int, float]]
    times: list[tuple[int, float]]
    targets: float
    order: Mapping[str, Any] | None
    store: Store | None = None
    of_script: bool = False  # no command can build it again
    changes: tuple[SettingChange, ...] = ()
    problems: tuple[str, ...] = ()  # a line about each of its files that cannot be read

    @property
    def training_s(self) -> float:
        """The seconds of steps and of waiting for data, without evaluation, saving and the first
        step of each session.
        """
        return self.times[-1][1] if self.times else 0.0

    @property
    def targets_per_s(self) -> float | None:
        """The targets (tokens of text, samples of images) per second of training."""
        return self.targets / self.training_s if self.training_s > 0 and self.targets else None

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and value of the best score, or of the first best score if several are equal;
        None without scores.
        """
        known = [(step, score) for step, score in self.scores if math.isfinite(score)]
        return min(known, key=lambda point: (self._sign * point[1], point[0]), default=None)

    @property
    def _sign(self) -> int:
        """-1 if a score is better when larger, else 1."""
        return -1 if self.watch is not None and self.watch[0] == "max" else 1

    @property
    def final(self) -> float | None:
        return self.scores[-1][1] if self.scores else None

    @property
    def last_step(self) -> int:
        """The last step that is known to be complete, from the records or the newest checkpoint."""
        steps = [step for step, _ in [*self.times, *self.scores]]
        saved_step = None if self.store is None else self.store.newest_step()
        return max([saved_step or 0, *steps])

    def reached(self, target: float) -> tuple[int, float] | None:
        """Return step and seconds of training at the first evaluation as good as `target`; None if
        no score reaches `target`.
        """
        for step, score in self.scores:
            if math.isfinite(score) and self._sign * score <= self._sign * target:
                return step, self.seconds_at(step)
        return None

    def seconds_at(self, step: int) -> float:
        """Return the seconds of training until a step, interpolated linearly between records.

        >>> run = Trained({}, None, [], [], [(10, 2.0), (20, 6.0)], 0.0, None)
        >>> run.seconds_at(10), run.seconds_at(15), run.seconds_at(25)
        (2.0, 4.0, 6.0)
        """
        steps, seconds = zip((0, 0.0), *self.times, strict=True)
        return float(np.interp(step, steps, seconds))


def read_run(path: Path, *, metric: str | None = None) -> Trained:
    """Read a run's directory; `metric` ("min SPLIT/METRIC") replaces the monitored metric.

    A run without a monitored metric is ranked by the first loss among its scores. Raises
    `ConfigError` if the run has no such `metric`.
    """
    metrics = path / "metrics.jsonl"
    lines = records(metrics) if metrics.is_file() else []
    scored = [record for record in lines if record["kind"] == "eval"]
    files = read_run_files(path)
    watch: tuple[Direction, str] | None
    if metric is not None:
        watch = parse_score(metric)
        if scored:
            refuse_missing_score(watch, scored[-1], of=path)
    else:
        watch = watched(files) or _first_loss(scored)
    scores = []
    if watch is not None:
        _, name = watch
        for record in scored:
            if name in record:
                scores.append((int(record["step"]), float(record[name])))
    losses = []
    times = []
    targets = []
    spent_s = 0.0
    for record in lines:
        if record["kind"] != "train":
            continue
        step = int(record["step"])
        loss = record.get("loss_applied", record.get("loss"))
        if loss is not None:
            losses.append((step, float(loss)))
        spent_s += record.get("training_s", 0.0) + record.get("data_wait_s", 0.0)
        times.append((step, spent_s))
        targets.append(record.get("targets", 0.0) - record.get("starting_targets", 0.0))
    settings = read_settings(path) if (path / "config.toml").is_file() else None
    last_step = max([step for step, _ in [*times, *scores]], default=0)
    changes = [change for change in in_effect(files.changes) if change.from_step < last_step]
    at_beginning = {} if settings is None else dict(settings.flat)
    for name, values in values_by_step(changes).items():
        later = [value for _, value in values[1:]]
        if at_beginning.get(name) in later:  # as a later session has written it
            at_beginning[name] = values[0][1]
    return Trained(
        settings=at_beginning,
        watch=watch,
        loss=losses,
        scores=scores,
        times=times,
        targets=math.fsum(targets),
        order=_with_changes(_beginning(path), changes),
        store=Store(path / "checkpoints"),
        of_script=settings is not None and settings.script,
        changes=tuple(changes),
        problems=files.problems,
    )


def _with_changes(
    beginning: dict[str, Any] | None, changes: Sequence[SettingChange]
) -> dict[str, Any] | None:
    """Return what a run began with, and what of it was changed on the way."""
    if beginning is None:
        return None
    order = dict(beginning)
    for name, values in values_by_step(changes).items():
        what = "data" if name.startswith("train_data") else name
        if what in beginning:
            order[what] = [order[what], values]
    return order


def _first_loss(scored: Sequence[Record]) -> tuple[Direction, str] | None:
    """Return the first loss of the first evaluation, to be minimized."""
    if scored:
        for name in scores_in(scored[0]):
            if name.endswith("/loss"):
                return "min", name
    return None


def same_bits(one: Trained, other: Trained) -> bool:
    """Return True if two runs have the same scores and ended with the same weights, to the last
    bit. Names of parameters and settings may differ.
    """
    if one.scores != other.scores:
        return False
    try:
        weights = _last_weights(one)
        return weights is not None and weights == _last_weights(other)
    except CheckpointError:
        return False


def _last_weights(run: Trained) -> list[str] | None:
    """Return the hashes of all tensors of the newest models in ascending order, or None without a
    checkpoint.
    """
    if run.store is None:
        return None
    step = run.store.newest_step()
    if step is None or step != run.last_step:
        return None
    hashes = []
    for file, tensors in open_checkpoint(run.store.path(step)).files.items():
        if file.partition("-")[0] != "model":
            continue
        for tensor in tensors.values():
            if isinstance(tensor, Stored):
                hashes.append(_hash_of(tensor))
    return sorted(hashes)


def _hash_of(tensor: Stored) -> str:
    digest = sha256(f"{tensor.dtype} {[*tensor.shape]}".encode())
    for chunk in tensor.chunks():
        digest.update(chunk)
    return digest.hexdigest()


def refuse_missing_score(score: tuple[Direction, str], record: Record, *, of: Path | str) -> None:
    """Raise `ConfigError` if a record does not have a score."""
    _, name = score
    if name not in record:
        metric = " ".join(score)
        there = ", ".join(scores_in(record)) or "none"
        raise ConfigError(
            "score-missing",
            problem=f"metric = {metric!r}: {of} does not have this score",
            reason=f"available: {there}",
            setting="metric",
            value=metric,
            run=str(of),
            available=scores_in(record),
        )


def watched(files: RunFiles) -> tuple[Direction, str] | None:
    """Return the direction and name of a run's monitored score; None if the run has not begun or
    monitors no score.
    """
    score = None if files.state is None else files.state.watched
    return None if score is None else (score["direction"], score["score"])


def _beginning(path: Path) -> dict[str, Any] | None:
    """Return what a run began with: the settings of its sample order, and hashes and size of its
    weights. None if its checkpoint at step 0 cannot be read.
    """
    state = read_state(path, 0)
    if state is None:
        return None
    try:
        files = read_manifest(Store(path / "checkpoints").path(0)).files
    except (CheckpointError, DamageError):
        return None
    weights = []
    model_bytes = 0
    for file, (size, digest) in sorted(files.items()):
        if file.startswith("model"):
            weights.append((file, digest))
            model_bytes += size
    names = ("seed", "batch_size", "data", "precision")
    return {
        **{name: state.identity.get(name) for name in names},
        "weights": weights,
        "model_bytes": model_bytes,
    }


@dataclass(frozen=True)
class Compared:
    """A run of a comparison: variant, outcome, curves, and per-batch scores in `batches` (or the
    reason for their absence).
    """

    variant: Variant
    trained: Trained
    status: str = "finished"
    said: str = ""
    batches: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class VariantRow:
    """A variant in the table. Values are means over the finished repeats (over all repeats if no
    repeat finished).

    `label` is the displayed name; `name` is the name of the directory or group. `difference` is the
    best score minus the baseline's best score; `p` is corrected for all comparisons. `target_step`
    and `target_s` are None unless all repeats reached the target.
    """

    name: str
    varied: Mapping[str, Any]
    status: str
    said: str
    repeats: int
    label: str = ""
    best: float | None = None
    best_error: float | None = None
    best_step: float | None = None
    final: float | None = None
    final_error: float | None = None
    reached: int = 0
    target_step: float | None = None
    target_s: float | None = None
    training_s: float | None = None
    targets_per_s: float | None = None
    difference: ScoreDifference | None = None
    p: float | None = None
    verdict: str = ""
