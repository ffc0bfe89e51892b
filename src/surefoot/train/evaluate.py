"""Metrics of a split, computed in one epoch and independent of the batch size and of the run's
other work.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from surefoot.config.keywords import known_keywords
from surefoot.data.dataset_checks import check_split
from surefoot.data.loader import MicroBatch, in_order
from surefoot.distributed.world import World, device_called
from surefoot.errors import ConfigError, DivergedError
from surefoot.mean import Mean
from surefoot.metrics.contract import Metric, named_metrics, refuse_twice
from surefoot.seeding import fold, seed_generators, stream_key, untouched
from surefoot.train.loss_accumulator import check_loss
from surefoot.train.metric_results import Results
from surefoot.train.precision import Precision
from surefoot.train.precision import precision as chosen_precision
from surefoot.train.split_passes import SplitPasses
from surefoot.train.step_watch import CoupledLoss

Loss = Callable[[Any, Any], Any]
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
    once per batch. The run's loss is evaluated too unless `loss` is false. `derived` maps names to
    functions of all means of this split, such as `perplexity`. `batch_size` affects memory and
    speed, but no metric. If `at_end` is true, the split is evaluated once, after the last step,
    with the best checkpoint's weights if one exists. `workers` and `collate_fn` are by default
    those of the run.

    `data` may be a `DataLoader` of a map-style data set. The split then has its data set, batch
    size, workers and collate function, and evaluates every sample once, in order.
    """

    data: Any
    metrics: Metric | Iterable[Metric] | Mapping[str, Metric] = ()
    batch_size: int | None = None
    loss: bool = True
    predict: Callable[[Any, Any], tuple[Any, Any]] | None = None
    derived: Mapping[str, Callable[[Mapping[str, float]], float]] = field(default_factory=dict)
    at_end: bool = False
    workers: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    untaken: str = field(
        default="", init=False, repr=False, compare=False
    )  # what is not taken from a DataLoader

    def __post_init__(self) -> None:
        if isinstance(self.data, DataLoader):
            from surefoot.data.torch_loader import read_split_loader

            vars(self).update(
                read_split_loader(self.data, self.batch_size, self.workers, self.collate_fn)
            )
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                f"Split(batch_size={size!r}): batch_size must be a whole number of samples, 1 or more"
            )
        refuse_twice(
            [name for name, _ in named_metrics(self.metrics)]
            + ["loss"] * self.loss
            + [*self.derived]
        )


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
    stop: Callable[[], bool] = lambda: False,
    world: World | None = None,
) -> dict[str, Any]:
    """Return the loss and every metric over all batches, by name. A coupled loss is the mean over
    groups of `group` samples.

    The function waits for the device once, at the end, unless `predict` waits or a metric needs the
    whole split. Module modes and random generators are restored. A loss without its own count is
    weighted by the batch's count. Raises `EvaluationStoppedError` if `stop` returns true between
    two batches. The call is collective if `world` has several ranks. Each rank then passes its own
    batches, equally many on all ranks. All ranks must agree on `stop` and return the same metrics.
    """
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    diverged: DivergedError | None = None
    with _evaluating(model, seed) as begin, _passes(model, split, loss) as passes:
        results = Results(
            split.metrics, precision.device, world, passes.coupled_loss(precision, group)
        )
        for index, batch in enumerate(batches):
            if stop():
                raise EvaluationStoppedError
            begin(index * ranks + rank)
            try:
                with precision.autocast():
                    of_batch = passes.of(batch)
                    with _in_metrics(world):
                        results.add(*of_batch, is_padding=batch.is_padding)
            except DivergedError as problem:
                if ranks == 1:
                    raise
                diverged = (
                    problem  # the other ranks continue, and may wait for this one to gather weights
                )
        with _in_metrics(world):
            return results.values(diverged)


def metric_by_batch(
    model: Any,
    batches: Iterable[MicroBatch],
    split: Split,
    *,
    metric: str,
    loss: Loss | None,
    precision: Precision,
    seed: int,
    group: int | None = None,  # noqa: ARG001
) -> list[Mean] | None:
    """Return one metric of each batch as a `Mean` with its count. Returns None if no metric has
    that name.

    The mean over batches equals the split's metric only if the metric is a mean over samples; BLEU,
    for example, is not.
    """
    means: list[Mean] = []
    with _evaluating(model, seed) as begin, _passes(model, split, loss) as passes:
        for index, batch in enumerate(batches):
            begin(index)
            results = Results(split.metrics, precision.device, None, passes.coupled_loss(precision))
            with precision.autocast():
                results.add(*passes.of(batch), is_padding=False)
            if (mean := results.mean(metric, samples=len(batch.sample_ids))) is None:
                return None
            means.append(mean)
    return [Mean(float(mean.total), float(mean.count)) for mean in means]


def names_of_metrics(
    model: Any,
    batch: MicroBatch,
    split: Split,
    *,
    loss: Loss | None,
    precision: Precision,
    seed: int,
    group: int | None,
) -> set[str] | None:
    """Return the names of a split's metrics, from one of its batches. Returns None if the whole
    split decides over some names.

    Raises what the first evaluation would raise, such as `ConfigError` for a metric that returns no
    `Mean`.
    """
    with (
        _evaluating(model, seed) as begin,
        _passes(model, split, loss) as passes,
        precision.autocast(),
    ):
        begin(0)
        results = Results(
            split.metrics, precision.device, None, passes.coupled_loss(precision, group)
        )
        results.add(*passes.of(batch), is_padding=False)
        if results.objects or results.whole_split:  # a metric may return several values
            return None
        return {
            *results.means,
            *split.derived,
            *(["loss"] if results.coupled_loss is not None else []),
        }


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
    if not named_metrics(split.metrics) and (loss is None or not split.loss):
        raise ConfigError(
            "evaluate: this split has no metrics, and the call has no loss\n"
            "  write: evaluate(model, split, loss=loss), or Split(data, metrics=sf.metrics.accuracy)"
        )
    check_loss(loss, setting="loss")
    if split.loss and isinstance(loss, CoupledLoss):
        raise ConfigError(
            "evaluate: the loss couples the samples of a batch, so its value depends on a run's batch_size\n"
            "  write: Split(data, loss=False, metrics=...); or use run.evaluate(), or sf.load(run_dir).evaluate()"
        )
    check_split("split", split.data, seed=seed)
    used_device = device_called(device)
    used_precision = chosen_precision(precision, used_device)
    batches = in_order(
        split.data,
        batch_size=split.batch_size or _BATCH_SIZE,
        seed=seed,
        device=used_device,
        workers=split.workers or 0,
        collate=split.collate_fn,
    )
    with used_precision.numerics():
        values = evaluate_batches(
            model.to(used_device), batches, split, loss=loss, precision=used_precision, seed=seed
        )
    metrics = numbers(values)
    return metrics | {name: function(metrics) for name, function in split.derived.items()}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return only the scalar metrics; a confusion matrix, for example, is left out.

    >>> numbers({"accuracy": 0.5, "confusion": [[1, 0], [1, 0]]})
    {'accuracy': 0.5}
    """
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _passes(model: Any, split: Split, loss: Loss | None) -> SplitPasses:
    needs_pair = bool(named_metrics(split.metrics))
    return SplitPasses(
        model, loss if split.loss else None, predict=split.predict, needs_pair=needs_pair
    )


def _in_metrics(world: World | None) -> AbstractContextManager[None]:
    return nullcontext() if world is None else world.heartbeat.during("metric")


@contextmanager
def _evaluating(model: Any, seed: int) -> Iterator[Callable[[int], None]]:
    key = stream_key(seed, "evaluate")
    with (
        untouched(),
        torch.no_grad(),
        evaluation_mode([*model.values()] if isinstance(model, dict) else [model]),
    ):
        yield lambda index: seed_generators(fold(key, index))


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the modules and all submodules in evaluation mode; restore the mode of each at the
    end.
    """
    were = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in were:
        part.training = False
    try:
        yield
    finally:
        for part, training in were:
            part.training = training
