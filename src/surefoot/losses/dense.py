"""Cross entropy as a counted mean, so that ignored targets and ragged batches weigh what they should."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surefoot.errors import ConfigError
from surefoot.mean import Mean


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> Mean:
    """Cross-entropy in nats over all targets but the ignored ones, as (sum, count) on the device.

    logits (..., C) of any float type, computed in float32 or better; targets (...) of class numbers. Where every target is
    ignored the sum is 0 with zero gradients, not NaN. Label smoothing as in Szegedy et al. 2016, section 7
    (https://arxiv.org/abs/1512.00567); a smoothed loss is not the logarithm of a perplexity.

    >>> mean = cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [3, -100, -100]]))
    >>> round(float(mean.value), 4), int(mean.count)
    (1.3863, 3)
    """
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"cross_entropy: logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}: "
            "give logits (..., classes) and targets (...) with the same leading sizes;\n"
            "  where classes are dimension 1, as in images, pass logits.movedim(1, -1)"
        )
    return _counted(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing)


def chunked_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 4096,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Mean:
    """`cross_entropy` of `hidden @ head_weight.T`, with the logits of only `chunk` targets in memory at a time.

    hidden (..., D), head_weight (C, D), targets (...). Equal to rounding; each chunk's logits are computed once more in the
    backward pass. Worth it where C is large: 8,192 targets of 50,257 classes are 1.6 GB of float32 logits, and as much again
    for their gradient.

    >>> hidden, head = torch.ones(2, 5, 3), torch.zeros(4, 3)
    >>> mean = chunked_cross_entropy(hidden, head, torch.zeros(2, 5, dtype=torch.long), chunk=4)
    >>> round(float(mean.value), 4), int(mean.count)
    (1.3863, 10)
    """
    if chunk < 1:
        raise ConfigError(f"chunked_cross_entropy: chunk = {chunk} targets at a time; give 1 or more, for example 4096")
    refuse_misfits(hidden, head_weight, targets)

    def total(part: Tensor, part_targets: Tensor) -> Tensor:
        mean = _counted(
            F.linear(part, head_weight), part_targets, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        assert isinstance(mean.total, Tensor)
        return mean.total

    flat_targets = targets.reshape(-1)
    parts = zip(torch.split(hidden.reshape(-1, hidden.shape[-1]), chunk), torch.split(flat_targets, chunk), strict=True)
    totals = [checkpoint(total, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return Mean(torch.stack(totals).sum(), (flat_targets != ignore_index).sum())


def refuse_misfits(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> None:
    """Raise `ConfigError` if the shapes of hidden states, head and targets do not fit each other."""
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head_weight.shape[-1]:
        raise ConfigError(
            f"cross-entropy of a head: hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit: give (..., channels), (classes, channels) and (...)"
        )


def _counted(logits: Tensor, targets: Tensor, *, ignore_index: int, label_smoothing: float) -> Mean:
    flat_targets = targets.reshape(-1)
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32)),
        flat_targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return Mean(total, (flat_targets != ignore_index).sum())
