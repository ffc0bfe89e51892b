"""The loss that a model computes itself, as models of transformers do."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.mean import Mean

_IGNORED = -100  # torch's and transformers' index of positions without a target


def of_model(model: Any, batch: Any) -> Any:
    """Return `model(**batch).loss` as a mean over its targets: the loss of a model of transformers,
    for `Run(loss=)`.

    The batch is a dictionary of the model's arguments, with labels. Integer labels are counted
    unless they are -100; a causal language model of transformers has no target for the first
    position, because it predicts the next one. Without integer labels the loss is a mean over
    samples. The metrics of a split get (logits, labels) with classes in dimension 1, and for a
    causal model the logits that predict each label. Raises `ConfigError` if the batch is not a
    dictionary, or if the model returns no loss.

    >>> import torch
    >>> class Net(torch.nn.Linear):
    ...     def forward(self, x, labels):
    ...         logits = super().forward(x)
    ...         return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
    >>> batch = {"x": torch.randn(3, 2), "labels": torch.tensor([1, 0, -100])}
    >>> int(of_model(Net(2, 4), batch)[0].count)
    2
    """
    if not callable(model):
        raise ConfigError(
            "model-loss-of-several-models",
            problem="loss = sf.losses.of_model: this run has several models, and of_model calls one",
            remedy='write loss=lambda models, batch: sf.losses.of_model(models["name"], batch)',
            setting="loss",
        )
    if not isinstance(batch, Mapping):
        raise ConfigError(
            "model-loss-of-batch",
            problem=f"loss = sf.losses.of_model: a batch is a {type(batch).__name__}, and the model"
            " is called as model(**batch)",
            remedy='return {"input_ids": ..., "labels": ...} from the data set or collate_fn',
            setting="loss",
            batch=type(batch).__name__,
        )
    output = model(**batch)
    mean = _entry(output, "loss")
    logits = _entry(output, "logits")
    if not isinstance(mean, Tensor):
        raise ConfigError(
            "model-without-loss",
            problem="loss = sf.losses.of_model: the model returned no loss, but a"
            f" {type(output).__name__}",
            reason=f"the batch has {', '.join(map(str, batch))}; most models compute a loss only if"
            " it has labels",
            remedy="add labels to the samples, or write a loss of your own:"
            " Run(loss=lambda model, batch: ...)",
            setting="loss",
            output=type(output).__name__,
            batch=list(batch),
        )
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        return mean
    if _predicts_next(model) and labels.ndim > 1:
        shifted = batch.get("shift_labels")
        labels = labels[..., 1:] if shifted is None else shifted
        logits = logits[..., : labels.shape[-1], :] if isinstance(logits, Tensor) else None
    has_classes = not labels.is_floating_point()
    loss: Any = mean
    if has_classes:
        count = (labels != _IGNORED).sum()
        # torch's mean over no target is NaN
        loss = Mean(torch.where(count > 0, mean, 0.0) * count, count)
    if not isinstance(logits, Tensor):
        return loss
    if has_classes and logits.ndim > 2 and logits.ndim == labels.ndim + 1:
        logits = logits.movedim(-1, 1)
    return loss, (logits, labels)


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _predicts_next(model: Any) -> bool:
    """Return True for a model of transformers whose loss compares position t with label t + 1."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if inner is None or getattr(inner.config, "is_encoder_decoder", False):
        return False
    return type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
