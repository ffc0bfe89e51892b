"""Sampling: what it draws, and that training cannot notice it; 1 second."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from in_one import in_one
from refused import refused
from surefoot.errors import ConfigError, DivergedError
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.recipes.generate.sampling import sample, sample_batch, stream
from surefoot.seeding import fold

VOCABULARY = 5
CHANCES = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])


class Fixed(nn.Module):
    """The same chances whatever came before; remembers what it was called with, and draws as
    dropout would.
    """

    def __init__(self, logits=None):
        super().__init__()
        self.logits = nn.Parameter(CHANCES.log() if logits is None else logits)
        self.frozen = nn.Dropout(0.5).eval()
        self.dropout = nn.Dropout(0.5)
        self.seen = []
        self.modes = set()

    def forward(self, tokens_BT):
        self.seen.append(tokens_BT.tolist())
        self.modes.add((self.training, self.dropout.training, torch.is_grad_enabled()))
        random.random()
        np.random.random()
        torch.rand(1)
        return self.logits.clamp(min=-50).expand(*tokens_BT.shape, VOCABULARY)


def draw(model=None, tokens=(0,), **options):
    settings = {"max_new_tokens": 20, "context": 4, **options}
    return sample(model or Fixed(), list(tokens), **settings)


def test_result_starts_with_the_prompt_and_is_count_longer():
    drawn = draw(tokens=[3, 1, 2], max_new_tokens=7)

    assert drawn[:3] == [3, 1, 2]
    assert len(drawn) == 10


def test_prompt_may_be_a_tensor():
    drawn = sample(Fixed(), torch.tensor([3, 1]), max_new_tokens=20, context=4)

    assert drawn == draw(tokens=[3, 1])


def test_same_seed_draws_the_same_tokens_whatever_the_global_generators_hold():
    torch.manual_seed(1)
    first = draw(seed=8)
    torch.manual_seed(2)
    assert draw(seed=8) == first


def test_other_seeds_draw_other_tokens():
    texts = {tuple(draw(seed=seed)) for seed in range(8)}
    assert len(texts) > 1


def test_temperature_zero_takes_the_likeliest():
    assert draw(temperature=0) == [0] * 21


@pytest.mark.parametrize("likeliest", range(VOCABULARY))
def test_top_k_of_one_takes_the_likeliest(likeliest):
    logits = torch.zeros(VOCABULARY)
    logits[likeliest] = 1.0
    assert draw(Fixed(logits), top_k=1) == [0] + [likeliest] * 20


def test_top_k_leaves_k_tokens_even_where_all_are_equally_likely():
    _, *drawn = draw(Fixed(torch.zeros(VOCABULARY)), max_new_tokens=50, top_k=2)

    assert len(set(drawn)) == 2


def test_top_k_beyond_the_vocabulary_changes_nothing_that_can_be_drawn():
    assert set(draw(max_new_tokens=150, top_k=99)) == {0, 1, 2, 3}


@pytest.mark.fast("0.5")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_the_softmax_of_logits_over_temperature(temperature):
    options = {"max_new_tokens": 100, "context": 4, "temperature": temperature, "batch_size": 40}
    texts = torch.tensor(sample_batch(Fixed(), [[0]] * 40, **options))

    drawn = texts[:, 1:].flatten()
    assert len(drawn) == 4000
    expected = torch.softmax(CHANCES.log().clamp(min=-50) / temperature, dim=0)
    fractions = torch.bincount(drawn, minlength=VOCABULARY) / len(drawn)
    standard_error = (0.25 / 4000) ** 0.5
    assert (fractions - expected).abs().max() < 4 * standard_error


def test_tiny_temperature_does_not_overflow():
    assert draw(Fixed(torch.tensor([1e30, 0.0, 0.0, 0.0, 0.0])), temperature=1e-10) == [0] * 21


def test_model_sees_at_most_context_tokens_and_goes_on_from_half_of_them():
    model = Fixed()
    drawn = draw(model, tokens=[1, 2, 3], max_new_tokens=6, context=4)

    shown = [(0, 3), (0, 4), (3, 5), (3, 6), (3, 7), (6, 8)]
    assert model.seen == [[drawn[first:end]] for first, end in shown]


def test_of_a_prompt_longer_than_the_context_the_model_sees_its_end():
    model = Fixed()
    draw(model, tokens=[0, 1, 2, 3, 4], max_new_tokens=1, context=3)
    assert model.seen == [[[2, 3, 4]]]


@pytest.mark.parametrize(
    ("top_p", "left"),
    [(0.01, {0}), (0.5, {0}), (0.51, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_leaves_the_likeliest_that_together_reach_it(top_p, left):
    """Chances of 0.5, 0.3, 0.15, 0.05 and 0."""
    _, *drawn = draw(max_new_tokens=150, top_p=top_p)

    assert set(drawn) == left


def test_nothing_is_drawn_after_the_end():
    drawn = draw(max_new_tokens=100, eos_id=1)
    assert 1 not in drawn
    assert len(drawn) < 101


def test_a_stream_gives_the_tokens_of_sample_one_by_one():
    streamed = list(stream(Fixed(), [3, 1], max_new_tokens=20, context=4))

    assert [3, 1, *streamed] == sample(Fixed(), [3, 1], max_new_tokens=20, context=4)


def gpt(family="modern", **changes):
    torch.manual_seed(3)
    size = {"layers": 2, "heads": 2, "width": 16, "context": 12, "vocab_size": 20}
    model = GPT(GPTConfig(**size, family=family, **changes))
    for parameter in model.parameters():  # as if it had been trained
        nn.init.normal_(parameter, std=0.3)
    return model.double()


every_kind = pytest.mark.parametrize(
    "kind",
    [
        {},
        {"family": "gpt2"},
        {"family": "llama", "kv_heads": 1},
        {"smear": True},
        {"smear": 5, "ngrams": 4, "ngram_buckets": 50},
    ],
    ids=str,
)


@every_kind
@pytest.mark.parametrize("prompt", [[3], list(range(11)), list(range(15))], ids=len)
def test_a_cache_changes_no_token_even_past_the_context(kind, prompt):
    settings = {"max_new_tokens": 20, "context": 12, "temperature": 0.9, "seed": 4}
    with_cache = sample(gpt(**kind), prompt, use_cache=True, **settings)

    assert with_cache == sample(gpt(**kind), prompt, **settings)


@every_kind
def test_logits_through_a_cache_are_those_without(kind):
    model = gpt(**kind).eval()
    tokens_BT = torch.randint(20, (3, 12))
    cache = model.new_cache(3)
    parts = [model(part_BT, cache) for part_BT in tokens_BT.split([5, 1, 4, 2], dim=1)]
    logits_BTV = torch.cat(parts, dim=1)

    torch.testing.assert_close(logits_BTV, model(tokens_BT), rtol=1e-10, atol=1e-10)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7], [8, 9], [10, 11, 12], [13]]
SETTINGS = {"max_new_tokens": 20, "context": 12, "temperature": 0.9, "eos_id": 0, "seed": 4}


@cache
def each_alone(use_cache):
    model = gpt()
    texts = []
    for place, prompt in enumerate(PROMPTS):
        settings = SETTINGS | {"seed": fold(4, place)}
        texts.append(sample(model, prompt, use_cache=use_cache, **settings))
    return texts


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_prompts_together_give_the_same_texts_as_each_alone(batch_size, use_cache):
    together = sample_batch(gpt(), PROMPTS, batch_size=batch_size, **SETTINGS, use_cache=use_cache)

    assert together == each_alone(use_cache)
    assert len({len(text) for text in together}) > 1  # some ended earlier


def test_model_runs_in_evaluation_mode_without_gradients():
    model = Fixed().train()
    draw(model)
    assert model.modes == {(False, False, False)}


def test_every_module_is_left_in_the_mode_it_was_in():
    model = Fixed().train()
    model.frozen.eval()
    draw(model)

    assert model.training
    assert model.dropout.training
    assert not model.frozen.training


def test_modes_are_left_as_found_when_the_model_fails():
    model = Fixed(torch.full((VOCABULARY,), float("nan"))).train()
    with refused("logits-not-finite", DivergedError, tokens=1):
        draw(model)
    assert model.training


def generator_states():
    of_numpy = np.random.get_state()[1].tolist()
    return random.getstate(), of_numpy, torch.get_rng_state().tolist()


def test_global_generators_are_left_as_found():
    before = generator_states()
    draw()

    assert generator_states() == before


@in_one
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_new_tokens", -1),
        ("context", 0),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(setting, value):
    with refused("setting-out-of-range", setting=setting, value=value):
        draw(**{setting: value})


def test_a_prompt_without_tokens_is_refused():
    with refused("prompt-empty"):
        draw(tokens=[])


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(ConfigError) as refusal:
        draw(max_new_tokens=-1, top_k=0)

    settings = [problem.fields["setting"] for problem in refusal.value.problems]
    assert settings == ["max_new_tokens", "top_k"]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_no_prompt_is_refused(batch_size):
    """It would never come to an end."""
    with refused("setting-out-of-range", setting="batch_size", value=batch_size):
        sample_batch(Fixed(), [[0]], max_new_tokens=2, context=8, batch_size=batch_size)


def test_a_stream_refuses_its_settings_before_it_is_read():
    with refused("setting-out-of-range", setting="temperature", value=-1):
        stream(Fixed(), [0], max_new_tokens=2, context=8, temperature=-1)


@pytest.mark.parametrize("temperature", [1e-50, 1e-300, 5e-324])
def test_the_coldest_temperatures_take_the_likeliest(temperature):
    assert draw(temperature=temperature) == draw(temperature=0)
