"""The forward pass over a batch of a split: the means of its loss, and the outputs and targets of
its metrics.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from surefoot.data.loader import MicroBatch
from surefoot.errors import ConfigError, DataError, first_line
from surefoot.mean import Mean
from surefoot.metrics.multiple_choice import ChoiceBatch, eagerly
from surefoot.train.error_causes import explained, explaining_shapes
from surefoot.train.loss_accumulator import loss_parts, one_number
from surefoot.train.precision import Precision
from surefoot.train.step_watch import CoupledLoss, Loss


class SplitPasses:
    """The passes over the batches of a split. `needs_pair`: there are metrics, which need (outputs,
    targets). `is_sharded`: several ranks gather the model's weights, so no batch may be left out.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss | None,
        *,
        predict: Callable[[Any, Any], tuple[Any, Any]] | None,
        needs_pair: bool,
        is_sharded: bool = False,
    ) -> None:
        self.model = model
        self.loss = loss
        self.predict = predict
        self.needs_pair = needs_pair
        self.is_sharded = is_sharded
        self.coupled = loss if isinstance(loss, CoupledLoss) else None
        # input, output and the output's version
        self.last_call: tuple[Any, Tensor, int] | None = None
        self.hook: Any = None

    def __enter__(self) -> "SplitPasses":
        # a loss that returns no pair may call `model(inputs)`; the hook saves a second call
        can_hook = isinstance(self.model, nn.Module) and not isinstance(
            self.model, torch.jit.ScriptModule
        )
        if can_hook and self.needs_pair and self.loss is not None and self.predict is None:
            self.hook = self.model.register_forward_hook(self._note_call, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_hook()

    def coupled_loss(
        self, precision: Precision, group: int | None = None
    ) -> Callable[[list[Any]], float] | None:
        """Return what computes a coupled loss from the features of all batches, or None for a mean
        over samples.
        """
        if self.coupled is None:
            return None
        from surefoot.train.gradient_cache import loss_of_groups

        return partial(
            loss_of_groups, self.coupled.loss_fn, self.model, precision=precision, group=group
        )

    def of(self, batch: MicroBatch) -> tuple[dict[str, Mean], tuple[Any, Any] | None, Any] | None:
        """Return the means of the loss, (outputs, targets), and the features of a coupled loss; or
        None if the loss or `collate_fn` leaves the batch out. Calls the model once without
        `predict`.
        """
        if batch.batch is None:
            if self.is_sharded:
                _refuse_missing("collate_fn")
            return None
        means: dict[str, Mean] = {}
        features = None
        pair = None
        if self.predict is not None and self.needs_pair:
            pair = self._predicted(batch, self.predict)
        if self.coupled is not None:
            with _explaining("encode_fn", batch):
                features = self.coupled.encode_fn(self.model, batch.batch)
            is_pair = isinstance(features, tuple) and len(features) == 2
            if pair is None and self.needs_pair and is_pair:
                pair = features
        elif self.loss is not None:
            with _explaining("the loss", batch):
                returned = self.loss(self.model, batch.batch)
            if returned is None:
                self.last_call = None
                if self.is_sharded:
                    _refuse_missing("loss")
                return None
            mean, logged, loss_pair = loss_parts(returned)
            means = {"loss": _counted(mean, batch.count), **logged}
            if pair is None and self.needs_pair and loss_pair is not None:
                pair = loss_pair
                self._remove_hook()
        if self.needs_pair and pair is None:
            with _explaining("the model", batch):
                pair = self._default_pair(batch.batch)
        self.last_call = None
        return means, pair, features

    def outputs(self, batch: MicroBatch) -> Any:
        """Return the outputs of a batch, as metrics get them. A batch without targets, which only a
        split without a loss may have, is the input of the model.
        """
        inputs = batch.batch
        if isinstance(inputs, list | tuple) and len(inputs) == 1:
            inputs = inputs[0]
            is_input = True
        else:
            is_input = isinstance(inputs, Tensor)
        if self.predict is None and self.loss is None and is_input:
            with _explaining("the model", batch):
                return self.model(inputs)
        of_batch = self.of(batch)
        if of_batch is None:
            samples = len(batch.sample_ids)
            raise ConfigError(
                "outputs-left-out",
                problem=f"run.predict: the loss or collate_fn returned None for {samples} samples",
                reason="it returns the outputs of every sample",
                remedy="write Split(data, loss=False), or leave the samples out of the data set",
                setting="loss",
                count=samples,
            )
        _, pair, features = of_batch
        return features if pair is None else pair[0]

    def _remove_hook(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def _predicted(
        self, batch: MicroBatch, predict: Callable[[Any, Any], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        with _explaining("predict", batch):
            pair = predict(self.model, batch.batch)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(
                "predict-without-pair",
                problem=f"Split: predict returned {type(pair).__name__}, but metrics need outputs"
                " and targets",
                remedy="write: return outputs, targets",
                setting="predict",
                returned=type(pair).__name__,
            )
        return pair

    def _default_pair(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, list | tuple) or len(batch) != 2 or isinstance(self.model, dict):
            which = f"a batch of type {type(batch).__name__}"
            if isinstance(self.model, dict):
                which = "several models"
            raise ConfigError(
                "outputs-and-targets-unknown",
                problem="Split: metrics and run.predict need (outputs, targets), which have no"
                f" default for {which}",
                remedy=[
                    "return them from the loss: return loss, (outputs, targets)",
                    "from the split: Split(data, metrics=...,"
                    " predict=lambda model, batch: (outputs, targets))",
                ],
                setting="predict",
            )
        inputs, targets = batch
        if self.last_call is not None:
            last_inputs, output, version = self.last_call
            if last_inputs is inputs and output._version == version:
                return output, targets
        with eagerly() if isinstance(batch, ChoiceBatch) else nullcontext():
            return self.model(inputs), targets

    def _note_call(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> None:
        self.last_call = None
        if len(inputs) == 1 and not named and isinstance(output, Tensor):
            self.last_call = (inputs[0], output, output._version)


def _refuse_missing(setting: str) -> NoReturn:
    raise DataError(
        "batch-left-out-when-sharded",
        problem=f"{setting} returned None for a batch of a split, and the model is sharded",
        reason="all ranks gather the weights together for each batch",
        remedy=[
            "leave the samples out of the data set",
            "let the loss call the model and return sf.Mean(0.0 * outputs.sum(), 0)",
        ],
        setting=setting,
    )


@contextmanager
def _explaining(what: str, batch: MicroBatch) -> Iterator[None]:
    cure = f"let {what} take this batch, or give the split data of the shapes of train_data"
    with explaining_shapes(what, batch.batch, named=("the batch",), cure=cure):
        try:
            yield
        except Exception as problem:
            if "does not require grad" in str(problem):
                raise ConfigError(
                    "gradients-in-evaluation",
                    problem=f"{what} computes gradients, and evaluations are without:"
                    f" {first_line(problem)}",
                    reason="an evaluation keeps no activations, which takes half of the memory",
                    remedy=f"let {what} do it in a block: with torch.enable_grad():",
                    setting=what,
                ) from problem
            cause = explained(problem, where="in the evaluation", micro_batches=[batch])
            if cause is None:
                raise
            raise cause from problem


def _counted(mean: Any, count: int) -> Mean:
    if isinstance(mean, Mean):
        return mean
    mean = one_number(mean)
    if not count:  # the mean may be NaN
        return Mean(0.0, count)
    # reading a CPU tensor waits for no device
    value = mean.item() if mean.is_cpu else mean.detach().double()
    return Mean(value * count, count)
