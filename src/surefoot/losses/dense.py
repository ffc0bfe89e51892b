"""Cross-entropy as a counted mean, also computed from hidden states without storing all logits at
once.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from surefoot.errors import ConfigError, out_of_range
from surefoot.mean import Mean

HELD_AT_ONCE = 16_384  # classes whose logits are all in memory at once
WORTH_PIECES = 1 << 22  # logits: fewer fit into the cache
TORCH_HAS_IT = hasattr(F, "linear_cross_entropy")
_PIECE = 256  # rows; 64 to 512 are equally fast
_EVALUATED = 512  # rows without gradients
_CHUNK = 4096  # rows whose logits are computed again in the backward pass


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Mean:
    """Return the cross-entropy in nats over all targets except ignored ones, as (sum, count) on the
    device.

    Logits (..., C) may have any float dtype, and the computation uses float32 or better. Targets
    (...) are class indices. If every target is ignored, the sum is 0 with zero gradients, not NaN.
    Label smoothing follows Szegedy et al., 2016, section 7 (https://arxiv.org/abs/1512.00567); a
    smoothed loss is not the logarithm of a perplexity.

    >>> mean = cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [3, -100, -100]]))
    >>> round(float(mean.value), 4), int(mean.count)
    (1.3863, 3)
    """
    if logits.shape[:-1] != targets.shape:
        remedy = "if classes are in dimension 1, as in images, pass logits.movedim(1, -1)"
        tensors = {"logits": logits, "targets": targets}
        raise _misfit("cross_entropy", "(..., classes) and (...)", tensors, remedy=remedy)
    total = _total(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return Mean(total, (targets != ignore_index).sum())


def chunked_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = _CHUNK,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    with_scores: bool = False,
) -> tuple[Mean, list[Tensor]]:
    """Return `cross_entropy` of `hidden @ head_weight.T`, with the logits of only `chunk` targets
    in memory at a time; with scores also the number of right targets and the unsmoothed loss.

    Shapes: hidden (..., D), head_weight (C, D), targets (...). The result equals `cross_entropy` up
    to rounding. The backward pass recomputes each chunk's logits. With 8,192 targets of 50,257
    classes, the float32 logits and their gradient take 1.6 GB each.

    >>> hidden, head = torch.ones(2, 5, 3), torch.zeros(4, 3)
    >>> mean, _ = chunked_cross_entropy(hidden, head, torch.zeros(2, 5, dtype=torch.long), chunk=4)
    >>> round(float(mean.value), 4), int(mean.count)
    (1.3863, 10)
    """
    if chunk < 1:
        raise out_of_range("chunk", chunk, "1 or more targets at once, for example 4096")
    refuse_misfits(hidden, head_weight, targets)

    def sums_of(chunk_hidden: Tensor, chunk_targets: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(chunk_hidden, head_weight)
        total = _total(
            logits, chunk_targets, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        if not with_scores:
            return (total,)
        return total, *_scores(logits, chunk_targets, ignore_index=ignore_index)

    hidden_chunks = torch.split(hidden.reshape(-1, hidden.shape[-1]), chunk)
    target_chunks = torch.split(targets.reshape(-1), chunk)
    sums = []
    for chunk_hidden, chunk_targets in zip(hidden_chunks, target_chunks, strict=True):
        if torch.is_grad_enabled():
            sums.append(
                checkpoint(
                    sums_of,
                    chunk_hidden,
                    chunk_targets,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        else:  # torch's function would import its compiler
            sums.append(sums_of(chunk_hidden, chunk_targets))
    total, *scores = [torch.stack(column).sum() for column in zip(*sums, strict=True)]
    return Mean(total, (targets != ignore_index).sum()), scores


def _scores(logits: Tensor, targets: Tensor, *, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the number of right targets, and the sum of the unsmoothed losses."""
    with torch.no_grad():
        right = (_likeliest(logits) == targets) & (targets != ignore_index)
        plain = _total(logits, targets, ignore_index=ignore_index, label_smoothing=0.0)
    return right.sum(), plain


def linear_cross_entropy_with_scores(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Return `linear_cross_entropy`, bit for bit, and means to log: `accuracy`, and with label
    smoothing `unsmoothed_loss`.

    The logits are read once more, and not computed again. There are no means where torch's
    `F.linear_cross_entropy` computes the loss, which does not show the logits.

    >>> loss, scores = linear_cross_entropy_with_scores(
    ...     torch.eye(3), torch.eye(3), torch.tensor([0, 1, 0]), label_smoothing=0.5
    ... )
    >>> {name: round(float(mean.value), 4) for name, mean in scores.items()}
    {'accuracy': 0.6667, 'unsmoothed_loss': 0.8848}
    """
    loss, sums = _by_best_method(
        hidden,
        head_weight,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        with_scores=True,
    )
    if not sums:
        return loss, {}
    right, plain = sums
    scores = {"accuracy": Mean(right, loss.count)}
    if label_smoothing:
        scores["unsmoothed_loss"] = Mean(plain, loss.count)
    return loss, scores


def _likeliest(logits: Tensor) -> Tensor:
    return logits.max(dim=-1).indices  # on a CPU twice as fast as argmax


def _is_of_torch(hidden: Tensor, label_smoothing: float) -> bool:
    """Return True if torch's function computes the loss of more classes than `HELD_AT_ONCE`."""
    if not TORCH_HAS_IT or label_smoothing > 0 or torch.compiler.is_compiling():
        return False
    if hidden.is_meta:  # which has no autocast to query
        return False
    is_half = hidden.dtype in (torch.bfloat16, torch.float16)
    return not is_half and not torch.is_autocast_enabled(hidden.device.type)


def _in_pieces(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> bool:
    is_large = targets.numel() * len(head_weight) >= WORTH_PIECES
    return is_large and hidden.is_cpu and not torch.compiler.is_compiling()


def refuse_misfits(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> None:
    """Raise `ConfigError` if the shapes of hidden states, head and targets do not fit each
    other.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head_weight.shape[-1]:
        shapes = {"hidden": hidden, "head_weight": head_weight, "targets": targets}
        form = "(..., channels), (classes, channels) and (...)"
        raise _misfit("cross-entropy", form, shapes)


def _misfit(
    name: str, form: str, tensors: Mapping[str, Tensor], *, remedy: str | None = None
) -> ConfigError:
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    listed = ", ".join(f"{key} {shape}" for key, shape in shapes.items())
    return ConfigError(
        "targets-misfit",
        problem=f"{name}: these shapes do not fit together: {listed}",
        reason=f"they are {form}",
        remedy=remedy,
        **shapes,
    )


def _total(logits: Tensor, targets: Tensor, *, ignore_index: int, label_smoothing: float) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(wide),
        targets.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def summed_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    label_smoothing: float = 0.0,
    with_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three sums over all targets, of the logits `hidden @ head.T`: the cross-entropy (nats,
    float32 or better), the number of right targets, and the cross-entropy without smoothing.

    No target is ignored. The last two are 0 without `with_scores`. Products use the dtype of
    `hidden` or autocast. The result equals `F.cross_entropy` up to rounding; double backward fails.

    >>> total, *_ = summed_cross_entropy(
    ...     torch.ones(5, 3), torch.zeros(4, 3), torch.zeros(5, dtype=torch.long)
    ... )
    >>> float(total)
    6.931471824645996
    """
    sums: tuple[Tensor, Tensor, Tensor] = _Summed.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, targets_N, label_smoothing, with_scores
    )
    return sums


class _Summed(torch.autograd.Function):
    """The summed loss, whose gradients are computed in the forward pass, piece by piece."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        targets_N: Tensor,
        label_smoothing: float,
        with_scores: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and with scores the number of right targets and the unsmoothed loss."""
        device = hidden_ND.device.type
        is_autocast = torch.is_autocast_enabled(device)
        computed = torch.get_autocast_dtype(device) if is_autocast else hidden_ND.dtype
        wide = torch.promote_types(computed, torch.float32)
        hidden = hidden_ND.detach().to(computed)
        head = head_VD.detach().to(computed)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        right_count = torch.zeros_like(total)
        plain = torch.zeros_like(total)
        hidden_gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros_like(head_VD, dtype=wide)
        spread = label_smoothing / len(head)  # target probability of each class
        right = 1.0 - label_smoothing  # the addition for the right class
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(hidden), _PIECE):
                piece_nD = hidden[first : first + _PIECE]
                targets_n1 = targets_N[first : first + _PIECE, None]
                logits_nV = (piece_nD @ head.T).to(wide)
                normalizer_n1 = logits_nV.logsumexp(dim=1, keepdim=True)
                picked_n1 = logits_nV.gather(1, targets_n1)
                total += normalizer_n1.sum() - right * picked_n1.sum()
                if with_scores:
                    right_count += (_likeliest(logits_nV) == targets_n1[:, 0]).sum()
                    plain += (normalizer_n1 - picked_n1).sum()
                if label_smoothing:
                    total -= spread * logits_nV.sum()
                # probabilities, minus the targets'
                gradient_nV = logits_nV.sub_(normalizer_n1).exp_()
                if label_smoothing:
                    gradient_nV -= spread
                gradient_nV.scatter_add_(1, targets_n1, torch.full_like(normalizer_n1, -right))
                narrow_nV = gradient_nV.to(computed)
                hidden_gradient[first : first + _PIECE] = narrow_nV @ head
                head_gradient += narrow_nV.T @ piece_nD
        ctx.save_for_backward(hidden_gradient, head_gradient)
        ctx.dtypes = hidden_ND.dtype, head_VD.dtype
        ctx.mark_non_differentiable(right_count, plain)
        return total, right_count, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        hidden_dtype, head_dtype = ctx.dtypes
        hidden_result = (hidden_gradient * outer).to(hidden_dtype)
        head_result = (head_gradient * outer).to(head_dtype)
        return hidden_result, head_result, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Mean:
    """Return `cross_entropy` of `hidden @ head_weight.T`, by the best method for the shapes, device
    and torch version.

    Shapes: hidden (..., D), head_weight (C, D), targets (...). On the CPU, many logits are computed
    in pieces: in training with their gradients in the forward pass, which is 1.4x as fast, in
    evaluation 2x. On other devices, all logits of up to 16,384 classes are in memory at once. For
    more classes, torch's `F.linear_cross_entropy` (from 2.12 on) works in pieces.
    `chunked_cross_entropy` replaces torch's function (as of 2.13) under torch.compile and autocast,
    with label smoothing, and in half precision, because torch sums in that precision.

    >>> mean = linear_cross_entropy(
    ...     torch.ones(2, 5, 3), torch.zeros(4, 3), torch.zeros(2, 5, dtype=torch.long)
    ... )
    >>> round(float(mean.value), 4), int(mean.count)
    (1.3863, 10)
    """
    loss, _ = _by_best_method(
        hidden,
        head_weight,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        with_scores=False,
    )
    return loss


def _by_best_method(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    with_scores: bool,
) -> tuple[Mean, list[Tensor]]:
    """Return the loss, and with scores the number of right targets and the unsmoothed loss, unless
    torch's function computes the loss.
    """
    refuse_misfits(hidden, head_weight, targets)
    in_pieces = _in_pieces(hidden, head_weight, targets)
    if in_pieces and torch.is_grad_enabled():
        counted = targets != ignore_index
        total, *scores = summed_cross_entropy(
            hidden[counted],
            head_weight,
            targets[counted],
            label_smoothing=label_smoothing,
            with_scores=with_scores,
        )
        return Mean(total, counted.sum()), scores
    if not in_pieces and head_weight.shape[0] <= HELD_AT_ONCE:
        logits = F.linear(hidden, head_weight)
        loss = cross_entropy(
            logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        if not with_scores:
            return loss, []
        return loss, [*_scores(logits, targets, ignore_index=ignore_index)]
    if in_pieces or not _is_of_torch(hidden, label_smoothing):
        return chunked_cross_entropy(
            hidden,
            head_weight,
            targets,
            chunk=_EVALUATED if in_pieces else _CHUNK,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            with_scores=with_scores,
        )
    total = F.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        head_weight,
        targets.reshape(-1),
        reduction="sum",
        ignore_index=ignore_index,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return Mean(total, (targets != ignore_index).sum()), []
