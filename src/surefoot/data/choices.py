"""Multiple choice for language models: which of several endings does the model find likeliest after its beginning?

Shapes: B questions, N choices, T time (tokens), E tokens of an ending, R rows (questions x choices), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.data.plan import Ids
from surefoot.data.shards import Tokens
from surefoot.errors import DataError
from surefoot.means import Mean

_TIME_STEP = 32  # rows are filled up to multiples of so many tokens: a compiled model meets few shapes
_FEWEST_TARGETS = 8

TokenRow = Sequence[int] | Tokens
LogitsAt = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Question:
    """What each choice begins with, its ending, and which is right. Beginnings and endings are tokens, none empty.

    Mostly all beginnings are one; where the choice lies in the beginning, the endings are one. `source` is where the question
    comes from, such as a file and a line, for messages.
    """

    beginnings: Sequence[TokenRow]
    endings: Sequence[TokenRow]
    right: int
    source: str = ""


class ChoiceBatch(NamedTuple):
    """Some questions, their rows filled up with 0 to one length: what the score functions of this file are given."""

    tokens: Tensor
    """(B, N, T): what the model is shown, all but the last token of each row."""
    places: Tensor
    """(B, N, E): where in a row each token of its ending is predicted."""
    targets: Tensor
    """(B, N, E): the tokens of the endings."""
    counted: Tensor
    """(B, N, E): which of them there are; the rest is filling."""
    ending_bytes: Tensor
    """(B, N): bytes of each ending."""
    right: Tensor
    """(B,): which ending is right."""


class Choices:
    """Questions as a data set for a `Split` whose score is `choice_accuracy` or `continuation_accuracy`.

    A row is a beginning and its ending; one longer than `context` + 1 tokens loses tokens of its beginning (a model is shown
    all but the last of a row), and `shortened` counts the questions with such a row. Questions are kept from the longest to the
    shortest, so that those of a batch differ little and the first batch needs the most memory; `targets_at_once` is how many
    logits of one question are needed at most. All questions must have as many endings.

    >>> dataset = Choices([Question([[1, 2]] * 2, [[3], [4, 5]], right=0)], context=8, byte_counts=[1] * 6)
    >>> dataset.gather(np.array([0]), np.array([0])).targets[0, :, :2].tolist()
    [[3, 0], [4, 5]]
    """

    def __init__(self, questions: Sequence[Question], *, context: int, byte_counts: Sequence[int] | Tokens) -> None:
        if not questions:
            raise DataError("no questions to choose in: at least one is needed")
        self.context, self.choices = context, len(questions[0].endings)
        rows, endings, self.shortened = [], [], 0
        for place, question in enumerate(questions):
            _refuse_malformed(question, place, choices=self.choices, context=context)
            whole = [np.concatenate(pair) for pair in zip(question.beginnings, question.endings, strict=True)]
            self.shortened += any(len(row) > context + 1 for row in whole)
            rows += [row[-(context + 1) :] for row in whole]
            endings += [len(ending) for ending in question.endings]
        self.tokens = np.concatenate(rows).astype(np.int32)
        self.lengths, self.endings = np.array([len(row) for row in rows]), np.array(endings)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.byte_counts = np.asarray(byte_counts)
        self.right = np.array([question.right for question in questions])
        self.order = np.argsort(-self.lengths.reshape(-1, self.choices).max(axis=1), kind="stable")
        self.targets_at_once = self.choices * _width(self.endings)

    def __len__(self) -> int:
        """How many questions there are."""
        return len(self.right)

    def gather(self, ids: Ids, epochs: Ids) -> ChoiceBatch:
        """These questions, filled up to the longest among them; epochs make no difference."""
        del epochs
        asked = self.order[ids]
        rows_BN = asked[:, None] * self.choices + np.arange(self.choices)
        starts_BN, endings_BN = self.starts[rows_BN], self.endings[rows_BN]
        shown_BN = self.lengths[rows_BN] - 1
        time = min(self.context, -(-int(shown_BN.max()) // _TIME_STEP) * _TIME_STEP)
        span_T = np.arange(time)
        tokens_BNT = np.where(span_T < shown_BN[..., None], self._taken(starts_BN[..., None] + span_T), 0)
        span_E = np.arange(_width(endings_BN))
        counted_BNE = span_E < endings_BN[..., None]
        places_BNE = np.where(counted_BNE, (shown_BN - endings_BN)[..., None] + span_E, 0)
        targets_BNE = np.where(counted_BNE, self._taken(starts_BN[..., None] + places_BNE + 1), 0)
        bytes_BN = (self.byte_counts[targets_BNE] * counted_BNE).sum(axis=2)
        parts = (tokens_BNT, places_BNE, targets_BNE, counted_BNE, bytes_BN, self.right[asked])
        return ChoiceBatch(*(torch.from_numpy(part) for part in parts))

    def fingerprint(self) -> dict[str, Any]:
        """Which questions, and how much of them is shown."""
        digest = sha256()
        for part in (self.tokens, self.lengths, self.endings, self.right):
            digest.update(part.astype("<i8").tobytes())
        return {"questions": len(self), "sha256": digest.hexdigest(), "context": self.context}

    def _taken(self, places: Ids) -> Tokens:
        return self.tokens.take(places, mode="clip").astype(np.int64)


def logits_at(model: Any, tokens_RT: Tensor, places_RE: Tensor) -> Tensor:
    """The logits (R, E, V) at some places of each row, of a model that turns tokens (R, T) into logits (R, T, V).

    >>> logits_at(lambda tokens: F.one_hot(tokens, 5), torch.tensor([[3, 4]]), torch.tensor([[1]])).tolist()
    [[[0, 0, 0, 0, 1]]]
    """
    logits_RTV: Tensor = model(tokens_RT)
    return logits_RTV.take_along_dim(places_RE[..., None], dim=1)


def choice_accuracy(model: Any, batch: ChoiceBatch, *, logits: LogitsAt = logits_at) -> dict[str, Mean]:
    """How often the right ending is the likeliest, in three ways to compare endings of different length.

    `acc` compares summed log-likelihoods, which prefer short endings. `acc_norm` compares their means per token, as
    nanoGPT-style repositories do (karpathy/build-nanogpt, hellaswag.py). `acc_per_byte` compares means per byte, and so does
    not depend on the tokenizer; lm-evaluation-harness (Gao et al.) calls the mean per character `acc_norm`.

    model: tokens (R, T) to logits (R, T, V); where it can make the logits of some places alone, `logits` says how. `batch` as
    `Choices` gives it.
    """
    log_likelihood_BNE, _ = _scored(model, batch, logits)
    summed_BN = log_likelihood_BNE.sum(dim=2)
    compared = {
        "acc": summed_BN,
        "acc_norm": summed_BN / batch.counted.sum(dim=2),
        "acc_per_byte": summed_BN / batch.ending_bytes.clamp(min=1),
    }
    return {
        name: Mean((scores_BN.argmax(dim=1) == batch.right).sum(), len(batch.right))
        for name, scores_BN in compared.items()
    }


def continuation_accuracy(model: Any, batch: ChoiceBatch, *, logits: LogitsAt = logits_at) -> dict[str, Mean]:
    """How often the right ending is what the model would write itself, as in LAMBADA (Paperno et al. 2016).

    `acc`: every token of it is the likeliest at its place. `loss`: the nats of the whole ending, whose exponential is LAMBADA's
    perplexity; of other endings nothing is counted. Arguments as in `choice_accuracy`.
    """
    log_likelihood_BNE, hit_BNE = _scored(model, batch, logits)
    right_B11 = batch.right[:, None, None]
    nats_BE = -log_likelihood_BNE.take_along_dim(right_B11, dim=1)[:, 0]
    hit_BE = (hit_BNE | ~batch.counted).take_along_dim(right_B11, dim=1)[:, 0]
    return {"acc": Mean(hit_BE.all(dim=1).sum(), len(hit_BE)), "loss": Mean(nats_BE.sum(), len(hit_BE))}


def _width(endings: Ids) -> int:
    """The longest ending, rounded up to a power of two: a compiled model meets few shapes."""
    return max(_FEWEST_TARGETS, 1 << (int(endings.max()) - 1).bit_length())


def _scored(model: Any, batch: ChoiceBatch, logits: LogitsAt) -> tuple[Tensor, Tensor]:
    """The log-likelihood of every token of every ending (0 where it is filling), and whether it is the likeliest there."""
    logits_REV = logits(model, batch.tokens.flatten(0, 1), batch.places.flatten(0, 1)).float()
    surprise = F.cross_entropy(logits_REV.flatten(0, 1), batch.targets.flatten(), reduction="none")
    hit_BNE = (logits_REV.argmax(dim=2)).view_as(batch.targets) == batch.targets
    # in float64 a sum does not depend on how much filling stands behind it: endings that are equally likely stay so
    wide_BNE = surprise.view_as(batch.targets).to(torch.float32 if surprise.device.type == "mps" else torch.float64)
    return -(wide_BNE * batch.counted), hit_BNE


def _refuse_malformed(question: Question, place: int, *, choices: int, context: int) -> None:
    where = question.source or f"question {place}"
    number = len(question.endings)
    if number != choices or len(question.beginnings) != number or not 0 <= question.right < number:
        raise DataError(
            f"{where} has {number} endings and {len(question.beginnings)} beginnings, {question.right} right: need {choices}"
        )
    for beginning, ending in zip(question.beginnings, question.endings, strict=True):
        if not len(ending) or not len(beginning):
            raise DataError(
                f"{where}: a beginning of {len(beginning)} tokens and an ending of {len(ending)}: none may be empty"
            )
        if len(ending) > context:
            raise DataError(
                f"{where}: an ending of {len(ending)} tokens, at most {context} fit into the model's context\n"
                "  a larger model.context, or a tokenizer that makes fewer tokens of a text"
            )
