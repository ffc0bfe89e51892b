"""Multiple-choice questions for language models: the model ranks several endings of a context by
likelihood.

Shapes: B questions, N choices, R rows (questions x choices), T time (tokens), E tokens of all
endings together, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from surefoot.data.order import Ids
from surefoot.data.text.shards import Tokens
from surefoot.errors import DataError, Setting
from surefoot.metrics.multiple_choice import ChoiceBatch, ChoiceTargets
from surefoot.seeding import fold, stream_key

TokenRow = Sequence[int] | Tokens


@dataclass(frozen=True)
class Question:
    """A tokenized multiple-choice question: a context and an ending per choice, and `label`, the
    index of the right choice.

    Usually all contexts are equal, or all endings are equal. No context or ending may be empty.
    `source` is the origin of the question in messages, such as a file and a line.

    >>> question = Question(contexts=[[5, 6]] * 2, endings=[[7], [8, 9]], label=1)
    >>> MultipleChoice([question], context=8, byte_counts=[1] * 10).max_targets
    3
    """

    contexts: Sequence[TokenRow]
    endings: Sequence[TokenRow]
    label: int
    source: str = ""


class MultipleChoice:
    """Data set of questions for a `Split` with the metric `multiple_choice_accuracy` or
    `continuation_accuracy`.

    A row is a context and its ending. If a row exceeds `context` + 1 tokens, the start of its
    context is cut off; `shortened` is the number of questions with such rows. Questions are sorted
    from longest to shortest, so the first batch needs the most memory. `max_targets` is the largest
    number of ending tokens of a question. All questions must have the same number of endings.

    >>> dataset = MultipleChoice(
    ...     [Question([[1, 2]] * 2, [[3], [4, 5]], label=0)], context=8, byte_counts=[1] * 6
    ... )
    >>> dataset.gather(np.array([0]), np.array([0])).targets.tokens.tolist()
    [3, 4, 5]
    """

    def __init__(
        self, questions: Sequence[Question], *, context: int, byte_counts: Sequence[int] | Tokens
    ) -> None:
        if not questions:
            raise without_questions("the list of questions")
        self.context = context
        self.choices = len(questions[0].endings)
        self.shortened = 0
        longest = context + 1  # the last token is a target only
        rows = []
        endings = []
        for index, question in enumerate(questions):
            _refuse_malformed(question, index, choices=self.choices, context=context)
            is_shortened = False
            for prefix, ending in zip(question.contexts, question.endings, strict=True):
                row = np.concatenate([prefix, ending])
                is_shortened = is_shortened or len(row) > longest
                rows.append(row[-longest:])
                endings.append(len(ending))
            if is_shortened:
                self.shortened += 1
        self.tokens = np.concatenate(rows).astype(np.int32)
        self.lengths = np.array([len(row) for row in rows])
        self.endings = np.array(endings)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.byte_counts = np.asarray(byte_counts)
        self.right = np.array([question.label for question in questions])
        self.order = np.argsort(-self.lengths.reshape(-1, self.choices).max(axis=1), kind="stable")
        self.max_targets = int(self.endings.reshape(-1, self.choices).sum(axis=1).max())

    def __len__(self) -> int:
        return len(self.right)

    def gather(self, ids: Ids, _epochs: Ids) -> ChoiceBatch:
        """Return the questions `ids` as one batch, padded to the longest row; epochs are
        ignored.
        """
        questions = self.order[ids]
        rows_R = (questions[:, None] * self.choices + np.arange(self.choices)).flatten()
        starts_R = self.starts[rows_R]
        shown_R = self.lengths[rows_R] - 1
        endings_R = self.endings[rows_R]
        span_T = np.arange(int(shown_R.max()))
        tokens_RT = self.tokens.take(starts_R[:, None] + span_T, mode="clip").astype(np.int64)
        tokens_RT[span_T >= shown_R[:, None]] = 0
        rows_E = np.repeat(np.arange(len(rows_R)), endings_R)
        within_E = np.arange(len(rows_E)) - np.repeat(np.cumsum(endings_R) - endings_R, endings_R)
        places_E = (shown_R - endings_R)[rows_E] + within_E
        targets_E = self.tokens[starts_R[rows_E] + places_E + 1].astype(np.int64)
        bytes_R = np.bincount(rows_E, self.byte_counts[targets_E], minlength=len(rows_R))
        bytes_R = bytes_R.astype(np.int64)  # bincount returns float64, which MPS lacks
        targets = ChoiceTargets(
            positions=torch.from_numpy(rows_E * len(span_T) + places_E),
            tokens=torch.from_numpy(targets_E),
            rows=torch.from_numpy(rows_E),
            ending_tokens=torch.from_numpy(endings_R).view(len(ids), self.choices),
            ending_bytes=torch.from_numpy(bytes_R).view(len(ids), self.choices),
            right=torch.from_numpy(self.right[questions]),
        )
        return ChoiceBatch(torch.from_numpy(tokens_RT), targets)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of questions, a hash of their tokens and labels, and the context
        length.
        """
        digest = sha256()
        for array in (self.tokens, self.lengths, self.endings, self.right):
            digest.update(array.astype("<i8").tobytes())
        return {"questions": len(self), "sha256": digest.hexdigest(), "context": self.context}


def without_questions(source: object) -> DataError:
    """Return the error for a source of questions that has none."""
    return DataError(
        "questions-missing",
        problem=f"{source} is empty: at least one question is needed",
        where=str(source),
    )


def _refuse_malformed(question: Question, index: int, *, choices: int, context: int) -> None:
    where = question.source or f"question {index}"
    number = len(question.endings)
    has_label = 0 <= question.label < number
    if number != choices or len(question.contexts) != number or not has_label:
        raise DataError(
            "question-malformed",
            problem=f"{where} has {number} endings, {len(question.contexts)} contexts and the label"
            f" {question.label}; expected {choices} of both, and a label from 0 to {choices - 1}",
            where=where,
            endings=number,
            contexts=len(question.contexts),
            label=question.label,
            choices=choices,
        )
    for prefix, ending in zip(question.contexts, question.endings, strict=True):
        if not len(ending) or not len(prefix):
            raise DataError(
                "question-with-empty-text",
                problem=f"{where}: a context of {len(prefix)} tokens and an ending of"
                f" {len(ending)}: neither may be empty",
                where=where,
                context=len(prefix),
                ending=len(ending),
            )
        if len(ending) > context:
            raise DataError(
                "ending-longer-than-context",
                problem=f"{where}: an ending of {len(ending)} tokens, and the model's context has"
                f" {context}",
                remedy=[
                    ("a larger", Setting("model.context")),
                    "use a tokenizer that needs fewer tokens for the same text",
                ],
                where=where,
                ending=len(ending),
                context=context,
            )


def cloze_questions(
    tokens: Tokens, *, context: int, questions: int, seed: int, choices: int = 4, ending: int = 16
) -> list[Question]:
    """Build multiple-choice questions from a text; the right ending is the true continuation of the
    context.

    Wrong endings are random pieces of `tokens`. Each ending has `ending` tokens (at most half of
    `context`), and each context has `context` - `ending` tokens. Chance accuracy is 1 / `choices`.
    The same text and seed give the same questions.

    >>> question = cloze_questions(np.arange(100), context=8, questions=1, seed=0)[0]
    >>> prefix, right = question.contexts[question.label], question.endings[question.label]
    >>> right[0] - prefix[-1], len(question.endings)
    (1, 4)
    """
    ending = min(ending, context // 2)
    before = context - ending
    places = len(tokens) - context
    if ending < 1:
        raise DataError(
            "context-without-questions",
            problem=f"context = {context}: a question needs a token before its ending",
            remedy=Setting("cloze_questions", 0),
            setting="model.context",
            value=context,
        )
    if places < choices:
        raise DataError(
            "questions-need-more-tokens",
            problem=f"{len(tokens)} tokens are too few for questions of context {context}",
            remedy=[
                "give more held-out text",
                ("a smaller", Setting("model.context")),
                Setting("cloze_questions", 0),
            ],
            tokens=len(tokens),
            context=context,
        )
    cloze = []
    for number in range(questions):
        generator = np.random.default_rng(fold(stream_key(seed, "cloze"), number))
        prefix_start = int(generator.integers(places + 1))
        starts = [prefix_start + before]
        for _ in range(100 * choices):  # the endings of a question must differ
            start = int(generator.integers(len(tokens) - ending + 1))
            piece = tokens[start : start + ending]
            if not any(np.array_equal(piece, tokens[other : other + ending]) for other in starts):
                starts.append(start)
            if len(starts) == choices:
                break
        else:
            raise DataError(
                "held-out-text-repetitive",
                problem=f"the held-out text has fewer than {choices} different pieces of {ending}"
                " tokens",
                choices=choices,
                ending=ending,
            )
        order = generator.permutation(choices)
        endings = []
        for choice in order:
            start = starts[choice]
            endings.append(tokens[start : start + ending].tolist())
        prefix = tokens[prefix_start : prefix_start + before].tolist()
        right = int(np.flatnonzero(order == 0)[0])
        cloze.append(Question([prefix] * choices, endings, right))
    return cloze
