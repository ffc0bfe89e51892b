"""Beam search: greedy with a beam of 1, the best of all targets with a wide one, and the same in
any company; 5 seconds.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from refused import refused
from surefoot.errors import DataError, DivergedError
from surefoot.models.seq2seq import Seq2Seq
from surefoot.models.seq2seq_layers import Seq2SeqConfig
from surefoot.recipes.generate.beam import BEGIN, END, Hypothesis, beam_search, penalty


def seq2seq(vocab_size: int = 14, *, seed: int = 5, std: float = 0.4) -> Seq2Seq:
    """A model at random in float64, so that ties and rounding decide nothing."""
    torch.manual_seed(seed)
    shape = Seq2SeqConfig(
        encoder_layers=1,
        decoder_layers=2,
        heads=2,
        width=16,
        mlp_width=24,
        vocab_size=vocab_size,
        context=40,
    )
    model = Seq2Seq(shape).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=std)
    return model


def sources(count: int, *, vocab_size: int = 14) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [
        [*torch.randint(3, vocab_size, (size,), generator=generator).tolist(), END]
        for size in sizes
    ]


@pytest.fixture(scope="module")
def undecided() -> Seq2Seq:
    """A model that has begun to learn to leave out about every third token: it ends, and is never
    sure.
    """
    torch.manual_seed(0)
    shape = Seq2SeqConfig(
        encoder_layers=1,
        decoder_layers=2,
        heads=2,
        width=16,
        mlp_width=24,
        vocab_size=14,
        context=40,
    )
    model = Seq2Seq(shape).double()
    rows = sources(512)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(50):
        batch = rows[step % 8 * 64 :][:64]
        targets = [
            [BEGIN, *(token for token in row[:-1] if torch.rand(()) < 0.7), END] for row in batch
        ]
        source_BS, target_BT = (
            nn.utils.rnn.pad_sequence([torch.tensor(row) for row in side], batch_first=True)
            for side in (batch, targets)
        )
        logits_BTV = model(source_BS, target_BT[:, :-1])
        nn.functional.cross_entropy(
            logits_BTV.transpose(1, 2), target_BT[:, 1:], ignore_index=0
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def log_probability(model: Seq2Seq, source: list[int], target: list[int]) -> float:
    """Of a whole target, from one pass over it without a cache; padding and begin keep their
    share.
    """
    with torch.no_grad():
        logits_TV = model(torch.tensor([source]), torch.tensor([[BEGIN, *target[:-1]]]))[0]
    return float(logits_TV.log_softmax(dim=1).gather(1, torch.tensor(target)[:, None]).sum())


def greedy(model: Seq2Seq, source: list[int], most: int) -> list[int]:
    """The likeliest token each time, in the plainest way."""
    target = [BEGIN]
    for _ in range(most):
        with torch.no_grad():
            logits_V = model(torch.tensor([source]), torch.tensor([target]))[0, -1]
        logits_V[:END] = -math.inf
        token = int(logits_V.argmax())
        if token == END:
            break
        target.append(token)
    return target[1:]


@pytest.mark.parametrize("kind", ["undecided", "endless"])
def test_a_beam_of_1_is_greedy_search(kind: str, undecided: Seq2Seq) -> None:
    model = undecided if kind == "undecided" else seq2seq()
    rows = sources(6)
    found = beam_search(model, rows, beam_size=1)
    assert [one.tokens for one in found] == [greedy(model, row, 2 * len(row) + 10) for row in rows]
    at_the_end = [
        len(one.tokens) == 2 * len(row) + 10 for one, row in zip(found, rows, strict=True)
    ]
    assert all(at_the_end) if kind == "endless" else sum(at_the_end) < 3


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_wide_beam_finds_the_best_of_all_targets(alpha: float, seed: int) -> None:
    model = seq2seq(6, seed=seed)
    most = 4
    for source in sources(2, vocab_size=6):
        every = [
            [*row, END]
            for size in range(most)
            for row in itertools.product(range(3, 6), repeat=size)
        ]
        scored = {
            tuple(one): log_probability(model, source, one) / penalty(len(one), alpha)
            for one in every
        }
        best = max(scored, key=lambda one: scored[one])
        found = beam_search(
            model, [source], beam_size=200, length_penalty=alpha, max_new_tokens_fn=lambda _: most
        )[0]
        assert [*found.tokens, END] == [*best]
        assert found.score == pytest.approx(scored[best], rel=1e-12)


def plain_search(
    model: Seq2Seq, source: list[int], *, beam_size: int, alpha: float, most: int
) -> list[int]:
    """The same rules over Python lists, every score from a pass over the whole target."""
    opened: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        following = [
            (log_probability(model, source, [*tokens, token]), [*tokens, token])
            for _, tokens in opened
            for token in range(END, model.shape.vocab_size)
        ]
        following.sort(key=lambda one: -one[0])
        ended += [
            (score / penalty(length, alpha), one)
            for score, one in following[:beam_size]
            if one[-1] == END
        ]
        opened = [(score, one) for score, one in following if one[-1] != END][:beam_size]
        if len(ended) >= beam_size:
            break
    return max(ended)[1][:-1] if ended else opened[0][1]


@pytest.mark.fast("2-0.6")
@pytest.mark.parametrize(
    ("beam_size", "alpha"),
    [
        (2, 0.6),
        (3, 0.0),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((5, 1.0), (2, 4.0), (4, 4.0))),
    ],
)
def test_it_is_the_search_that_lists_would_make(
    beam_size: int, alpha: float, undecided: Seq2Seq
) -> None:
    rows = sources(3)
    found = beam_search(
        undecided, rows, beam_size=beam_size, length_penalty=alpha, max_new_tokens_fn=lambda _: 7
    )
    expected = [
        plain_search(undecided, row, beam_size=beam_size, alpha=alpha, most=7) for row in rows
    ]
    assert [one.tokens for one in found] == expected


@pytest.mark.parametrize("batch_size", [3, 20])
def test_a_target_does_not_depend_on_what_else_is_searched(
    batch_size: int, undecided: Seq2Seq
) -> None:
    rows = sources(20)
    together = beam_search(undecided, rows, beam_size=4, batch_size=batch_size)
    alone = [beam_search(undecided, [row], beam_size=4)[0] for row in rows]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.score for one in together] == pytest.approx([one.score for one in alone], rel=1e-10)
    assert len({len(one.tokens) for one in together}) > 3  # they do end at different times


def test_the_score_is_the_log_probability_over_the_penalty(undecided: Seq2Seq) -> None:
    for row, found in zip(
        sources(12),
        beam_search(undecided, sources(12), beam_size=3, length_penalty=0.8),
        strict=True,
    ):
        whole = [*found.tokens, *([END] if len(found.tokens) < 2 * len(row) + 10 else [])]
        expected = log_probability(undecided, row, whole) / penalty(len(whole), 0.8)
        assert found.score == pytest.approx(expected, rel=1e-10)


def test_a_larger_length_penalty_gives_longer_targets(undecided: Seq2Seq) -> None:
    lengths = [
        sum(
            len(one.tokens)
            for one in beam_search(undecided, sources(30), beam_size=4, length_penalty=alpha)
        )
        for alpha in (0.0, 1.0, 3.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


def test_no_target_is_longer_than_it_may_be() -> None:
    model = seq2seq(std=0.05)  # which hardly ever ends
    found = beam_search(model, sources(9), beam_size=3, max_new_tokens_fn=lambda tokens: tokens + 1)
    assert all(len(one.tokens) <= len(row) + 1 for one, row in zip(found, sources(9), strict=True))
    long = beam_search(model, [[*[5] * 38, END]], beam_size=1)[0]
    assert len(long.tokens) <= model.shape.context


def test_padding_and_begin_are_never_said() -> None:
    model = seq2seq()
    with torch.no_grad():
        model.embedding.weight[0] = model.embedding.weight[1] = 9.0
    assert all(
        token >= 3 for one in beam_search(model, sources(9), beam_size=4) for token in one.tokens
    )


def test_modes_and_generators_are_left_as_they_were() -> None:
    model = seq2seq().train()
    model.encoder.eval()
    before = torch.get_rng_state()
    first = beam_search(model, sources(3), beam_size=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.encoder.training
    assert beam_search(model.eval(), sources(3), beam_size=2) == first


@pytest.mark.parametrize(
    "changes",
    [{"beam_size": 0}, {"length_penalty": -1.0}, {"length_penalty": math.nan}, {"batch_size": 0}],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, float]) -> None:
    ((setting, value),) = changes.items()
    with refused("setting-out-of-range", setting=setting, value=value):
        beam_search(seq2seq(), sources(2), **changes)  # type: ignore[arg-type]


def test_what_cannot_be_searched_is_told() -> None:
    with refused("source-empty", DataError, source=1):
        beam_search(seq2seq(), [[5, END], []])
    model = seq2seq()
    model.head.weight.data.fill_(math.inf)
    with refused("logits-not-finite", DivergedError):
        beam_search(model, sources(2))
    assert beam_search(seq2seq(), []) == []


def test_a_hypothesis_is_tokens_and_score() -> None:
    assert Hypothesis([3], -1.0) == Hypothesis([3], -1.0)
