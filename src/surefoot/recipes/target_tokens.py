"""What a translator is trained on and scored by: the real tokens of its targets, padding left out. Torch-free until it is used."""

from __future__ import annotations

from typing import Any

import surefoot as sf

PADDING = 0


def smoothed(label_smoothing: float) -> Any:
    """The loss to train on: label-smoothed cross-entropy over the real tokens of the target, as a counted mean."""

    def loss(model: Any, batch: Any) -> Any:
        source_BS, target_BT = batch
        targets_BT = target_BT[:, 1:]

        def of_hidden(hidden_BTC: Any, head_VC: Any) -> Any:
            hidden, targets = _real(hidden_BTC, targets_BT)
            return sf.linear_cross_entropy(
                hidden, head_VC, targets, ignore_index=PADDING, label_smoothing=label_smoothing
            )

        return model(source_BS, target_BT[:, :-1], loss=of_hidden)

    return loss


def of_tokens(model: Any, batch: Any) -> dict[str, sf.Mean]:
    """Scores of a model that is told the right tokens so far: the loss without smoothing, and how often it is right."""
    source_BS, target_BT = batch

    def of_hidden(hidden_BTC: Any, head_VC: Any) -> dict[str, sf.Mean]:
        hidden, targets = _real(hidden_BTC, target_BT[:, 1:])
        logits = hidden @ head_VC.to(hidden.dtype).T
        real = targets != PADDING
        right = ((logits.argmax(dim=-1) == targets) & real).sum()
        return {
            "loss": sf.cross_entropy(logits, targets, ignore_index=PADDING),
            "accuracy": sf.Mean(right, real.sum()),
        }

    scores: dict[str, sf.Mean] = model(source_BS, target_BT[:, :-1], loss=of_hidden)
    return scores


def targets_of(batch: Any) -> int:
    """How many tokens a batch asks for; counted on the host."""
    return int((batch[1][:, 1:] != PADDING).sum())


def _real(hidden_BTC: Any, targets_BT: Any) -> tuple[Any, Any]:
    """Hidden states and targets without the padding, on the CPU.

    Elsewhere as they are, and the loss leaves padding out: how many real ones there are, the host would have to wait for.
    """
    if not hidden_BTC.is_cpu:
        return hidden_BTC, targets_BT
    real_BT = targets_BT != PADDING
    return hidden_BTC[real_BT], targets_BT[real_BT]
