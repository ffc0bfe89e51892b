"""Multiple choice made from a text itself: which of several pieces of it really follows? It moves on tiny models."""

from __future__ import annotations

import numpy as np

from surefoot.data.choices import Question
from surefoot.data.shards import Tokens
from surefoot.errors import DataError
from surefoot.seeding import fold, stream_key


def cloze(
    tokens: Tokens, *, context: int, questions: int, seed: int, choices: int = 4, ending: int = 16
) -> list[Question]:
    """Questions from a text itself: which of several pieces of it really follows?

    The right ending is what comes next, the others were taken from elsewhere in `tokens`; each `ending` tokens long, after
    at most `context` - `ending` of them. Chance is 1 in `choices`. The same text and seed give the same questions.

    >>> question = cloze(np.arange(100), context=8, questions=1, seed=0)[0]
    >>> beginning, right = question.beginnings[question.right], question.endings[question.right]
    >>> right[0] - beginning[-1], len(question.endings)
    (1, 4)
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
        beginning = tokens[start : start + before].tolist()
        made.append(Question([beginning] * choices, endings, int(np.flatnonzero(order == 0)[0])))
    return made
