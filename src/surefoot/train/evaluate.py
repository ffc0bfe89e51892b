"""Metrics of a split, computed in one epoch and independent of the batch size and of the run's
other work.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from surefoot.checkpoint.snapshot import Snapshot
from surefoot.config.keywords import known_keywords
from surefoot.data.dataset_checks import check_split
from surefoot.data.gathering import tensors_of
from surefoot.data.loader import MicroBatch, in_order
from surefoot.data.stored_samples import integer_targets
from surefoot.distributed.world import World, device_called
from surefoot.errors import ConfigError, DivergedError, out_of_range
from surefoot.mean import Mean
from surefoot.metrics.contract import Metric, named_metrics, refuse_twice
from surefoot.seeding import fold, seed_generators, stream_key, untouched
from surefoot.train.buffer_rules import StepBuffer, buffers_of
from surefoot.train.loss_accumulator import SKIPPED_SAMPLES, check_loss
from surefoot.train.loss_contract import check_contract, pieces_of, refused_scores
from surefoot.train.metric_results import Results
from surefoot.train.precision import FORMATS, Precision
from surefoot.train.precision import precision as chosen_precision
from surefoot.train.split_passes import SplitPasses
from surefoot.train.step_watch import CoupledLoss
from surefoot.train.weight_check import refuse_max_norm

Loss = Callable[[Any, Any], Any]
_MANY_TARGETS = 1 << 26  # in memory: more are not looked at before the first step
_BATCH_SIZE = 16  # if the split names none; changes no metric


@known_keywords
@dataclass(frozen=True)
class Split:
    """A data set to evaluate in order, with its metrics.

    `metrics` is one metric, several metrics, or a dictionary of metrics by name. A metric is a
    function of (outputs, targets) that returns a `Mean`, recorded under the function's name, or a
    dictionary of `Mean` by name. A metric may also be a Metric or MetricCollection of torchmetrics,
    or `sf.metrics.whole_split(function)` for a value that is not a mean over samples.

    `predict(model, batch)` returns (outputs, targets). By default surefoot uses the pair (outputs,
    targets) that the loss returns in addition to its mean. If the loss returns no pair, surefoot
    uses `(model(inputs), targets)` for a batch (inputs, targets). The default calls the model only
    once per batch. The run's loss is evaluated too, or another one, `loss=function`, or none,
    `loss=False`. `derived` maps names to
    functions of all means of this split, such as `perplexity`. `batch_size` affects memory and
    speed, but no metric. If `at_end` is true, the split is evaluated once, after the last step,
    with the best checkpoint's weights if one exists. `workers` and `collate_fn` are by default
    those of the run.

    `data` may be a `DataLoader` of a map-style data set. The split then has its data set, batch
    size, workers and collate function, and evaluates every sample once, in order. `data` may also
    be a stream that says how many of its first rows to take, `sf.data.Stream(rows, samples=1000)`:
    these are recorded once.
    """

    data: Any
    metrics: Metric | Iterable[Metric] | Mapping[str, Metric] = ()
    batch_size: int | None = None
    loss: bool | Loss = True
    predict: Callable[[Any, Any], tuple[Any, Any]] | None = None
    derived: Mapping[str, Callable[[Mapping[str, float]], float]] = field(default_factory=dict)
    at_end: bool = False
    workers: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    # what is not taken from a DataLoader
    untaken: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.data, DataLoader):
            from surefoot.data.torch_loader import read_split_loader

            of_loader = read_split_loader(self.data, self.batch_size, self.workers, self.collate_fn)
            vars(self).update(of_loader)
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise out_of_range("batch_size", size, "a whole number of samples, 1 or more").inside(
                "Split"
            )
        if not isinstance(self.loss, bool):
            if not callable(self.loss):
                raise ConfigError(
                    "split-loss",
                    problem=f"Split(loss={self.loss!r}): loss must be a function, True or False",
                    reason="True is the loss of the run, and False leaves the loss out",
                    remedy="write loss=function, a function of (model, batch)",
                    setting="loss",
                    value=repr(self.loss),
                )
            check_loss(self.loss, setting="Split(loss=)")
        names = [name for name, _ in named_metrics(self.metrics)]
        if self.loss:
            names.append("loss")
        refuse_twice([*names, *self.derived])

    def loss_of(self, run_loss: Loss | None) -> Loss | None:
        """Return the loss that scores the split: its own, or that of the run, or None."""
        if self.loss is True:
            return run_loss
        if self.loss is False:
            return None
        return self.loss


class EvaluationStoppedError(Exception):
    """Raised if a stop request interrupts an evaluation."""


def evaluate_batches(
    model: Any,
    batches: Iterable[MicroBatch],
    split: Split,
    *,
    loss: Loss | None,
    precision: Precision,
    seed: int,
    group: int | None = None,
    is_sharded: bool = False,
    stop: Callable[[], bool] = lambda: False,
    world: World | None = None,
    of_nothing: float = math.nan,
) -> dict[str, Any]:
    """Return the loss and every metric over all batches, by name. A coupled loss is the mean over
    groups of `group` samples.

    The function waits for the device once, at the end, unless `predict` waits or a metric needs the
    whole split. Module modes and random generators are restored. A loss without its own count is
    weighted by the batch's count. A batch for which the loss or `collate_fn` returned None is left
    out, and its samples are counted as `skipped_samples`; with `is_sharded`, which says that several
    ranks gather the model's weights, it raises `DataError`. A mean of nothing is `of_nothing`. Raises
    `EvaluationStoppedError` if `stop` returns true between two batches. The call is collective if
    `world` has several ranks. Each rank then passes its own batches, equally many on all ranks. All
    ranks must agree on `stop` and return the same metrics.
    """
    rank = 0
    ranks = 1
    if world is not None:
        rank = world.rank
        ranks = world.size
    diverged: DivergedError | None = None
    with evaluating(model, seed) as begin, _passes(model, split, loss, is_sharded) as passes:
        results = Results(
            split.metrics,
            precision.device,
            world,
            passes.coupled_loss(precision, group),
            of_nothing=of_nothing,
        )
        for index, batch in enumerate(batches):
            if stop():
                raise EvaluationStoppedError
            begin(index * ranks + rank)
            try:
                with precision.autocast():
                    of_batch = passes.of(batch)
                    with _in_metrics(world):
                        if of_batch is None:
                            results.leave_out(batch)
                        else:
                            results.add(*of_batch, is_padding=batch.is_padding)
            except DivergedError as problem:
                if ranks == 1:
                    raise
                # the other ranks continue, and may wait for this one to gather weights
                diverged = problem
        with _in_metrics(world):
            values = results.values(diverged)
        if SKIPPED_SAMPLES in values and passes.loss is not None and "loss" not in values:
            values = {"loss": of_nothing, **values}  # all were left out
        return values


def results_by_batch(
    model: Any,
    batches: Iterable[MicroBatch],
    split: Split,
    *,
    loss: Loss | None,
    precision: Precision,
    seed: int,
    group: int | None = None,  # noqa: ARG001
    is_sharded: bool = False,
) -> list[Results]:
    """Return the results of each batch, as if it were a split of its own. A batch whose samples
    the loss skips has none.
    """
    by_batch: list[Results] = []
    with evaluating(model, seed) as begin, _passes(model, split, loss, is_sharded) as passes:
        for index, batch in enumerate(batches):
            begin(index)
            results = Results(split.metrics, precision.device, None, passes.coupled_loss(precision))
            results.samples = len(batch.sample_ids)
            with precision.autocast():
                of_batch = passes.of(batch)
            if of_batch is None:
                continue
            with precision.autocast():
                results.add(*of_batch, is_padding=False)
            by_batch.append(results)
    return by_batch


def metric_by_batch(
    model: Any, batches: Iterable[MicroBatch], split: Split, *, metric: str, **how: Any
) -> list[Mean] | None:
    """Return one metric of each batch as a `Mean` with its count. Returns None if no metric has
    that name. `how` has the other arguments of `results_by_batch`.

    The mean over batches equals the split's metric only if the metric is a mean over samples; BLEU,
    for example, is not.
    """
    return means_by_batch(results_by_batch(model, batches, split, **how), metric)


def means_by_batch(by_batch: Iterable[Results], metric: str) -> list[Mean] | None:
    """Return one metric of the results of each batch, as `metric_by_batch` does."""
    means: list[Mean] = []
    for results in by_batch:
        mean = results.mean(metric, samples=results.samples)
        if mean is None:
            return None
        means.append(mean)
    return [Mean(float(mean.total), float(mean.count)) for mean in means]


@dataclass(frozen=True)
class FirstScores:
    """What one batch of a split says of its scores."""

    names: set[str] | None  # None if the whole split decides over some
    has_targets: bool  # False if each mean is one of nothing, or NaN of targets that are all equal


def first_scores(
    model: Any,
    batch: MicroBatch,
    split: Split,
    *,
    loss: Loss | None,
    precision: Precision,
    seed: int,
    group: int | None,
    is_sharded: bool = False,
) -> FirstScores:
    """Return the names of a split's scores, from one of its batches, and whether the batch has
    targets that count.

    Raises what the first evaluation would raise, such as `ConfigError` for a metric that returns no
    `Mean`.
    """
    with (
        evaluating(model, seed) as begin,
        _passes(model, split, loss, is_sharded) as passes,
        precision.autocast(),
    ):
        begin(0)
        results = Results(
            split.metrics, precision.device, None, passes.coupled_loss(precision, group)
        )
        of_batch = passes.of(batch)
        if of_batch is None:
            return FirstScores(None, has_targets=True)
        scores, pair, features = of_batch
        if pair is not None:
            from surefoot.metrics.classification import refuse_other_targets

            targets = _targets_in_memory(split, pair[1])
            for _, metric in named_metrics(split.metrics):
                refuse_other_targets(metric, pair[0], targets)
        results.add(scores, pair, features, is_padding=False)
        has_targets = _has_targets(results, batch)
        if results.objects or results.whole_split:  # a metric may return several values
            return FirstScores(None, has_targets)
        names = {*results.means, *split.derived}
        if results.coupled_loss is not None:
            names.add("loss")
        return FirstScores(names, has_targets)


def _has_targets(results: Results, batch: MicroBatch) -> bool:
    """Return False if each mean is one of nothing, or NaN of targets that are all equal."""
    means = list(chain.from_iterable(results.means.values()))
    if not means:
        return True
    if all(float(mean.count) == 0 for mean in means):
        return False
    return not (has_one_target(batch.batch) and all(_is_nan(mean) for mean in means))


def has_one_target(batch: Any) -> bool:
    """Return True if all targets of a batch are equal: all may be ignored."""
    targets = integer_targets(batch)
    return targets is not None and targets.size > 0 and bool((targets == targets[0]).all())


def _targets_in_memory(split: Split, targets: Any) -> Any:
    """Return all targets of a split of two tensors, whose batches have these `targets`; for other
    splits, return those of the batch.
    """
    columns = tensors_of(split.data)
    if len(columns) != 2 or not isinstance(targets, torch.Tensor):
        return targets
    all_targets = columns[1]
    is_same = all_targets.dtype == targets.dtype and all_targets.shape[1:] == targets.shape[1:]
    if is_same and all_targets.numel() <= _MANY_TARGETS:
        return all_targets
    return targets


def _is_nan(mean: Mean) -> bool:
    return float(mean.count) == 0 or math.isnan(float(mean.total))


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    loss: Loss | None = None,
    device: str = "auto",
    precision: str = "fp32",
    seed: int = 0,
) -> dict[str, float]:
    """Return the metrics of a split by name, and the loss if `loss` is not None.

    The model is moved to `device` and is otherwise unchanged. `loss` and `precision` have the same
    meaning as in `Run`.

    >>> import torch
    >>> from surefoot.metrics.classification import accuracy
    >>> data = torch.eye(3), torch.tensor([0, 1, 0])
    >>> evaluate(nn.Identity(), Split(data, metrics=accuracy), device="cpu")
    {'accuracy': 0.6666666666666666}
    """
    scoring = split.loss_of(loss)
    if not named_metrics(split.metrics) and scoring is None:
        raise ConfigError(
            "nothing-to-evaluate",
            problem="evaluate: this split has no metrics, and the call has no loss",
            remedy="write: evaluate(model, split, loss=loss), or"
            " Split(data, metrics=sf.metrics.accuracy)",
            setting="loss",
        )
    check_loss(loss, setting="loss")
    if isinstance(scoring, CoupledLoss):
        raise ConfigError(
            "coupled-loss-outside-run",
            problem="evaluate: the loss couples the samples of a batch",
            reason="its value depends on a run's batch_size",
            remedy="write: Split(data, loss=False, metrics=...); or use run.evaluate(), or"
            " sf.load(run_dir).evaluate()",
            setting="loss",
        )
    check_split("split", split.data, seed=seed)
    used_device = device_called(device)
    used_precision = chosen_precision(precision, used_device)
    batches_of = partial(
        in_order,
        split.data,
        batch_size=split.batch_size or _BATCH_SIZE,
        seed=seed,
        device=used_device,
        workers=split.workers or 0,
        collate=split.collate_fn,
    )
    modules = {"model": model}
    refuse_max_norm(modules, in_run=False)
    if isinstance(loss, nn.Module):
        modules["loss"] = loss
    model.to(used_device)
    with used_precision.numerics(), snapshot_of_buffers(buffers_of(modules)):
        if scoring is not None:
            _refuse_sum(model, batches_of(max_batches=1), scoring, used_precision, seed)
        values = evaluate_batches(
            model, batches_of(), split, loss=loss, precision=used_precision, seed=seed
        )
    metrics = numbers(values)
    return metrics | {name: function(metrics) for name, function in split.derived.items()}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return only the scalar metrics; a confusion matrix, for example, is left out.

    >>> numbers({"accuracy": 0.5, "confusion": [[1, 0], [1, 0]]})
    {'accuracy': 0.5}
    """
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _passes(model: Any, split: Split, loss: Loss | None, is_sharded: bool) -> SplitPasses:
    return SplitPasses(
        model,
        split.loss_of(loss),
        predict=split.predict,
        needs_pair=bool(named_metrics(split.metrics)),
        is_sharded=is_sharded,
    )


def mean_loss(
    model: Any, batch: MicroBatch, loss: Loss, *, precision: Precision, seed: int
) -> Mean | None:
    """Return the loss of one batch, which stays as it is, or None if the loss leaves it out."""
    copied = replace(batch, batch=deepcopy(batch.batch))  # a loss may write into it
    means = metric_by_batch(
        model, [copied], Split(None), metric="loss", loss=loss, precision=precision, seed=seed
    )
    return means[0] if means else None


def _refuse_sum(
    model: Any, batches: Iterable[MicroBatch], loss: Loss, precision: Precision, seed: int
) -> None:
    """Raise `ConfigError` if the loss of the first batch is not a mean over its samples."""

    def mean_of(piece: MicroBatch, more: int) -> Mean | None:
        return mean_loss(model, piece, loss, precision=precision, seed=seed + more)

    for batch in batches:
        pieces = pieces_of(batch, None)
        if pieces is not None:
            tolerance = FORMATS[precision.name].tolerance
            contract = check_contract(mean_of, pieces, tolerance=tolerance)
            if not contract.holds:
                raise refused_scores(contract, ["the split"], in_run=False)


def _in_metrics(world: World | None) -> AbstractContextManager[None]:
    return nullcontext() if world is None else world.heartbeat.during("metric")


@contextmanager
def evaluating(model: Any, seed: int) -> Iterator[Callable[[int], None]]:
    """Evaluate in this block without gradients; yield what seeds the random numbers of a batch."""
    key = stream_key(seed, "evaluate")
    modules = list(model.values()) if isinstance(model, dict) else [model]
    with untouched(), torch.no_grad(), evaluation_mode(modules):
        yield lambda index: seed_generators(fold(key, index))


def snapshot_of_buffers(buffers: Iterable[StepBuffer]) -> Snapshot:
    """Return a snapshot of buffers, which a pass may write in evaluation mode too."""
    before = Snapshot({}, keep=True)
    for each in buffers:
        before.keep_buffer(each.module, each.key)
    return before


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the modules and all submodules in evaluation mode; restore the mode of each at the
    end.
    """
    modes_before = []
    for module in modules:
        modes_before += [(submodule, submodule.training) for submodule in module.modules()]
    for submodule, _ in modes_before:
        submodule.training = False
    try:
        yield
    finally:
        for submodule, was_training in modes_before:
            submodule.training = was_training
