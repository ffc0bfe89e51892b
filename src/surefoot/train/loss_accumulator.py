"""The loss of a step, accumulated over its micro-batches as parts of one counted mean."""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from surefoot.data.loader import MicroBatch
from surefoot.errors import ConfigError
from surefoot.mean import Mean, add_each, add_logged, refuse_name_of_loss, refuse_tensors
from surefoot.tracking.record import refuse_own

SKIPPED_SAMPLES = "skipped_samples"  # in records: for which the loss or `collate_fn` returned None
_TORCH_LOSSES = ("torch.nn.functional", "torch.nn.modules.loss")


class LossSum:
    """The total loss of a step's micro-batches, divided by `nominal`, the number of targets counted
    on the host.

    `counted` is the actual number of targets if it may differ from `nominal`: from a loss that
    returned a `Mean` with its own count, or `plain`, the sum of the host's counts. Otherwise
    `counted` is None.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> sums = LossSum(nominal=4)
    >>> starts = [sums.add(weight * 3, count=1), sums.add(weight * 1, count=3)]
    >>> float(sums.total), sums.counted
    (1.5, None)
    """

    def __init__(self, nominal: float) -> None:
        self.nominal = nominal
        self.total: Tensor | None = None
        self.parts: list[Tensor] = []  # of each pass
        self.plain = 0  # targets counted on the host
        self._counted: Tensor | float | None = None  # targets counted by the loss

    def add(self, result: Any, count: int) -> tuple[Tensor, Tensor | None, Mapping[str, Mean]]:
        """Return the scalar that the backward pass starts from, its gradient (None: 1), and the
        means to log.

        A micro-batch without targets adds nothing to `total`; its backward pass runs only so that
        all ranks reach the same collective.
        """
        result, further, _ = loss_parts(result)
        loss_total = scalar(result.total if isinstance(result, Mean) else result)
        if count == 0:
            self.parts.append(torch.zeros_like(loss_total.detach()))
            return loss_total, None, {}
        start = loss_total
        share = None
        part = loss_total.detach()
        if isinstance(result, Mean):
            start = loss_total / self.nominal
            part = start.detach()
            # float64, in which sums of counts are exact, on any number of ranks
            number = without_shape(result.count)
            number = number.double() if _is_float(number) else number
            self._counted = number if self._counted is None else self._counted + number
        else:
            self.plain += count
            if count != self.nominal:
                # a gradient instead of a multiplication, which autograd would record and repeat
                share = part.new_full((), count / self.nominal)
                # the product with a 16-bit share would be rounded twice
                part = part * (share if part.element_size() > 2 else count / self.nominal)
        self.total = part if self.total is None else self.total + part
        self.parts.append(part)
        return start, share, further

    def total_on(self, device: torch.device) -> Tensor:
        """Return the total loss. Without targets, it is a zero on this device."""
        return torch.zeros((), device=device) if self.total is None else self.total

    @property
    def counted(self) -> Tensor | float | None:
        """The actual number of targets, or None if the number equals `nominal`."""
        if self._counted is None:
            return None if self.plain in (0, self.nominal) else self.plain
        return self._counted + self.plain if self.plain else self._counted


def leave_out(step: Any, micro_batch: MicroBatch) -> None:
    """Count the samples for which the loss returned None. Raises `ConfigError` on several ranks,
    which wait for each other's passes.
    """
    if step._task.ranks.world is not None:
        raise ConfigError(
            "loss-left-out-on-ranks",
            problem=f"the loss returned None at step {step.index}, and several ranks share a step",
            reason="other ranks wait for the backward pass of this one",
            remedy="return a loss that counts nothing: sf.Mean(0.0 * outputs.sum(), 0)",
            setting="loss",
            step=step.index,
        )
    _add_skipped(step, len(micro_batch.sample_ids))


def count_skipped(step: Any, micro_batch: MicroBatch) -> None:
    """Count the samples of a micro-batch without targets if `collate_fn` returned None for them."""
    if micro_batch.batch is None or micro_batch.is_padding:
        _add_skipped(step, len(micro_batch.sample_ids))


def _add_skipped(step: Any, samples: int) -> None:
    if samples and step.loss is None:  # only the first call of forward_backward counts
        add_logged(step._logged, {SKIPPED_SAMPLES: samples}, reduce="sum")


def add_metrics(step: Any, metrics: Mapping[str, Mean]) -> None:
    """Add the metrics that the loss returned to the values of the step. Raises `ConfigError` for a
    name that the body of the loop has logged.
    """
    for name in metrics:
        if name in step._logged and name not in step._metrics_of_loss:
            refuse_name_of_loss(name)
    step._metrics_of_loss |= metrics.keys()
    add_each(step._logged, metrics)


def _is_float(count: Any) -> TypeGuard[Tensor]:
    return isinstance(count, Tensor) and count.is_floating_point() and count.device.type != "mps"


def loss_parts(returned: Any) -> tuple[Any, Mapping[str, Mean], tuple[Any, Any] | None]:
    """Split a loss's return value into loss, means to log, and (outputs, targets). Raises
    `ConfigError` for other tuples.

    >>> loss_parts((0.5, ("outputs", "targets")))
    (0.5, {}, ('outputs', 'targets'))
    """
    if not isinstance(returned, tuple):
        return returned, {}, None
    if len(returned) == 2 and isinstance(returned[1], tuple) and len(returned[1]) == 2:
        return returned[0], {}, returned[1]
    if len(returned) == 2 and isinstance(returned[1], Mapping):
        wrong = [name for name, mean in returned[1].items() if not isinstance(mean, Mean)]
        if not wrong:
            refuse_own(returned[1])
            for name, mean in returned[1].items():
                refuse_tensors(mean, f"the loss returned {name!r} as")
            return returned[0], returned[1], None
        what = f"{wrong[0]!r} as {type(returned[1][wrong[0]]).__name__}"
    else:
        what = f"({', '.join(type(part).__name__ for part in returned)})"
    raise ConfigError(
        "loss-second-value",
        problem=f"the loss returned {what}",
        reason="after its mean, it may return (outputs, targets) or a dictionary of sf.Mean",
        remedy=[
            "for the metrics of a split: return loss, (outputs, targets)",
            'for the training records: return loss, {"accuracy": sf.Mean(right, count)}',
        ],
        setting="loss",
        returned=what,
    )


def check_loss(loss: Any, *, setting: str) -> None:
    """Raise `ConfigError` if `loss(model, batch)` cannot be called, or if it is a loss of torch,
    which takes (outputs, targets).
    """
    function = loss.func if isinstance(loss, partial) else loss
    cls = function if isinstance(function, type) else type(function)
    is_module = issubclass(cls, nn.Module)
    if getattr(getattr(cls, "forward", function), "__module__", "") in _TORCH_LOSSES:
        name = f"F.{getattr(function, '__name__', cls.__name__)}"
        built = ""
        if is_module:
            # cls may be the user's subclass
            names = [base.__name__ for base in cls.__mro__ if base.__module__ in _TORCH_LOSSES]
            name = f"nn.{names[0] if names else cls.__name__}"
            built = "(...)"
        raise ConfigError(
            "loss-of-torch",
            problem=f"{setting} is torch's {name}, a function of (outputs, targets)",
            reason="surefoot calls loss(model, batch), so that the loss can call the model",
            remedy=f"write def loss(model, batch): return {name}{built}(model(batch[0]), batch[1])",
            setting=setting,
            value=name,
        )
    try:
        if loss is not None:
            signature(loss).bind("model", "batch")
    except ValueError:
        return  # a function that is written in C may have no signature
    except TypeError as problem:
        raise ConfigError(
            "loss-arguments",
            problem=f"{setting} = {loss!r}: {problem}",
            reason="surefoot calls loss(model, batch)",
            remedy="write def loss(model, batch):"
            " return F.cross_entropy(model(batch[0]), batch[1])",
            setting=setting,
            value=loss,
        ) from problem


def without_shape(value: Any) -> Any:
    """Return a tensor of one number as a scalar, and anything else as it is."""
    if isinstance(value, Tensor) and value.ndim > 0 and value.numel() == 1:
        return value.reshape(())
    return value


def scalar(loss: Any) -> Tensor:
    """Return a scalar loss tensor that requires a gradient; one of shape (1,) is a scalar too.
    Raises `ConfigError` for any other loss.
    """
    number = one_number(loss)
    if number.is_complex():
        raise ConfigError(
            "loss-complex",
            problem="the loss is a complex number, which has no least value",
            remedy="return a real one, such as its absolute value",
            setting="loss",
        )
    if not number.requires_grad:
        raise loss_without_gradient()
    return number


def loss_without_gradient() -> ConfigError:
    """Return the refusal of a loss from which no gradient comes."""
    return ConfigError(
        "loss-without-gradient",
        problem="the loss does not depend on any trainable parameter",
        reason="was it detached, or computed under no_grad?",
        setting="loss",
    )


def one_number(loss: Any) -> Tensor:
    """Return a loss as a tensor without dimensions. Raises `ConfigError` if it is none of one
    number.
    """
    number = without_shape(loss)
    if not isinstance(number, Tensor):
        raise ConfigError(
            "loss-not-a-tensor",
            problem=f"the loss returned {type(loss).__name__}, not a tensor",
            remedy="return F.cross_entropy(...), for example",
            setting="loss",
            returned=type(loss).__name__,
        )
    if number.ndim > 0:
        raise ConfigError(
            "loss-not-a-scalar",
            problem=f"the loss is not a scalar but a tensor of shape {tuple(number.shape)}",
            remedy="return its mean, or sf.Mean(total, count) if samples do not have one target"
            " each",
            setting="loss",
            shape=tuple(number.shape),
        )
    return number
