"""Multiple choice: the scores against every ending by hand, one token after the other; law 6; what
is refused. 3 seconds.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from refused import refused
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.errors import DataError
from surefoot.metrics.multiple_choice import continuation_accuracy, multiple_choice_accuracy
from surefoot.recipes.gpt.questions import predict_endings
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


def build_questions(number=40, *, choices=4):
    """Of 1 to 5 tokens each; of every other question the beginnings differ."""
    generator = np.random.default_rng(1)

    def text():
        return generator.integers(VOCABULARY, size=int(generator.integers(1, 6)))

    questions = []
    for place in range(number):
        distinct = choices if place % 2 else 1
        contexts = [text() for _ in range(distinct)] * (choices // distinct)
        endings = [text() for _ in range(choices)]
        label = int(generator.integers(choices))
        questions.append(Question(contexts, endings, label))
    return questions


def build_dataset(questions, *, context=20):
    return MultipleChoice(questions, context=context, byte_counts=BYTES)


def score(questions, *metrics, batch_size=7, model=None, predict=None):
    split = sf.Split(
        build_dataset(questions), metrics=metrics, batch_size=batch_size, predict=predict
    )
    return evaluate(Table() if model is None else model, split)


def log_probability(model, prefix, ending):
    """Of an ending, one token after the other."""
    total = 0.0
    last = int(prefix[-1])
    for token in map(int, ending):
        total += float(model.logits[last].log_softmax(0)[token])
        last = token
    return total


def is_likeliest(model, prefix, ending):
    """Whether every token of an ending is the likeliest at its place."""
    tokens = [int(prefix[-1]), *map(int, ending)]
    return all(int(model.logits[last].argmax()) == token for last, token in pairwise(tokens))


def accuracy_by_hand(model, questions, *, size):
    right = 0
    for question in questions:
        scores = []
        for prefix, ending in zip(question.contexts, question.endings, strict=True):
            scores.append(log_probability(model, prefix, ending) / size(ending))
        right += int(np.argmax(scores)) == question.label
    return right / len(questions)


def count_bytes(ending):
    return sum(BYTES[token] for token in ending)


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_accuracies_are_those_of_every_ending_scored_token_by_token(batch_size):
    questions = build_questions()

    scores = score(questions, multiple_choice_accuracy, batch_size=batch_size)

    assert scores["acc"] == accuracy_by_hand(Table(), questions, size=lambda ending: 1)
    assert scores["acc_norm"] == accuracy_by_hand(Table(), questions, size=len)
    assert scores["acc_per_byte"] == accuracy_by_hand(Table(), questions, size=count_bytes)
    assert len(set(scores.values())) == 3  # or one of them would show nothing


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_a_continuation_is_right_where_every_token_of_it_is_the_likeliest(batch_size):
    model = Table()
    questions = build_questions(choices=1)
    for token in range(VOCABULARY):
        likeliest = int(model.logits[token].argmax())
        questions.append(Question([[token]], [[likeliest]], 0))

    scores = score(questions, continuation_accuracy, batch_size=batch_size)

    right = 0
    total = 0.0
    for question in questions:
        right += is_likeliest(model, question.contexts[0], question.endings[0])
        total += log_probability(model, question.contexts[0], question.endings[0])
    assert scores["acc"] == right / 47 > 7 / 47
    assert scores["loss"] == pytest.approx(-total / 47, rel=1e-6)


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


def greedy_accuracy(outputs, targets):
    """`continuation_accuracy` under names that no other metric has."""
    means = continuation_accuracy(outputs, targets)
    return {f"greedy_{name}": mean for name, mean in means.items()}


METRICS = (multiple_choice_accuracy, greedy_accuracy)


@pytest.fixture(scope="module")
def scores_of_each():
    """The scores of each question in a data set of its own."""
    model = gpt()
    return [score([question], *METRICS, model=model) for question in build_questions()]


@pytest.mark.parametrize("batch_size", [1, 3, 16, 40])
def test_scores_of_a_transformer_do_not_depend_on_the_batch_size_nor_on_what_stands_beside(
    batch_size, scores_of_each
):
    """Law 6; attention must not see the filling."""
    scores = score(build_questions(), *METRICS, model=gpt(), batch_size=batch_size)

    for name, value in scores.items():
        mean = math.fsum(alone[name] for alone in scores_of_each) / len(scores_of_each)
        assert value == pytest.approx(mean, rel=1e-6), name


def test_the_logits_of_the_endings_alone_give_the_same_scores():
    questions = build_questions()
    expected = score(questions, multiple_choice_accuracy, model=gpt())

    scores = score(questions, multiple_choice_accuracy, model=gpt(), predict=predict_endings)

    assert scores == expected


def test_endings_that_are_equally_likely_are_told_apart_by_nothing():
    """A model that knows nothing gives endings of one length one likelihood, however much filling
    stands behind them.
    """
    model = Table()
    model.logits.zero_()
    short = [Question([[1]] * 4, [[place] * 5 for place in range(4)], 0)] * 3
    long = [Question([[1]] * 4, [[place] * 19 for place in range(4)], 0)]

    scores = score(short + long, multiple_choice_accuracy, model=model, batch_size=4)

    assert scores["acc"] == 1.0  # the first of equals


def test_a_row_longer_than_the_context_loses_its_beginning_and_never_its_ending():
    longer = Question([[1, 2, 3, 4]] * 2, [[5, 6], [6]], 0)
    shorter = Question([[1]] * 2, [[2], [3]], 1)
    dataset = build_dataset([longer, shorter], context=3)

    batch = dataset.gather(np.array([0]), np.array([0]))

    assert batch.tokens.tolist() == [[3, 4, 5], [2, 3, 4]]
    targets = batch.targets
    assert targets.tokens.tolist() == [5, 6, 6]
    assert targets.rows.tolist() == [0, 0, 1]
    assert targets.positions.tolist() == [1, 2, 3 + 2]
    assert targets.ending_tokens.tolist() == [[2, 1]]
    assert targets.ending_bytes.tolist() == [[5 + 1, 1]]
    assert dataset.shortened == 1
    assert len(dataset) == 2


def test_questions_come_from_the_longest_to_the_shortest_and_each_once():
    dataset = build_dataset(build_questions())

    batches = [dataset.gather(np.array([place]), np.array([0])) for place in range(len(dataset))]

    widths = [batch.tokens.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    labels = [int(batch.targets.right) for batch in batches]
    assert sum(labels) == sum(question.label for question in build_questions())


def test_a_batch_holds_whole_numbers_alone_so_that_every_device_takes_it():
    batch = build_dataset(build_questions()).gather(np.arange(7), np.zeros(7, dtype=np.int64))

    assert {tensor.dtype for tensor in (batch.tokens, *batch.targets)} == {torch.int64}


def test_questions_are_a_sound_data_set():
    assert check_samples(build_dataset(build_questions()), seed=0) == 40


def test_the_fingerprint_tells_questions_apart():
    *questions, last = build_questions()
    other_last = Question(last.contexts, last.endings, (last.label + 1) % 4)

    first = fingerprint(build_dataset([*questions, last]))

    assert fingerprint(build_dataset([*questions, last])) == first
    assert fingerprint(build_dataset([*questions, other_last])) != first


@pytest.mark.parametrize(
    ("questions", "code", "fields"),
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
def test_questions_that_are_none_are_refused(questions, code, fields):
    with refused(code, DataError, **fields):
        build_dataset(questions, context=8)


def test_a_split_without_metrics_and_loss_is_refused():
    split = sf.Split(build_dataset(build_questions()))

    with refused("nothing-to-evaluate"):
        evaluate(Table(), split)


def test_scoring_leaves_a_model_as_it_was():
    model = gpt().train()
    before = copy.deepcopy(model.state_dict())

    score(build_questions(), multiple_choice_accuracy, model=model)

    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_compiled_model_is_not_compiled_again_for_every_shape_of_questions():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = gpt()
    expected = score(build_questions(), multiple_choice_accuracy, model=model)

    compiled = torch.compile(model, backend=backend)
    scores = score(build_questions(), multiple_choice_accuracy, model=compiled)

    assert scores == expected
    assert graphs == []
