"""Multiple choice for language models: which of several endings does the model find likeliest after its beginning?

Shapes: B questions, N choices, R rows (questions x choices), T time (tokens), E tokens of all endings together, V vocabulary.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.mean import Mean

LogitsAt = Callable[[Any, Tensor, Tensor], Tensor]


class ChoiceBatch(NamedTuple):
    """Some questions, their rows filled up with 0 to one length: what the score functions of this file are given."""

    tokens: Tensor  # (B, N, T): what the model is shown, all but the last token of each row
    places: Tensor  # (E,): where in the rows laid end to end each token of an ending is predicted
    targets: Tensor  # (E,): the tokens of the endings
    rows: Tensor  # (E,): of which row's ending each of them is
    ending_tokens: Tensor  # (B, N): tokens of each ending
    ending_bytes: Tensor  # (B, N): bytes of each ending
    right: Tensor  # (B,): which ending is right


def logits_at(model: Any, tokens_RT: Tensor, places_E: Tensor) -> Tensor:
    """The logits (E, V) at some places of the rows laid end to end, of a model that turns tokens (R, T) into logits (R, T, V).

    >>> logits_at(lambda tokens: F.one_hot(tokens, 5), torch.tensor([[3, 4], [2, 1]]), torch.tensor([1, 2])).tolist()
    [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0]]
    """
    logits_RTV: Tensor = model(tokens_RT)
    return logits_RTV.flatten(0, 1).index_select(0, places_E)


def multiple_choice_accuracy(model: Any, batch: ChoiceBatch, *, logits: LogitsAt = logits_at) -> dict[str, Mean]:
    """How often the right ending is the likeliest, in three ways to compare endings of different length.

    `acc` compares summed log-likelihoods, which prefer short endings; `acc_norm` their means per token, as nanoGPT-style
    repositories do (karpathy/build-nanogpt, hellaswag.py); `acc_per_byte` means per byte, whatever the tokenizer
    (lm-evaluation-harness, Gao et al., calls the mean per character `acc_norm`).

    model: tokens (R, T) to logits (R, T, V); `logits` says how it makes those of some places alone. `batch`: of `Choices`.
    """
    nats_BN = _summed(F.cross_entropy(_ending_logits(model, batch, logits), batch.targets, reduction="none"), batch)
    compared = {
        "acc": nats_BN,
        "acc_norm": nats_BN / batch.ending_tokens,
        "acc_per_byte": nats_BN / batch.ending_bytes.clamp(min=1),
    }
    return {
        name: Mean((costs_BN.argmin(dim=1) == batch.right).sum(), len(batch.right))
        for name, costs_BN in compared.items()
    }


def continuation_accuracy(model: Any, batch: ChoiceBatch, *, logits: LogitsAt = logits_at) -> dict[str, Mean]:
    """How often the right ending is what the model would write itself, as in LAMBADA (Paperno et al. 2016).

    `acc`: every token of it is the likeliest at its place. `loss`: the nats of the whole ending, whose exponential is LAMBADA's
    perplexity; of other endings nothing is counted. Arguments as in `multiple_choice_accuracy`.
    """
    logits_EV = _ending_logits(model, batch, logits)
    nats_BN = _summed(F.cross_entropy(logits_EV, batch.targets, reduction="none"), batch)
    misses_BN = _summed((logits_EV.argmax(dim=1) != batch.targets).float(), batch)
    missed_B, nats_B = (sums_BN.take_along_dim(batch.right[:, None], dim=1) for sums_BN in (misses_BN, nats_BN))
    return {"acc": Mean((missed_B == 0).sum(), len(missed_B)), "loss": Mean(nats_B.sum(), len(nats_B))}


def _ending_logits(model: Any, batch: ChoiceBatch, logits: LogitsAt) -> Tensor:
    # batches of questions have all kinds of shapes, and a compiled model would be compiled again for each; nothing is compiled
    # where torch._dynamo was never imported, which takes seconds
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        return logits(model, batch.tokens.flatten(0, 1), batch.places).float()


def _summed(values_E: Tensor, batch: ChoiceBatch) -> Tensor:
    """Sums (B, N) over the tokens of each ending: in float64, where they do not depend on the order of the terms."""
    wide = torch.float32 if values_E.device.type == "mps" else torch.float64
    sums_BN = torch.zeros(batch.ending_tokens.shape, dtype=wide, device=values_E.device)
    sums_BN.view(-1).index_add_(0, batch.rows, values_E.to(wide))
    return sums_BN
