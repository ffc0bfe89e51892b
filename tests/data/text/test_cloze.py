"""Questions made from a text: only the right ending follows; 1 second."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from refused import refused
from surefoot.errors import DataError
from surefoot.recipes.readers.text.multiple_choice import cloze_questions

TEXT = np.random.default_rng(0).integers(1000, size=3000).astype(np.uint16)


def is_in_text(tokens):
    rows = sliding_window_view(TEXT, len(tokens))
    return bool((rows == tokens).all(axis=1).any())


def test_of_four_different_endings_only_the_right_one_follows_in_the_text():
    for question in cloze_questions(TEXT, context=64, questions=30, seed=0):
        prefix = question.contexts[0]
        assert len(prefix) == 48
        assert [len(ending) for ending in question.endings] == [16] * 4
        assert len({tuple(ending) for ending in question.endings}) == 4
        for place, ending in enumerate(question.endings):
            assert is_in_text([*prefix, *ending]) == (place == question.label)


def test_right_endings_stand_in_every_place():
    questions = cloze_questions(TEXT, context=64, questions=100, seed=0)

    labels = [question.label for question in questions]
    for place in range(4):
        assert 10 < labels.count(place) < 45


def test_the_same_seed_asks_the_same_and_another_asks_others():
    questions = cloze_questions(TEXT, context=64, questions=100, seed=0)

    assert cloze_questions(TEXT, context=64, questions=100, seed=0) == questions
    assert cloze_questions(TEXT, context=64, questions=100, seed=1) != questions


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
