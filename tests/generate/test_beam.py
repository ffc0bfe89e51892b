"""Beam search: greedy with a beam of 1, the best of all targets with a wide one, and the same in
any company; 5 seconds.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refused import refused
from surefoot.errors import DataError, DivergedError
from surefoot.models.seq2seq import Seq2Seq
from surefoot.models.seq2seq_layers import Seq2SeqConfig
from surefoot.recipes.generate.beam import BEGIN, END, Hypothesis, beam_search, penalty


def tiny_model(vocab_size: int = 14) -> Seq2Seq:
    """In float64, so that ties and rounding decide nothing."""
    shape = Seq2SeqConfig(
        encoder_layers=1,
        decoder_layers=2,
        heads=2,
        width=16,
        mlp_width=24,
        vocab_size=vocab_size,
        context=40,
    )
    return Seq2Seq(shape).double()


def random_model(vocab_size: int = 14, *, seed: int = 5, std: float = 0.4) -> Seq2Seq:
    torch.manual_seed(seed)
    model = tiny_model(vocab_size)
    for parameter in model.parameters():
        mean = 1.0 if parameter.ndim == 1 else 0.0
        nn.init.normal_(parameter, mean=mean, std=std)
    return model


def sources(count: int, *, vocab_size: int = 14) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(1, 9, (count,), generator=generator).tolist()
    rows = []
    for size in sizes:
        tokens = torch.randint(3, vocab_size, (size,), generator=generator).tolist()
        rows.append([*tokens, END])
    return rows


def padded(rows: list[list[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def length_limit(source: list[int]) -> int:
    """The number of tokens that a target has at most if nothing else is asked for."""
    return 2 * len(source) + 10


@pytest.fixture(scope="module")
def undecided() -> Seq2Seq:
    """A model that has begun to learn to leave out about every third token: it ends, and is never
    sure.
    """
    torch.manual_seed(0)
    model = tiny_model()
    rows = sources(512)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(50):
        batch = rows[step % 8 * 64 :][:64]
        targets = []
        for row in batch:
            remaining = [token for token in row[:-1] if torch.rand(()) < 0.7]
            targets.append([BEGIN, *remaining, END])
        target_BT = padded(targets)
        logits_BTV = model(padded(batch), target_BT[:, :-1])
        loss = nn.functional.cross_entropy(
            logits_BTV.transpose(1, 2), target_BT[:, 1:], ignore_index=0
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def log_probability(model: Seq2Seq, source: list[int], target: list[int]) -> float:
    """Of a whole target, from one pass over it without a cache; padding and begin keep their
    share.
    """
    with torch.no_grad():
        logits_TV = model(torch.tensor([source]), torch.tensor([[BEGIN, *target[:-1]]]))[0]
    log_probabilities_TV = logits_TV.log_softmax(dim=1)
    return float(log_probabilities_TV.gather(1, torch.tensor(target)[:, None]).sum())


def greedy(model: Seq2Seq, source: list[int]) -> list[int]:
    """The likeliest token each time, in the plainest way."""
    target = [BEGIN]
    for _ in range(length_limit(source)):
        with torch.no_grad():
            logits_V = model(torch.tensor([source]), torch.tensor([target]))[0, -1]
        logits_V[:END] = -math.inf
        token = int(logits_V.argmax())
        if token == END:
            break
        target.append(token)
    return target[1:]


def test_a_beam_of_1_is_greedy_search(undecided: Seq2Seq) -> None:
    rows = sources(6)

    targets = [found.tokens for found in beam_search(undecided, rows, beam_size=1)]

    assert targets == [greedy(undecided, row) for row in rows]
    limits = [length_limit(row) for row in rows]
    endless = [
        target for target, limit in zip(targets, limits, strict=True) if len(target) == limit
    ]
    assert len(endless) < 3


def test_a_beam_of_1_is_greedy_search_where_no_target_ends() -> None:
    model = random_model()
    rows = sources(6)

    targets = [found.tokens for found in beam_search(model, rows, beam_size=1)]

    assert targets == [greedy(model, row) for row in rows]
    assert [len(target) for target in targets] == [length_limit(row) for row in rows]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_wide_beam_finds_the_best_of_all_targets(alpha: float, seed: int) -> None:
    model = random_model(6, seed=seed)
    targets: list[list[int]] = []
    for size in range(4):
        targets += ([*row, END] for row in itertools.product(range(3, 6), repeat=size))

    for source in sources(2, vocab_size=6):
        (found,) = beam_search(
            model, [source], beam_size=200, length_penalty=alpha, max_new_tokens_fn=lambda _: 4
        )

        best_target: list[int] = []
        best_score = -math.inf
        for target in targets:
            score = log_probability(model, source, target) / penalty(len(target), alpha)
            if score > best_score:
                best_target = target
                best_score = score
        assert [*found.tokens, END] == best_target
        assert found.score == pytest.approx(best_score, rel=1e-12)


def plain_search(
    model: Seq2Seq, source: list[int], *, beam_size: int, alpha: float, limit: int
) -> list[int]:
    """The same rules over Python lists, every score from a pass over the whole target."""
    beam: list[list[int]] = [[]]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        scores = []
        for tokens in beam:
            for token in range(END, model.shape.vocab_size):
                target = [*tokens, token]
                scores.append((log_probability(model, source, target), target))
        scores.sort(key=lambda scored: -scored[0])
        for score, target in scores[:beam_size]:
            if target[-1] == END:
                finished.append((score / penalty(length, alpha), target))
        beam = [target for _, target in scores if target[-1] != END][:beam_size]
        if len(finished) >= beam_size:
            break
    if not finished:
        return beam[0]
    _, best = max(finished)
    return best[:-1]


@pytest.mark.fast("2-0.6")
@pytest.mark.parametrize(("beam_size", "alpha"), [(2, 0.6), (3, 0.0), (5, 1.0), (2, 4.0), (4, 4.0)])
def test_it_is_the_search_that_lists_would_make(
    beam_size: int, alpha: float, undecided: Seq2Seq
) -> None:
    rows = sources(3)
    found = beam_search(
        undecided, rows, beam_size=beam_size, length_penalty=alpha, max_new_tokens_fn=lambda _: 7
    )

    for hypothesis, row in zip(found, rows, strict=True):
        expected = plain_search(undecided, row, beam_size=beam_size, alpha=alpha, limit=7)
        assert hypothesis.tokens == expected


@pytest.mark.parametrize("batch_size", [3, 20])
def test_a_target_does_not_depend_on_what_else_is_searched(
    batch_size: int, undecided: Seq2Seq
) -> None:
    rows = sources(20)
    together = beam_search(undecided, rows, beam_size=4, batch_size=batch_size)

    for found, row in zip(together, rows, strict=True):
        (alone,) = beam_search(undecided, [row], beam_size=4)
        assert found.tokens == alone.tokens
        assert found.score == pytest.approx(alone.score, rel=1e-10)
    lengths = {len(found.tokens) for found in together}
    assert len(lengths) > 3  # they do end at different times


def test_the_score_is_the_log_probability_over_the_penalty(undecided: Seq2Seq) -> None:
    rows = sources(12)
    hypotheses = beam_search(undecided, rows, beam_size=3, length_penalty=0.8)

    for row, found in zip(rows, hypotheses, strict=True):
        target = found.tokens
        if len(target) < length_limit(row):
            target = [*target, END]
        expected = log_probability(undecided, row, target) / penalty(len(target), 0.8)
        assert found.score == pytest.approx(expected, rel=1e-10)


def test_a_larger_length_penalty_gives_longer_targets(undecided: Seq2Seq) -> None:
    def total_length(alpha: float) -> int:
        found = beam_search(undecided, sources(30), beam_size=4, length_penalty=alpha)
        return sum(len(hypothesis.tokens) for hypothesis in found)

    short, medium, long = total_length(0.0), total_length(1.0), total_length(3.0)
    assert short <= medium <= long
    assert short < long


def test_no_target_is_longer_than_it_may_be() -> None:
    model = random_model(std=0.05)  # which hardly ever ends
    rows = sources(9)

    found = beam_search(model, rows, beam_size=3, max_new_tokens_fn=lambda tokens: tokens + 1)

    for hypothesis, row in zip(found, rows, strict=True):
        assert len(hypothesis.tokens) <= len(row) + 1


def test_no_target_is_longer_than_the_context_of_the_model() -> None:
    model = random_model(std=0.05)

    (found,) = beam_search(model, [[*[5] * 38, END]], beam_size=1)

    assert len(found.tokens) <= model.shape.context


def test_padding_and_begin_are_never_said() -> None:
    model = random_model()
    with torch.no_grad():
        model.embedding.weight[:END] = 9.0

    for hypothesis in beam_search(model, sources(9), beam_size=4):
        assert min(hypothesis.tokens, default=3) >= 3


def test_modes_and_generators_are_left_as_they_were() -> None:
    model = random_model().train()
    model.encoder.eval()
    before = torch.get_rng_state()

    first = beam_search(model, sources(3), beam_size=2)

    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.encoder.training
    assert beam_search(model.eval(), sources(3), beam_size=2) == first


@pytest.mark.parametrize(
    ("setting", "value"),
    [("beam_size", 0), ("length_penalty", -1.0), ("length_penalty", math.nan), ("batch_size", 0)],
)
def test_settings_that_cannot_be_are_refused(setting: str, value: Any) -> None:
    changes = {setting: value}
    with refused("setting-out-of-range", setting=setting, value=value):
        beam_search(random_model(), sources(2), **changes)


def test_an_empty_source_is_refused() -> None:
    with refused("source-empty", DataError, source=1):
        beam_search(random_model(), [[5, END], []])


def test_logits_that_are_not_finite_are_refused() -> None:
    model = random_model()
    model.head.weight.data.fill_(math.inf)
    with refused("logits-not-finite", DivergedError):
        beam_search(model, sources(2))


def test_no_sources_have_no_targets() -> None:
    assert beam_search(random_model(), []) == []


def test_a_hypothesis_is_tokens_and_score() -> None:
    assert Hypothesis([3], -1.0) == Hypothesis([3], -1.0)
