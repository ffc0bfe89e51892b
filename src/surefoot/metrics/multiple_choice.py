"""Multiple-choice metrics for language models, which choose the most likely ending of a context.

Shapes: B questions, N choices, R rows (questions x choices), T time (tokens), E tokens of all
endings together, V vocabulary.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.mean import Mean


class ChoiceTargets(NamedTuple):
    """The endings of a batch of questions, as targets for the metrics of this module."""

    positions: Tensor  # (E,): index of each ending token's prediction in the concatenated rows
    tokens: Tensor  # (E,): the tokens of the endings
    rows: Tensor  # (E,): the row of each ending token
    ending_tokens: Tensor  # (B, N): number of tokens of each ending
    ending_bytes: Tensor  # (B, N): number of bytes of each ending
    right: Tensor  # (B,): index of the right ending


class ChoiceBatch(NamedTuple):
    """A batch (inputs, targets) of questions, with rows padded with 0 to equal length."""

    tokens: Tensor  # (R, T): all but the last token of each row
    targets: ChoiceTargets


def multiple_choice_accuracy(outputs: Tensor, targets: ChoiceTargets) -> dict[str, Mean]:
    """Return the accuracy of choosing the most likely ending, with three ways to normalize
    log-likelihoods by length.

    `acc` compares summed log-likelihoods, which favor short endings. `acc_norm` compares means per
    token, as nanoGPT-style repositories do (karpathy/build-nanogpt, hellaswag.py). `acc_per_byte`
    compares means per byte, whatever the tokenizer (lm-evaluation-harness, Gao et al., calls the
    mean per character `acc_norm`). `outputs` are the logits (R, T, V) of a `sf.data.MultipleChoice`
    batch, or only the logits of the endings, (E, V).

    >>> targets = ChoiceTargets(
    ...     *map(torch.tensor, ([0, 1], [3, 4], [0, 1], [[1, 1]], [[1, 1]], [0]))
    ... )
    >>> multiple_choice_accuracy(torch.eye(5)[[3, 0]], targets)["acc"].value.item()
    1.0
    """
    logits_EV = _at_endings(outputs, targets)
    nats_BN = _summed(F.cross_entropy(logits_EV, targets.tokens, reduction="none"), targets)
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
    """Return how often greedy decoding produces the right ending, as in LAMBADA (Paperno et al.,
    2016).

    `acc` is the fraction of right endings that greedy decoding produces. `loss` is the mean
    negative log-likelihood of a right ending in nats, and exp(loss) is LAMBADA's perplexity.
    `multiple_choice_accuracy` describes the arguments.

    >>> targets = ChoiceTargets(
    ...     *map(torch.tensor, ([0, 1], [3, 4], [0, 1], [[1, 1]], [[1, 1]], [0]))
    ... )
    >>> continuation_accuracy(torch.eye(5)[[3, 0]], targets)["acc"].value.item()
    1.0
    """
    logits_EV = _at_endings(outputs, targets)
    nats_BN = _summed(F.cross_entropy(logits_EV, targets.tokens, reduction="none"), targets)
    misses_BN = _summed((logits_EV.argmax(dim=1) != targets.tokens).float(), targets)
    right_B1 = targets.right[:, None]
    misses_B1 = misses_BN.take_along_dim(right_B1, dim=1)
    nats_B1 = nats_BN.take_along_dim(right_B1, dim=1)
    return {
        "acc": Mean((misses_B1 == 0).sum(), len(misses_B1)),
        "loss": Mean(nats_B1.sum(), len(nats_B1)),
    }


def eagerly() -> AbstractContextManager[None]:
    """Return a context that runs compiled models eagerly, to avoid a compilation per batch shape
    and an import of torch._dynamo.
    """
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else nullcontext()
    )


def _at_endings(logits: Tensor, targets: ChoiceTargets) -> Tensor:
    if logits.ndim == 3:
        logits = logits.flatten(0, 1).index_select(0, targets.positions)
    return logits.float()


def _summed(values_E: Tensor, targets: ChoiceTargets) -> Tensor:
    # sums in any order are equal
    wide = torch.float32 if values_E.device.type == "mps" else torch.float64
    sums_BN = torch.zeros(targets.ending_tokens.shape, dtype=wide, device=values_E.device)
    sums_BN.view(-1).index_add_(0, targets.rows, values_E.to(wide))
    return sums_BN
