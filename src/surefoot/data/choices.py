"""Multiple choice for language models: which of several endings does the model find likeliest after a beginning?

Shapes: B questions, N choices, T time (tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.data.shards import Tokens
from surefoot.errors import DataError
from surefoot.means import Mean
from surefoot.seeding import fold, stream_key


@dataclass(frozen=True)
class Question:
    """A beginning, the endings to choose from, and which is right. Beginnings and endings are tokens, none empty."""

    beginning: Sequence[int]
    endings: Sequence[Sequence[int]]
    right: int


def choices(
    questions: Sequence[Question], *, context: int, byte_counts: Sequence[int] | Tokens
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Questions as tensors, a data set for a `Split` whose score is `choice_accuracy`.

    tokens (questions, N, T) with 0 where a row is filled up; of which are the ending's (the same shape, boolean); bytes of
    each ending (questions, N); the right ones (questions,). Rows longer than `context` + 1 lose tokens of their beginning
    (a model is shown all but the last of a row). All questions must have as many endings.
    """
    if not questions:
        raise DataError("no questions to choose in: at least one is needed")
    number = len(questions[0].endings)
    counts = np.asarray(byte_counts)
    rows, spans = [], []
    for place, question in enumerate(questions):
        if len(question.endings) != number or not 0 <= question.right < number:
            raise DataError(
                f"question {place} has {len(question.endings)} endings, {question.right} right: need {number}"
            )
        for ending in question.endings:
            if not len(ending) or not len(question.beginning) or len(ending) > context:
                raise DataError(
                    f"question {place}: {len(question.beginning)} and {len(ending)} tokens; a beginning and an ending of at"
                    f" most {context} are needed"
                )
            row = [*question.beginning, *ending][-(context + 1) :]
            rows.append(row)
            spans.append((len(row) - len(ending), len(row)))
    longest = max(len(row) for row in rows)
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    of_ending = np.zeros((len(rows), longest), dtype=bool)
    for place, (row, (first, last)) in enumerate(zip(rows, spans, strict=True)):
        tokens[place, : len(row)] = row
        of_ending[place, first:last] = True
    sizes = (counts[tokens] * of_ending).sum(axis=1)
    shape = (len(questions), number)
    return (
        torch.from_numpy(tokens).view(*shape, longest),
        torch.from_numpy(of_ending).view(*shape, longest),
        torch.from_numpy(sizes).view(shape),
        torch.tensor([question.right for question in questions]),
    )


def choice_accuracy(model: Any, batch: Any) -> dict[str, Mean]:
    """How often the right ending is the likeliest (`accuracy`), and the likeliest per byte (`accuracy_per_byte`).

    model: tokens (rows, T) to logits (rows, T, V); `batch` as `choices` gives it. The second does not prefer short endings;
    it is what is called normalised accuracy (Gao et al., lm-evaluation-harness, `acc_norm`).
    """
    tokens_BNT, of_ending_BNT, bytes_BN, right_B = batch
    batch_size, number, time = tokens_BNT.shape
    logits = model(tokens_BNT.view(-1, time)[:, :-1]).float()
    surprise = F.cross_entropy(logits.transpose(1, 2), tokens_BNT.view(-1, time)[:, 1:], reduction="none")
    likelihood_BN = -(surprise * of_ending_BNT.view(-1, time)[:, 1:]).sum(dim=1).view(batch_size, number)
    return {
        name: Mean((scores_BN.argmax(dim=1) == right_B).sum(), batch_size)
        for name, scores_BN in (
            ("accuracy", likelihood_BN),
            ("accuracy_per_byte", likelihood_BN / bytes_BN.clamp(min=1)),
        )
    }


def cloze(
    tokens: Tokens, *, context: int, questions: int, seed: int, choices: int = 4, ending: int = 16
) -> list[Question]:
    """Questions from a text itself: which of several pieces of it really follows?

    The right ending is what comes next, the others were taken from elsewhere in `tokens`; each `ending` tokens long, after
    at most `context` - `ending` of them. Chance is 1 in `choices`. The same text and seed give the same questions.
    """
    ending = min(ending, context // 2)
    before = context - ending
    places = len(tokens) - context
    if ending < 1:
        raise DataError(f"context = {context}: a question needs a token before its ending: --cloze-questions 0")
    if places < choices:
        raise DataError(
            f"{len(tokens)} tokens are too few for questions of context {context}\n"
            "  give more text to hold out, a smaller model.context, or --cloze-questions 0"
        )
    key = stream_key(seed, "cloze")
    made = []
    for number in range(questions):
        generator = np.random.default_rng(fold(key, number))
        start = int(generator.integers(places + 1))
        starts = [start + before]
        for _ in range(100 * choices):  # endings that are the same text would be no choice
            other = int(generator.integers(len(tokens) - ending + 1))
            if not any(np.array_equal(tokens[other : other + ending], tokens[one : one + ending]) for one in starts):
                starts.append(other)
            if len(starts) == choices:
                break
        else:
            raise DataError(
                f"the held-out text repeats itself: there are not {choices} different pieces of {ending} tokens"
            )
        order = generator.permutation(choices)
        endings = [tokens[starts[place] : starts[place] + ending].tolist() for place in order]
        made.append(Question(tokens[start : start + before].tolist(), endings, int(np.flatnonzero(order == 0)[0])))
    return made
