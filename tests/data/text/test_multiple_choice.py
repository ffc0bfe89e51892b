"""Multiple choice: the scores against every ending by hand, one token after the other; law 6; what
is refused. 3 seconds.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from refused import refused
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.errors import DataError
from surefoot.metrics.multiple_choice import continuation_accuracy, multiple_choice_accuracy
from surefoot.recipes.readers.text.multiple_choice import MultipleChoice, Question
from surefoot.train.evaluate import evaluate

VOCABULARY = 7
BYTES = [1, 2, 3, 1, 1, 5, 1]


class Table(nn.Module):
    """The next token depends on the last one only, by a fixed table."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.logits = torch.randn(
            VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)
        )

    def forward(self, tokens):
        return self.logits[tokens]


def questions(number=40, *, choices=4):
    """Of 1 to 5 tokens each; of every other question the beginnings differ."""
    generator = np.random.default_rng(1)

    def text():
        return generator.integers(VOCABULARY, size=int(generator.integers(1, 6)))

    made = []
    for place in range(number):
        contexts = [text() for _ in range(choices)] if place % 2 else [text()] * choices
        made.append(
            Question(contexts, [text() for _ in range(choices)], int(generator.integers(choices)))
        )
    return made


def dataset(asked, *, context=20):
    return MultipleChoice(asked, context=context, byte_counts=BYTES)


def scored(asked, *metrics, batch_size=7, model=None, predict=None):
    split = sf.Split(dataset(asked), metrics=metrics, batch_size=batch_size, predict=predict)
    return evaluate(Table() if model is None else model, split)


def walked(model, prefix, ending):
    """Log-probability of each token of an ending, and whether it is the likeliest at its place."""
    row = [*map(int, prefix)]
    for token in map(int, ending):
        logits = model.logits[row[-1]]
        yield float(logits.log_softmax(0)[token]), int(logits.argmax()) == token
        row.append(token)


def by_hand(model, asked, *, size):
    right = 0
    for question in asked:
        scores = [
            sum(one for one, _ in walked(model, prefix, ending)) / size(ending)
            for prefix, ending in zip(question.contexts, question.endings, strict=True)
        ]
        right += int(np.argmax(scores)) == question.label
    return right / len(asked)


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_accuracies_are_those_of_every_ending_scored_token_by_token(batch_size):
    asked = questions()
    found = scored(asked, multiple_choice_accuracy, batch_size=batch_size)
    assert found["acc"] == by_hand(Table(), asked, size=lambda ending: 1)
    assert found["acc_norm"] == by_hand(Table(), asked, size=len)
    assert found["acc_per_byte"] == by_hand(
        Table(), asked, size=lambda ending: sum(BYTES[one] for one in ending)
    )
    assert len(set(found.values())) == 3  # or one of them would show nothing


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_a_continuation_is_right_where_every_token_of_it_is_the_likeliest(batch_size):
    model = Table()
    asked = questions(choices=1)
    asked += [
        Question([[one]], [[int(model.logits[one].argmax())]], 0) for one in range(VOCABULARY)
    ]
    walks = [list(walked(model, question.contexts[0], question.endings[0])) for question in asked]
    found = scored(asked, continuation_accuracy, batch_size=batch_size)
    assert found["acc"] == sum(all(hit for _, hit in walk) for walk in walks) / len(asked) > 7 / 47
    assert found["loss"] == pytest.approx(
        -sum(one for walk in walks for one, _ in walk) / len(asked), rel=1e-6
    )


def gpt():
    torch.manual_seed(0)
    shape = sf.models.GPTConfig(
        layers=2,
        heads=2,
        width=32,
        context=20,
        vocab_size=VOCABULARY,
        family="gpt2",
        tie_embeddings=True,
    )
    model = sf.models.GPT(shape)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@cache
def each_alone():
    model = gpt()
    asked = questions()
    return [
        scored([question], multiple_choice_accuracy, continuation_accuracy_, model=model)
        for question in asked
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 16, 40])
def test_scores_of_a_transformer_do_not_depend_on_the_batch_size_nor_on_what_stands_beside(
    batch_size,
):
    """Law 6; attention must not see the filling. Against each question in a data set of its own."""
    asked = questions()
    alone = each_alone()
    found = scored(
        asked, multiple_choice_accuracy, continuation_accuracy_, model=gpt(), batch_size=batch_size
    )
    for name, value in found.items():
        assert value == pytest.approx(
            math.fsum(one[name] for one in alone) / len(asked), rel=1e-6
        ), name


def continuation_accuracy_(outputs, targets):
    return {
        f"greedy_{name}": mean for name, mean in continuation_accuracy(outputs, targets).items()
    }


def test_the_logits_of_the_endings_alone_give_the_same_scores():
    from surefoot.recipes.gpt.questions import predict_endings

    asked = questions(), multiple_choice_accuracy
    assert scored(*asked, model=gpt(), predict=predict_endings) == scored(*asked, model=gpt())


def test_endings_that_are_equally_likely_are_told_apart_by_nothing():
    """A model that knows nothing gives endings of one length one likelihood, however much filling
    stands behind them.
    """
    model = Table()
    model.logits.zero_()
    short = [Question([[1]] * 4, [[place] * 5 for place in range(4)], 0)] * 3
    long = [Question([[1]] * 4, [[place] * 19 for place in range(4)], 0)]
    assert (
        scored(short + long, multiple_choice_accuracy, model=model, batch_size=4)["acc"] == 1.0
    )  # the first of equals


def test_a_row_longer_than_the_context_loses_its_beginning_and_never_its_ending():
    made = dataset(
        [Question([[1, 2, 3, 4]] * 2, [[5, 6], [6]], 0), Question([[1]] * 2, [[2], [3]], 1)],
        context=3,
    )
    batch = made.gather(np.array([0]), np.array([0]))
    targets = batch.targets
    assert batch.tokens.tolist() == [[3, 4, 5], [2, 3, 4]]
    assert targets.tokens.tolist() == [5, 6, 6]
    assert targets.positions.tolist() == [1, 2, 3 + 2]
    assert (targets.rows.tolist(), targets.ending_tokens.tolist()) == ([0, 0, 1], [[2, 1]])
    assert targets.ending_bytes.tolist() == [[5 + 1, 1]]
    assert (made.shortened, len(made)) == (1, 2)


def test_questions_come_from_the_longest_to_the_shortest_and_each_once():
    made = dataset(questions(), context=20)
    batches = [made.gather(np.array([one]), np.array([0])) for one in range(len(made))]
    shown = [batch.tokens.shape[1] for batch in batches]
    assert shown == sorted(shown, reverse=True)
    assert sum(int(batch.targets.right) for batch in batches) == sum(
        question.label for question in questions()
    )


def test_a_batch_holds_whole_numbers_alone_so_that_every_device_takes_it():
    batch = dataset(questions()).gather(np.arange(7), np.zeros(7, dtype=np.int64))
    assert {part.dtype for part in (batch.tokens, *batch.targets)} == {torch.int64}


def test_it_is_a_sound_data_set_whose_fingerprint_tells_questions_apart():
    asked = questions()
    assert check_samples(dataset(asked), seed=0) == len(asked)
    other = [
        *asked[:-1],
        Question(asked[-1].contexts, asked[-1].endings, (asked[-1].label + 1) % 4),
    ]
    assert fingerprint(dataset(asked)) == fingerprint(dataset(asked)) != fingerprint(dataset(other))


@pytest.mark.parametrize(
    ("wrong", "code", "fields"),
    [
        ([], "questions-missing", {}),
        (
            [Question([[1]] * 2, [[2], []], 0)],
            "question-with-empty-text",
            {"where": "question 0", "context": 1, "ending": 0},
        ),
        (
            [Question([[]] * 2, [[2], [3]], 0)],
            "question-with-empty-text",
            {"where": "question 0", "context": 0},
        ),
        ([Question([[1]] * 2, [[2], [3]], 2)], "question-malformed", {"endings": 2}),
        ([Question([[1]], [[2], [3]], 0)], "question-malformed", {"contexts": 1}),
        (
            [Question([[1]] * 2, [[2], [3]], 0), Question([[1]], [[2]], 0, "a.jsonl, line 9")],
            "question-malformed",
            {"where": "a.jsonl, line 9", "endings": 1},
        ),
        (
            [Question([[1]] * 2, [[2] * 9, [3]], 0, "a.jsonl, line 9")],
            "ending-longer-than-context",
            {"where": "a.jsonl, line 9", "ending": 9, "context": 8},
        ),
    ],
)
def test_questions_that_are_none_are_refused(wrong, code, fields):
    with refused(code, DataError, **fields):
        dataset(wrong, context=8)


def test_a_split_without_metrics_and_loss_is_refused():
    with refused("nothing-to-evaluate"):
        evaluate(Table(), sf.Split(dataset(questions())))


def test_scoring_leaves_a_model_as_it_was():
    model = gpt().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scored(questions(), multiple_choice_accuracy, model=model)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_compiled_model_is_not_compiled_again_for_every_shape_of_questions():
    counted = []

    def backend(graph, inputs):
        counted.append(graph)
        return graph.forward

    model = gpt()
    asked = questions()
    assert scored(
        asked, multiple_choice_accuracy, model=torch.compile(model, backend=backend)
    ) == scored(asked, multiple_choice_accuracy, model=model)
    assert counted == []
