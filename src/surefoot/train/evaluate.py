"""Metrics of a split, computed in one epoch and independent of the batch size and of the run's other work."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from surefoot.config.keywords import known_keywords
from surefoot.data.dataset_checks import check_split
from surefoot.data.loader import MicroBatch, in_order
from surefoot.distributed.world import World, device_called
from surefoot.errors import ConfigError, DivergedError
from surefoot.mean import Mean
from surefoot.metrics.contract import Metric, named_metrics, refuse_twice
from surefoot.metrics.multiple_choice import ChoiceBatch, eagerly
from surefoot.seeding import fold, seed_generators, stream_key, untouched
from surefoot.train.loss_accumulator import check_loss, loss_parts
from surefoot.train.metric_results import Results
from surefoot.train.precision import Precision
from surefoot.train.precision import precision as chosen_precision

Loss = Callable[[Any, Any], Any]
_BATCH_SIZE = 16  # if the split names none; changes no metric


@known_keywords
@dataclass(frozen=True)
class Split:
    """A data set to evaluate in order, with its metrics.

    `metrics` is one metric, several metrics, or a dictionary of metrics by name. A metric is a function of (outputs,
    targets) that returns a `Mean`, recorded under the function's name, or a dictionary of `Mean` by name. A metric may also
    be a Metric or MetricCollection of torchmetrics, or `sf.metrics.whole_split(function)` for a value that is not a mean
    over samples.

    `predict(model, batch)` returns (outputs, targets). By default surefoot uses the pair (outputs, targets) that the loss
    returns in addition to its mean. If the loss returns no pair, surefoot uses `(model(inputs), targets)` for a batch
    (inputs, targets). The default calls the model only once per batch. The run's loss is evaluated too unless `loss` is
    false. `derived` maps names to functions of all means of this split, such as `perplexity`. `batch_size` affects memory
    and speed, but no metric. If `at_end` is true, the split is evaluated once, after the last step, with the best
    checkpoint's weights if one exists. `workers` and `collate_fn` are by default those of the run.

    `data` may be a `DataLoader` of a map-style data set. The split then has its data set, batch size, workers and
    collate function, and evaluates every sample once, in order.
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

    def __post_init__(self) -> None:
        if isinstance(self.data, DataLoader):
            from surefoot.data.torch_loader import read_split_loader

            vars(self).update(read_split_loader(self.data, self.batch_size, self.workers, self.collate_fn))
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"Split(batch_size={self.batch_size}): batch_size must be 1 or more")
        refuse_twice([name for name, _ in named_metrics(self.metrics)] + ["loss"] * self.loss + [*self.derived])


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
    stop: Callable[[], bool] = lambda: False,
    world: World | None = None,
) -> dict[str, Any]:
    """Return the loss and every metric over all batches, by name.

    The function waits for the device once, at the end, unless `predict` waits or a metric needs the whole split. Module
    modes and random generators are restored. A loss without its own count is weighted by the batch's count. Raises
    `EvaluationStoppedError` if `stop` returns true between two batches. The call is collective if `world` has several
    ranks. Each rank then passes its own batches, equally many on all ranks. All ranks must agree on `stop` and return the
    same metrics.
    """
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    results, diverged = Results(split.metrics, precision.device, world), None
    with _evaluating(model, seed) as begin, _Passes(model, split, loss) as passes:
        for index, batch in enumerate(batches):
            if stop():
                raise EvaluationStoppedError
            begin(index * ranks + rank)
            try:
                with precision.autocast():
                    results.add(*passes.of(batch), is_padding=batch.is_padding)
            except DivergedError as problem:
                if ranks == 1:
                    raise
                diverged = problem  # the other ranks continue, and may wait for this one to gather weights
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
) -> list[Mean] | None:
    """Return one metric of each batch as a `Mean` with its count. Returns None if no metric has that name.

    The mean over batches equals the split's metric only if the metric is a mean over samples; BLEU, for example, is not.
    """
    means: list[Mean] = []
    with _evaluating(model, seed) as begin, _Passes(model, split, loss) as passes:
        for index, batch in enumerate(batches):
            begin(index)
            results = Results(split.metrics, precision.device, None)
            with precision.autocast():
                results.add(*passes.of(batch), is_padding=False)
            if (mean := results.mean(metric, samples=len(batch.sample_ids))) is None:
                return None
            means.append(mean)
    return [Mean(float(mean.total), float(mean.count)) for mean in means]


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

    The model is moved to `device` and is otherwise unchanged. `loss` and `precision` have the same meaning as in `Run`.

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
        values = evaluate_batches(model.to(used_device), batches, split, loss=loss, precision=used_precision, seed=seed)
    metrics = numbers(values)
    return metrics | {name: function(metrics) for name, function in split.derived.items()}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return only the scalar metrics; a confusion matrix, for example, is left out.

    >>> numbers({"accuracy": 0.5, "confusion": [[1, 0], [1, 0]]})
    {'accuracy': 0.5}
    """
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


class _Passes:
    def __init__(self, model: Any, split: Split, loss: Loss | None) -> None:
        self.model, self.loss, self.predict = model, loss if split.loss else None, split.predict
        self.needs_pair = bool(named_metrics(split.metrics))
        self.last_call: tuple[Any, Tensor, int] | None = None  # input, output and the output's version
        self.hook: Any = None

    def __enter__(self) -> "_Passes":
        # a loss that returns no pair may call `model(inputs)`; the hook saves a second call
        can_hook = isinstance(self.model, nn.Module) and not isinstance(self.model, torch.jit.ScriptModule)
        if can_hook and self.needs_pair and self.loss is not None and self.predict is None:
            self.hook = self.model.register_forward_hook(self._note_call, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.hook is not None:
            self.hook.remove()

    def of(self, batch: MicroBatch) -> tuple[dict[str, Mean], tuple[Any, Any] | None]:
        pair = None if self.predict is None or not self.needs_pair else self._predicted(batch.batch)
        means: dict[str, Mean] = {}
        if self.loss is not None:
            mean, beside, loss_pair = loss_parts(self.loss(self.model, batch.batch))
            means = {"loss": _counted(mean, batch.count), **beside}
            pair = loss_pair if pair is None and self.needs_pair else pair
        if self.needs_pair and pair is None:
            pair = self._default_pair(batch.batch)
        self.last_call = None
        return means, pair

    def _predicted(self, batch: Any) -> tuple[Any, Any]:
        assert self.predict is not None
        pair = self.predict(self.model, batch)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(
                f"Split: predict returned {type(pair).__name__}, but metrics need outputs and targets\n"
                "  write: return outputs, targets"
            )
        return pair

    def _default_pair(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, list | tuple) or len(batch) != 2 or isinstance(self.model, dict):
            which = "several models" if isinstance(self.model, dict) else f"a batch of type {type(batch).__name__}"
            raise ConfigError(
                f"Split: the metrics need (outputs, targets), which have no default for {which}\n"
                "  return them from the loss: return loss, (outputs, targets)\n"
                "  or from the split: Split(data, metrics=..., predict=lambda model, batch: (outputs, targets))"
            )
        inputs, targets = batch
        if self.last_call is not None:
            last_inputs, output, version = self.last_call
            if last_inputs is inputs and output._version == version:
                return output, targets
        with eagerly() if isinstance(batch, ChoiceBatch) else nullcontext():
            return self.model(inputs), targets

    def _note_call(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        alone = len(inputs) == 1 and not named and isinstance(output, Tensor)
        self.last_call = (inputs[0], output, output._version) if alone else None


def _counted(mean: Any, count: int) -> Mean:
    if isinstance(mean, Tensor) and mean.ndim > 0:
        raise ConfigError(f"the loss is not a scalar but a tensor of shape {tuple(mean.shape)}: return its mean")
    if isinstance(mean, Mean):
        return mean
    return Mean(mean.detach().double() * count if count else 0.0, count)


@contextmanager
def _evaluating(model: Any, seed: int) -> Iterator[Callable[[int], None]]:
    key = stream_key(seed, "evaluate")
    with untouched(), torch.no_grad(), evaluation_mode([*model.values()] if isinstance(model, dict) else [model]):
        yield lambda index: seed_generators(fold(key, index))


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the modules and all submodules in evaluation mode; restore the mode of each at the end."""
    were = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in were:
        part.training = False
    try:
        yield
    finally:
        for part, training in were:
            part.training = training
