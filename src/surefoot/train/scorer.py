"""Evaluation of a run's splits and samples between steps. Evaluation does not change the run."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from surefoot.config.behavior import BUFFERS_IN_ORDER, mean_of_nothing
from surefoot.config.keywords import parse_score, unmonitored
from surefoot.data.gathering import sample_count
from surefoot.data.loader import MicroBatch
from surefoot.data.nested import tensors
from surefoot.data.pipeline import DataPipeline
from surefoot.distributed.strategy import Ranks
from surefoot.errors import ConfigError, DataError
from surefoot.metrics.contract import WholeSplitMetric, named_metrics
from surefoot.metrics.multiple_choice import eagerly
from surefoot.seeding import fold, seed_generators, stream_key, untouched
from surefoot.train.buffer_rules import buffers_of
from surefoot.train.compile import sole_or_all
from surefoot.train.error_causes import noting
from surefoot.train.evaluate import (
    FirstScores,
    Split,
    evaluate_batches,
    evaluation_mode,
    first_scores,
    has_one_target,
    metric_by_batch,
    results_by_batch,
    snapshot_of_buffers,
)
from surefoot.train.loop import Loss, State
from surefoot.train.metric_results import Results
from surefoot.train.precision import Precision

Made = TypeVar("Made")


class Evaluator:
    """Evaluator of splits and samples with the averaged weights if the run has them, otherwise with
    the trained weights.
    """

    def __init__(
        self,
        state: State,
        pipeline: DataPipeline,
        *,
        splits: Mapping[str, Split],
        loss: Loss | None,
        precision: Precision,
        compiles: bool,
        ranks: Ranks,
        behavior: int,
    ) -> None:
        self.state = state
        self.pipeline = pipeline
        self.splits = dict(splits)
        self.loss = loss
        self.precision = precision
        self.compiles = compiles
        self.ranks = ranks
        self.of_nothing = mean_of_nothing(behavior)
        self.compiled_models: dict[str, Any] = {}

    def names(self, *, at_end: bool) -> list[str]:
        """Return the names of the splits that are evaluated only after the last step (`at_end`), or
        of all other splits.
        """
        return [name for name, split in self.splits.items() if split.at_end == at_end]

    def scores(
        self, names: Sequence[str], *, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Return the metrics of splits as {"SPLIT/METRIC": value}. Raises `EvaluationStoppedError`
        if `stop` returns true.
        """
        forward = self._forward()
        models = self.models().values()
        metrics: dict[str, Any] = {}
        for name in names:
            split = self.splits[name]
            with self._evaluation_of(name, split, models):
                batches = self._batches(split, batch_size=split.batch_size)
                values = evaluate_batches(
                    forward,
                    batches,
                    split,
                    stop=stop,
                    world=self.pipeline.world,
                    of_nothing=self.of_nothing,
                    **self._how(),
                )
            derived = {metric: function(values) for metric, function in split.derived.items()}
            for metric, value in (values | derived).items():
                metrics[f"{name}/{metric}"] = value
        return metrics

    def predict(self, name: str, split: Split) -> Any:
        """Return the outputs of a split for each sample, in its order. Collective."""
        from surefoot.train.prediction import predict_batches

        forward = self._forward()
        with self._evaluation_of(name, split, self.models().values()):
            return predict_batches(
                forward,
                self._batches(split, batch_size=split.batch_size, counts_targets=False),
                split,
                loss=self.loss,
                precision=self.precision,
                seed=self.pipeline.seed,
                world=self.pipeline.world,
            )

    @contextmanager
    def _evaluation_of(
        self, name: str, split: Split, models: Collection[nn.Module]
    ) -> Iterator[None]:
        """Name the split in errors, and restore the buffers at the end."""
        with ExitStack() as stack:
            stack.enter_context(_naming(name))
            stack.enter_context(self.pipeline.world.heartbeat.during("evaluation"))
            stack.enter_context(self._kept_buffers())
            if split.predict is not None:
                # it may call the model any number of times, so it gets whole weights
                stack.enter_context(self.ranks.whole(models))
            yield

    def seconds(self, name: str, *, limit_s: float) -> float:
        """Return the estimated seconds to evaluate a split, measured on one to three batches. After
        `limit_s` no further batch begins.
        """
        split = self.splits[name]
        forward = self._forward()
        batch_size = split.batch_size
        if batch_size is not None and self.precision.device.type == "cpu":
            # a sample takes as long in a smaller batch
            batch_size = math.ceil(batch_size / 4)
        took_s = 0.0
        samples = 0
        for batch in self._batches(split, batch_size=batch_size, max_batches=3):
            start_s = perf_counter()
            with _naming(name), self._kept_buffers():
                # another metric may need more batches
                metric_by_batch(forward, [batch], split, metric="loss", **self._how())
            took_s += perf_counter() - start_s
            samples += len(batch.sample_ids)
            if took_s >= limit_s:
                break
        return took_s * sample_count(split.data) / max(1, samples)

    def training_samples(self, names: Sequence[str]) -> float:
        """Return the estimated number of training samples with the same total size as these splits.
        Runs no forward pass.
        """

        def size_of_first_sample(split: Split) -> int:
            (batch,) = self._batches(split, batch_size=1, max_batches=1)
            return max((tensor.numel() for tensor in tensors(batch.batch)), default=1)

        with untouched():
            total_size = 0
            for name in names:
                split = self.splits[name]
                total_size += sample_count(split.data) * size_of_first_sample(split)
            if not total_size:
                return 0.0
            training_size = size_of_first_sample(Split(self.pipeline.checked))
            return total_size / max(1, training_size)

    def results_by_batch(self, name: str, *, batches: int) -> list[Results]:
        """Return the results of each batch of a split, for at most `batches` batches of
        neighbors.
        """
        split = self.splits[name]
        batch_size = math.ceil(sample_count(split.data) / batches)
        neighbors = self._batches(split, batch_size=batch_size)
        with self._kept_buffers():
            return results_by_batch(self._forward(), neighbors, split, **self._how())

    def score_of(self, name: str, metric: str, batches: Sequence[Results]) -> float:
        """Return a metric of a split that has these batches."""
        values = batches[0].of_batches(batches)
        if metric in self.splits[name].derived:
            return float(self.splits[name].derived[metric](values))
        return float(values[metric])

    def _batches(
        self,
        split: Split,
        *,
        batch_size: int | None,
        max_batches: int | None = None,
        counts_targets: bool = True,
    ) -> Iterator[MicroBatch]:
        return self.pipeline.split(
            split.data,
            counts_targets=counts_targets,
            batch_size=batch_size,
            max_batches=max_batches,
            workers=split.workers,
            collate=split.collate_fn,
        )

    def first_batches(self, split: Split, *, at_least: int = 1) -> Iterator[MicroBatch]:
        """Yield the first batch of a split, the same on every rank, of this many samples or
        more.
        """
        batch_size = split.batch_size
        if at_least > 1:
            sizes = self.pipeline.sizes
            usual = sizes.micro_batch_size if sizes.unit == "samples" else at_least
            batch_size = max(at_least, batch_size or usual)
        return self._batches(split, batch_size=batch_size, max_batches=1)

    def check_metrics(self, monitored: Sequence[tuple[str, str]]) -> None:
        """Raise what the first evaluation would raise for metrics and monitored names, from one
        batch of a split, and `DataError` for a split without a target. Collective.

        `monitored` has pairs of a keyword and its "min SPLIT/METRIC".

        No batch is passed if that could not tell: for a split with `predict`, which may take long,
        and for a loss and metrics that only the whole split computes, unless all targets of the
        batch are equal.
        """
        for name, split in self.splits.items():
            if split.predict is not None:
                continue
            monitored_metrics: dict[str, tuple[str, str]] = {}
            for keyword, text in monitored:
                _, score = parse_score(text)
                split_name, _, metric = score.partition("/")
                if split_name == name:
                    monitored_metrics[metric] = (keyword, text)
            can_tell = self._can_batch_tell(split, monitored_metrics)
            for batch in self.first_batches(split):
                if not can_tell and not self._on_any_rank(has_one_target(batch.batch)):
                    continue
                first = self._first_scores(name, split, batch)
                if first.names is not None:
                    _refuse_unknown(monitored_metrics, name, first.names)
                if not self._on_any_rank(first.has_targets and not batch.is_padding):
                    self._refuse_without_targets(name, split)

    def _can_batch_tell(self, split: Split, monitored: Collection[str]) -> bool:
        """Return True if one batch computes a metric of a split, or tells whether the split has the
        monitored ones.
        """
        metrics = [metric for _, metric in named_metrics(split.metrics)]
        if not all(isinstance(metric, WholeSplitMetric) for metric in metrics):
            return True
        if metrics:
            return False
        certain = set(split.derived)
        if split.loss_of(self.loss) is not None:
            certain.add("loss")
        return not certain.issuperset(monitored)

    def _refuse_without_targets(self, name: str, split: Split) -> None:
        batches = 0
        for batch in self._batches(split, batch_size=split.batch_size):
            batches += 1
            first = self._first_scores(name, split, batch)
            if self._on_any_rank(first.has_targets and not batch.is_padding):
                return
        raise DataError(
            "split-without-targets",
            problem=f"split {name!r} has no target that counts: its loss and metrics are means of"
            " nothing",
            reason="a mean of nothing is not a number, so nothing could be scored",
            remedy=[
                "check its labels: all of them may be ignored, such as -100",
                "leave the split out",
            ],
            split=name,
            batches=batches,
        )

    def _first_scores(self, name: str, split: Split, batch: MicroBatch) -> FirstScores:
        with _naming(name), self._kept_buffers(), eagerly():
            return first_scores(sole_or_all(self.models()), batch, split, **self._how())

    def _on_any_rank(self, holds: bool) -> bool:
        return any(self.pipeline.world.gathered(holds))

    def _how(self) -> dict[str, Any]:
        sizes = self.pipeline.sizes
        group = sizes.batch_size if sizes.unit == "samples" else None
        return {
            "loss": self.loss,
            "precision": self.precision,
            "seed": self.pipeline.seed,
            "group": group,
            "is_sharded": self.pipeline.parallel.kind == "fsdp" and self.pipeline.world.size > 1,
        }

    def leave_out_end(self) -> None:
        """Remove the splits that are evaluated at the end, so that a choice between runs does not
        depend on them.
        """
        self.splits = {name: split for name, split in self.splits.items() if not split.at_end}

    def panels(self, make: Callable[[Any], Made]) -> Made:
        """Return `make(model)`, called like `sample` but in the run's precision."""
        with self.precision.autocast():
            return self.sample(make, stream="panels")

    def sample(
        self,
        make: Callable[[Any], Made],
        *,
        stream: Literal["sample", "panels"] = "sample",
        rank: int = 0,
    ) -> Made:
        """Return `make(model)`, called in evaluation mode, without gradients and with its own
        random seed, which differs by `rank`.
        """
        model = next(iter(self.models().values()))
        heartbeat = self.pipeline.world.heartbeat
        in_user_code = heartbeat.during("sample_fn" if stream == "sample" else "panels_fn")
        with (
            self.ranks.whole([model]),
            self._kept_buffers(),
            untouched(),
            torch.no_grad(),
            evaluation_mode([model]),
        ):
            of_rank = (rank,) if rank else ()
            key = stream_key(self.pipeline.seed, stream)
            seed_generators(fold(key, self.state.step, *of_rank))
            with in_user_code:
                return make(model)

    def _kept_buffers(self) -> AbstractContextManager[Any]:
        if self.state.buffers.behavior < BUFFERS_IN_ORDER:
            return nullcontext()
        averages = {name: average.model for name, average in self.state.ema_models.items()}
        return snapshot_of_buffers([*self.state.buffers.owners, *buffers_of(averages)])

    def models(self) -> dict[str, nn.Module]:
        """Return the models to evaluate by name: their averages, if the run has them."""
        models = dict(self.state.models)
        for name, average in self.state.ema_models.items():
            average.refresh(self.state.models[name])
            models[name] = average.model
        return models

    def _forward(self) -> Any:
        models = self.models()
        if not self.compiles:
            return sole_or_all(models)
        if not self.compiled_models:  # those of training are specialized to its mode and shapes
            for name, model in models.items():
                self.compiled_models[name] = torch.compile(model, dynamic=False)
        return sole_or_all(self.compiled_models)


def _refuse_unknown(monitored: Mapping[str, tuple[str, str]], split: str, names: set[str]) -> None:
    """Raise `ConfigError` for a monitored metric that a split does not have."""
    for metric, (by, text) in monitored.items():
        if metric not in names:
            available = [f"{split}/{each}" for each in sorted(names)]
            why = f"available metrics: {', '.join(available)}"
            raise unmonitored(by, text, why, scores=available)


@contextmanager
def _naming(split: str) -> Iterator[None]:
    try:
        with noting(f"in the evaluation of the split {split!r}"):
            yield
    except (ConfigError, DataError) as problem:
        raise problem.inside(f"split {split!r}") from problem.__cause__
