"""Multiple choice: the scorer against one question at a time by hand, and questions made from a text; 2 seconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.data.choices import Question, choice_accuracy, choices, cloze
from surefoot.errors import DataError

VOCABULARY = 7
BYTES = [1, 2, 3, 1, 1, 5, 1]


class Table(nn.Module):
    """The next token depends on the last one only, by a fixed table."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def forward(self, tokens):
        return self.logits[tokens]


def questions(number=40):
    generator = np.random.default_rng(1)
    made = []
    for _ in range(number):
        tokens = [generator.integers(VOCABULARY, size=int(generator.integers(1, 6))).tolist() for _ in range(5)]
        made.append(Question(tokens[0], tokens[1:], int(generator.integers(4))))
    return made


def by_hand(model, asked, *, per_byte):
    """One sum of log-probabilities for each ending, token by token."""
    right = 0
    for question in asked:
        scores = []
        for ending in question.endings:
            row, score = list(question.beginning), 0.0
            for token in ending:
                score += float(model.logits[row[-1]].log_softmax(0)[token])
                row.append(token)
            scores.append(score / sum(BYTES[token] for token in ending) if per_byte else score)
        right += int(np.argmax(scores)) == question.right
    return right / len(asked)


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_accuracy_is_that_of_every_ending_scored_token_by_token(batch_size):
    model, asked = Table(), questions()
    rows = choices(asked, context=20, byte_counts=BYTES)
    right = {"accuracy": 0.0, "accuracy_per_byte": 0.0}
    for first in range(0, len(asked), batch_size):
        batch = [part[first : first + batch_size] for part in rows]
        for name, mean in choice_accuracy(model, batch).items():
            right[name] += float(mean.total)
    assert right["accuracy"] / len(asked) == by_hand(model, asked, per_byte=False)
    assert right["accuracy_per_byte"] / len(asked) == by_hand(model, asked, per_byte=True)
    assert right["accuracy"] != right["accuracy_per_byte"]  # or the second would show nothing


def test_filling_up_is_not_scored():
    model, asked = Table(), questions()
    alone = [choices([question], context=20, byte_counts=BYTES) for question in asked]
    together = choices(asked, context=20, byte_counts=BYTES)
    found = sum(float(choice_accuracy(model, batch)["accuracy"].total) for batch in alone)
    assert found == float(choice_accuracy(model, together)["accuracy"].total)


def test_a_row_longer_than_the_context_loses_its_beginning_and_never_its_ending():
    rows = choices([Question([1, 2, 3, 4], [[5, 6], [6]], 0)], context=3, byte_counts=BYTES)
    assert rows[0].tolist() == [[[3, 4, 5, 6], [2, 3, 4, 6]]]
    assert rows[1].tolist() == [[[False, False, True, True], [False, False, False, True]]]
    assert rows[2].tolist() == [[5 + 1, 1]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "no questions"),
        ([Question([1], [[2], []], 0)], "question 0"),
        ([Question([], [[2], [3]], 0)], "question 0"),
        ([Question([1], [[2], [3]], 2)], "question 0"),
        ([Question([1], [[2], [3]], 0), Question([1], [[2]], 0)], "question 1"),
        ([Question([1], [[2] * 9, [3]], 0)], "at most 8"),
    ],
)
def test_questions_that_are_none_are_refused(wrong, says):
    with pytest.raises(DataError, match=says):
        choices(wrong, context=8, byte_counts=BYTES)


# --- cloze -----------------------------------------------------------------------------------------------------------

TEXT = np.random.default_rng(0).integers(1000, size=3000).astype(np.uint16)


def follows(beginning, ending):
    row = [*beginning, *ending]
    return any(TEXT[start : start + len(row)].tolist() == row for start in range(len(TEXT) - len(row) + 1))


def test_of_four_different_endings_only_the_right_one_follows_in_the_text():
    for question in cloze(TEXT, context=64, questions=30, seed=0):
        assert (len(question.beginning), [len(ending) for ending in question.endings]) == (48, [16] * 4)
        assert len({tuple(ending) for ending in question.endings}) == 4
        assert [follows(question.beginning, ending) for ending in question.endings] == [
            place == question.right for place in range(4)
        ]


def test_right_endings_stand_in_every_place_and_the_same_seed_asks_the_same():
    first, again, other = (cloze(TEXT, context=64, questions=100, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert all(10 < [question.right for question in first].count(place) < 45 for place in range(4))


@pytest.mark.parametrize(("tokens", "says"), [(TEXT[:60], "too few"), (np.zeros(500, np.uint16), "repeats itself")])
def test_a_text_that_gives_no_questions_is_refused(tokens, says):
    with pytest.raises(DataError, match=says):
        cloze(tokens, context=64, questions=3, seed=0)
