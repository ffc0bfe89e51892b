"""Multiple choice for language models: which of several endings does the model find likeliest after its context?

Shapes: B questions, N choices, R rows (questions x choices), T time (tokens), E tokens of all endings together, V vocabulary.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.mean import Mean


class ChoiceTargets(NamedTuple):
    """The endings of some questions: the targets of the metrics of this file."""

    positions: Tensor  # (E,): where in the rows laid end to end each token of an ending is predicted
    tokens: Tensor  # (E,): the tokens of the endings
    rows: Tensor  # (E,): the row that each of them belongs to
    ending_tokens: Tensor  # (B, N): tokens of each ending
    ending_bytes: Tensor  # (B, N): bytes of each ending
    right: Tensor  # (B,): which ending is right


class ChoiceBatch(NamedTuple):
    """Some questions, their rows filled up with 0 to one length: a batch of (inputs, targets)."""

    tokens: Tensor  # (R, T): all but the last token of each row
    targets: ChoiceTargets


def multiple_choice_accuracy(outputs: Tensor, targets: ChoiceTargets) -> dict[str, Mean]:
    """How often the right ending is the likeliest, in three ways to compare endings of different length.

    `acc` compares summed log-likelihoods, which prefer short endings. `acc_norm` compares their means per token, as nanoGPT-style
    repositories do (karpathy/build-nanogpt, hellaswag.py). `acc_per_byte` compares means per byte, whatever the tokenizer
    (lm-evaluation-harness, Gao et al., calls the mean per character `acc_norm`).

    outputs: the model's logits (R, T, V) of a batch of `sf.data.MultipleChoice`, or only those of the endings, (E, V).

    >>> targets = ChoiceTargets(*map(torch.tensor, ([0, 1], [3, 4], [0, 1], [[1, 1]], [[1, 1]], [0])))
    >>> multiple_choice_accuracy(torch.eye(5)[[3, 0]], targets)["acc"].value.item()
    1.0
    """
    nats_BN = _summed(F.cross_entropy(_at_endings(outputs, targets), targets.tokens, reduction="none"), targets)
    compared = {
        "acc": nats_BN,
        "acc_norm": nats_BN / targets.ending_tokens,
        "acc_per_byte": nats_BN / targets.ending_bytes.clamp(min=1),
    }
    return {
        name: Mean((costs_BN.argmin(dim=1) == targets.right).sum(), len(targets.right))
        for name, costs_BN in compared.items()
    }


def continuation_accuracy(outputs: Tensor, targets: ChoiceTargets) -> dict[str, Mean]:
    """How often the model would write the right ending itself, as in LAMBADA (Paperno et al. 2016).

    `acc`: every token of it is the likeliest at its position. `loss`: the nats of the whole ending, whose exponential is LAMBADA's
    perplexity; the other endings are not counted. Arguments as in `multiple_choice_accuracy`.

    >>> targets = ChoiceTargets(*map(torch.tensor, ([0, 1], [3, 4], [0, 1], [[1, 1]], [[1, 1]], [0])))
    >>> continuation_accuracy(torch.eye(5)[[3, 0]], targets)["acc"].value.item()
    1.0
    """
    logits_EV = _at_endings(outputs, targets)
    nats_BN = _summed(F.cross_entropy(logits_EV, targets.tokens, reduction="none"), targets)
    misses_BN = _summed((logits_EV.argmax(dim=1) != targets.tokens).float(), targets)
    missed_B, nats_B = (sums_BN.take_along_dim(targets.right[:, None], dim=1) for sums_BN in (misses_BN, nats_BN))
    return {"acc": Mean((missed_B == 0).sum(), len(missed_B)), "loss": Mean(nats_B.sum(), len(nats_B))}


def eagerly() -> AbstractContextManager[None]:
    """Where a compiled model runs as it is written: batches of questions have all kinds of shapes, and each would be compiled.

    Nothing is compiled if torch._dynamo was never imported, which takes seconds.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _at_endings(logits: Tensor, targets: ChoiceTargets) -> Tensor:
    """The logits (E, V) that predict the tokens of the endings, in float32."""
    if logits.ndim == 3:
        logits = logits.flatten(0, 1).index_select(0, targets.positions)
    return logits.float()


def _summed(values_E: Tensor, targets: ChoiceTargets) -> Tensor:
    """Sums (B, N) over the tokens of each ending: in float64, where they do not depend on the order of the terms."""
    wide = torch.float32 if values_E.device.type == "mps" else torch.float64
    sums_BN = torch.zeros(targets.ending_tokens.shape, dtype=wide, device=values_E.device)
    sums_BN.view(-1).index_add_(0, targets.rows, values_E.to(wide))
    return sums_BN
