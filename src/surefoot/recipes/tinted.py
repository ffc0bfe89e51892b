"""Held-out text, tinted by how well a language model says each token of it beforehand. Torch-free until it is used."""

from __future__ import annotations

from typing import Any

import surefoot as sf
from surefoot.recipes.corpus import Corpus

_TOKENS = 300  # are shown, about


def tinted_held_out(model: Any, found: Corpus, *, context: int) -> sf.TintedText:
    """Some windows from the middle of the held-out text, each token with its loss as the evaluation has it."""
    import numpy as np
    import torch.nn.functional as F

    windows = sf.HeldOut(found.longest_held_out, context=context)
    count = min(len(windows), max(1, round(_TOKENS / context)))
    first = (len(windows) - count) // 2
    inputs_BT, targets_BT = windows.gather(np.arange(first, first + count), np.zeros(count, dtype=np.int64))
    inputs_BT, targets_BT = (
        inputs_BT[:, : 2 * _TOKENS],
        targets_BT[:, : 2 * _TOKENS],
    )  # of a long context, its beginning
    logits_BTV = model(inputs_BT.to(next(model.parameters()).device)).float().cpu()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    real = targets_BT.flatten() >= 0  # the last window is filled up
    tokens = [int(inputs_BT[0, 0]), *targets_BT.flatten()[real].tolist()]
    legend = "the model's loss at each token in nats, given the text before it in its window"
    return sf.tinted_by_loss("held-out text", tokens, losses[real].tolist(), tokenizer=found.tokenizer, legend=legend)
