"""Questions made from a text: only the right ending follows; 1 second."""

from __future__ import annotations

import numpy as np
import pytest

from refused import refused
from surefoot.errors import DataError
from surefoot.recipes.readers.text.multiple_choice import cloze_questions

TEXT = np.random.default_rng(0).integers(1000, size=3000).astype(np.uint16)


def follows(prefix, ending):
    row = [*prefix, *ending]
    return any(
        TEXT[start : start + len(row)].tolist() == row for start in range(len(TEXT) - len(row) + 1)
    )


def test_of_four_different_endings_only_the_right_one_follows_in_the_text():
    for question in cloze_questions(TEXT, context=64, questions=30, seed=0):
        assert (len(question.contexts[0]), [len(ending) for ending in question.endings]) == (
            48,
            [16] * 4,
        )
        assert len({tuple(ending) for ending in question.endings}) == 4
        assert [follows(question.contexts[0], ending) for ending in question.endings] == [
            place == question.label for place in range(4)
        ]


def test_right_endings_stand_in_every_place_and_the_same_seed_asks_the_same():
    first, again, other = (
        cloze_questions(TEXT, context=64, questions=100, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert all(10 < [question.label for question in first].count(place) < 45 for place in range(4))


@pytest.mark.parametrize(
    ("tokens", "context", "code"),
    [
        (TEXT[:60], 64, "questions-need-more-tokens"),
        (np.zeros(500, np.uint16), 64, "held-out-text-repetitive"),
        (TEXT, 1, "context-without-questions"),
    ],
)
def test_a_text_that_gives_no_questions_is_refused(tokens, context, code):
    with refused(code, DataError):
        cloze_questions(tokens, context=context, questions=3, seed=0)
