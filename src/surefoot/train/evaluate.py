"""Scores over a whole split, as counted means: they depend neither on the batch size nor on what the run does meanwhile."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from surefoot.config.keywords import known_keywords
from surefoot.data.dataset_checks import check_split
from surefoot.data.loader import MicroBatch, in_order
from surefoot.distributed.world import World, device_called
from surefoot.errors import ConfigError, DivergedError
from surefoot.mean import Mean, add_each
from surefoot.seeding import fold, seed_generators, stream_key, untouched
from surefoot.train.distributed_eval import as_recorded, scores_together
from surefoot.train.precision import Precision
from surefoot.train.precision import precision as chosen_precision

Loss = Callable[[Any, Any], Any]
Score = Callable[[Any, Any], Mean | Mapping[str, Mean]]
_BATCH_SIZE = 16  # where the split names none; changes no score


@runtime_checkable
class _MetricObject(Protocol):
    """An object of torchmetrics or the like, which is called with predictions and targets."""

    def update(self, *given: Any) -> None: ...
    def compute(self) -> Any: ...


@known_keywords
@dataclass(frozen=True)
class Split:
    """A named data set to score.

    Each of `scores` is a function of (model, batch) that returns a counted `Mean`, logged under the function's name, or a
    dictionary of them. The run's loss is scored beside them unless `loss` is false. `derived` are functions of all means of
    this split by name, such as `perplexity`. `batch_size` changes memory and speed, never a score.
    `outputs`, a function of (model, batch), returns a list with one entry a sample; `judge` makes scores by name of all of
    them together, such as BLEU. What it returns that is not a number (a confusion matrix, a text) stands in the records only.
    `at_end`: scored once, when the run is over, with the best checkpoint's weights if there is one: a test split.
    """

    data: Any
    scores: Score | Sequence[Score] = ()
    batch_size: int | None = None
    loss: bool = True
    derived: Mapping[str, Callable[[Mapping[str, float]], float]] = field(default_factory=dict)
    outputs: Callable[[Any, Any], list[Any]] | None = None
    judge: Callable[[list[Any]], Mapping[str, Any]] | None = None
    at_end: bool = False

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"Split(batch_size={self.batch_size}): at least one sample is scored at once")
        by_name: Any = self.scores if isinstance(self.scores, Mapping) else {}
        for score in by_name.values() or self.score_functions:
            if isinstance(score, _MetricObject):
                raise ConfigError(
                    f"Split: {getattr(score, '__name__', type(score).__name__)} is a metric object,"
                    " and a score is a function of (model, batch)\n"
                    "  let the split collect what the metric needs, and compute it once:\n"
                    "  outputs=lambda model, batch: list(zip(model(batch[0]), batch[1])),\n"
                    '  judge=lambda pairs: {"score": float(metric(*map(torch.stack, zip(*pairs))))}'
                )
        if by_name:
            raise ConfigError(
                "Split: scores is a dictionary\n  give its functions, which have names: scores=[*scores.values()]"
            )
        names = (
            [getattr(score, "__name__", "") for score in self.score_functions] + ["loss"] * self.loss + [*self.derived]
        )
        wrong = next((name for place, name in enumerate(names) if not name or name in names[:place]), None)
        if wrong is not None:
            what = f"two scores called {wrong!r}" if wrong else "a score function without a name"
            raise ConfigError(f"Split: {what}: one would hide the other; write `def some_name(model, batch): ...`")
        if (self.outputs is None) != (self.judge is None):
            raise ConfigError(
                f"Split: {'outputs' if self.outputs is None else 'judge'} is missing:"
                f" outputs(model, batch) are collected, and judge(all of them) scores"
            )

    @property
    def score_functions(self) -> tuple[Score, ...]:
        """The functions among `scores`, of which there may be one alone."""
        return (self.scores,) if callable(self.scores) else tuple(self.scores)


class EvaluationStoppedError(Exception):
    """The evaluation was given up, because whoever asked for it has to stop."""


def scored(
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
    """Return the mean of every score over all batches, and what `judge` makes of all `outputs`.

    Waits for the device once, at the end, unless `outputs` does. Leaves modes and random generators as they were. A loss's
    plain mean is weighted by the batch's count. Raises `EvaluationStoppedError` if `stop` says so between two batches.
    In a `world` of several ranks each gives equally many batches of its own and returns the same. Collective then, and
    `stop` must be agreed.
    """
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    sums: dict[str, Mean] = {}
    outputs: list[list[Any]] = []
    void: list[bool] = []
    diverged: DivergedError | None = None
    with _evaluating(model, seed) as begin:
        for place, batch in enumerate(batches):
            if stop():
                raise EvaluationStoppedError
            begin(place * ranks + rank)
            try:
                with precision.autocast():
                    found = _counted(model, batch, split, loss)
                    made = [] if split.outputs is None else split.outputs(model, batch.batch)
            except DivergedError as problem:
                if ranks == 1:
                    raise
                diverged = problem  # the other ranks go on, and may need this one: to gather weights, and to stop
                continue
            add_each(sums, {name: Mean(0.0, 0) for name in found} if batch.is_padding else found)
            outputs.append(made)
            void.append(batch.is_padding)
    if world is not None and ranks > 1:
        return scores_together(world, sums, outputs, void, judge=split.judge, diverged=diverged)
    judged = {} if split.judge is None else as_recorded(split.judge([each for made in outputs for each in made]))
    return {name: float(mean.value) for name, mean in sums.items()} | judged


def scored_by_batch(
    model: Any,
    batches: Iterable[MicroBatch],
    split: Split,
    *,
    score: str,
    loss: Loss | None,
    precision: Precision,
    seed: int,
) -> list[Mean] | None:
    """Return one score of each batch by itself, counted; None if no score has that name. Otherwise as `scored`.

    The mean of what a judge says of batches is the score of the split only if that is a mean over samples, as BLEU is not.
    """
    found: list[Mean] = []
    with _evaluating(model, seed) as begin:
        for place, batch in enumerate(batches):
            begin(place)
            with precision.autocast():
                mean = _counted(model, batch, split, loss).get(score)
                outputs = split.outputs(model, batch.batch) if mean is None and split.outputs is not None else []
            mean = _judged_alone(split, outputs, score=score) if mean is None else mean
            if mean is None:
                return None
            found.append(mean.detach())
    return [Mean(float(mean.total), float(mean.count)) for mean in found]


def evaluate(
    model: nn.Module, split: Split, *, device: str = "auto", precision: str = "fp32", seed: int = 0
) -> dict[str, float]:
    """Every score of a split by name, of a model that is moved to the device and otherwise left as it was.

    `precision` is that of the passes, as in `Run`. A split that scores the run's loss has none here: `Split(..., loss=False)`.

    >>> import torch
    >>> from surefoot.metrics.classification import accuracy
    >>> data = torch.eye(3), torch.tensor([0, 1, 0])
    >>> evaluate(nn.Identity(), Split(data, scores=accuracy, loss=False), device="cpu")
    {'accuracy': 0.6666666666666666}
    """
    if split.loss:
        raise ConfigError("evaluate: outside a run there is no loss to score: write Split(..., loss=False)")
    check_split("split", split.data, seed=seed)
    place = device_called(device)
    computed_in = chosen_precision(precision, place)
    batches = in_order(split.data, batch_size=split.batch_size or _BATCH_SIZE, seed=seed, device=place)
    with computed_in.numerics():
        found = scored(model.to(place), batches, split, loss=None, precision=computed_in, seed=seed)
    scores = numbers(found)
    return scores | {name: function(scores) for name, function in split.derived.items()}


def numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The scores among what was found: a confusion matrix, say, is none.

    >>> numbers({"accuracy": 0.5, "confusion": [[1, 0], [1, 0]]})
    {'accuracy': 0.5}
    """
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _judged_alone(split: Split, outputs: list[Any], *, score: str) -> Mean | None:
    """A score of a part of the outputs; None where there is none of that name, or the judge wants all of them."""
    value = None
    with suppress(Exception):  # references for the whole split, say: then a part cannot be judged
        value = None if split.judge is None else split.judge(outputs).get(score)
    return Mean(value * len(outputs), len(outputs)) if isinstance(value, int | float) else None


@contextmanager
def _evaluating(model: Any, seed: int) -> Iterator[Callable[[int], None]]:
    """No gradients, and everything in evaluation mode; yields what seeds the generators for the batch of a place."""
    key = stream_key(seed, "evaluate")
    with untouched(), torch.no_grad(), evaluation_mode([*model.values()] if isinstance(model, dict) else [model]):
        yield lambda place: seed_generators(fold(key, place))


def _counted(model: Any, batch: MicroBatch, split: Split, loss: Loss | None) -> dict[str, Mean]:
    found = {} if loss is None or not split.loss else _losses(loss(model, batch.batch), batch.count)
    for score in split.score_functions:
        found |= _means(score(model, batch.batch), score.__name__)
    return found


def _means(result: Any, name: str) -> Mapping[str, Mean]:
    """What a score function returned, by name; `ConfigError` where it is no counted mean."""
    means = result if isinstance(result, Mapping) else {name: result}
    for each in means.values():
        if not isinstance(each, Mean):
            raise ConfigError(
                f"the score {name!r} returned a {type(each).__name__}, which says not over how many samples it is a mean\n"
                "  return surefoot.Mean(total, count): the sum over the batch, and how many were added; or a dictionary of them"
            )
    return means


def _losses(result: Any, count: int) -> dict[str, Mean]:
    result, further = result if isinstance(result, tuple) else (result, {})
    if isinstance(result, Tensor) and result.ndim > 0:
        raise ConfigError(f"the loss is not one number but a tensor of shape {tuple(result.shape)}: return its mean")
    if isinstance(result, Tensor):
        result = Mean(result.detach().double() * count if count else 0.0, count)
    return {"loss": result, **further}


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Every part of the modules in evaluation mode, and afterwards each in the mode it was in."""
    were = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in were:
        part.training = False
    try:
        yield
    finally:
        for part, training in were:
            part.training = training
