"""The GPT: causality, positions, what it starts from, and number formats; 1 second."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from in_one import in_one
from surefoot.losses.dense import chunked_cross_entropy, cross_entropy
from surefoot.models.attention import _TILED, causal_attention, masked_attention, rotate, rotations
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.recipes.generate.sampling import sample
from surefoot.train.activation_checkpointing import compute_again

SMALL = GPTConfig(layers=2, heads=2, width=32, context=16, vocab_size=50)
KINDS = {
    "modern": SMALL,
    "modern that knows the tokens before": replace(SMALL, smear=2, ngrams=3, ngram_buckets=70),
    "modern with SwiGLU, tied": replace(SMALL, activation="swiglu", tie_embeddings=True),
    "gpt2": replace(SMALL, family="gpt2", tie_embeddings=True),
    "gpt2, untied": replace(SMALL, family="gpt2"),
    "llama": replace(SMALL, family="llama", mlp_width=24),
    "llama with shared keys, tied": replace(
        SMALL, family="llama", heads=4, kv_heads=2, tie_embeddings=True
    ),
}
every_kind = pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS.keys())


def gpt(shape=SMALL, *, trained=False):
    """A model under a fixed seed; `trained`: every matrix at random, as if it had left its
    start.
    """
    torch.manual_seed(5)
    model = GPT(shape)
    if trained:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    return model


def tokens(*shape, vocab_size=SMALL.vocab_size):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(9))


@every_kind
@pytest.mark.parametrize("place", [1, 7, 15])
def test_a_changed_token_leaves_all_earlier_logits_unchanged(place, shape):
    model = gpt(shape, trained=True)
    before = tokens(3, 16)
    after = before.clone()
    after[:, place] = (after[:, place] + 1) % SMALL.vocab_size
    assert_close(model(after)[:, :place], model(before)[:, :place], rtol=0, atol=0)


@every_kind
@pytest.mark.parametrize("place", [0, 7, 14])
def test_a_changed_token_changes_all_logits_from_its_place_on(place, shape):
    model = gpt(shape, trained=True)
    before = tokens(1, 16)
    after = before.clone()
    after[:, place] = (after[:, place] + 1) % SMALL.vocab_size

    change = (model(after) - model(before)).abs().amax(dim=(0, 2))

    changed_places = (change > 1e-4).nonzero().flatten().tolist()
    assert changed_places == list(range(place, 16))


def test_logits_do_not_depend_on_how_much_follows():
    model = gpt(trained=True)
    whole = tokens(2, 16)
    # other matrix sizes, other order
    assert_close(model(whole[:, :6]), model(whole)[:, :6], rtol=1e-5, atol=1e-5)


def test_rows_of_a_batch_do_not_see_each_other():
    model = gpt(trained=True)
    rows = tokens(4, 16)
    one_by_one = torch.cat([model(row[None]) for row in rows])
    assert_close(model(rows), one_by_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_rotated_products_depend_only_on_the_distance(shift):
    cos_TD, sin_TD = rotations(16, 8)
    q_D, k_D = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).unbind()
    q_TD = rotate(q_D.expand(16, 8), cos_TD, sin_TD)
    k_TD = rotate(k_D.expand(16, 8), cos_TD, sin_TD)

    products_TT = q_TD @ k_TD.T
    assert_close(products_TT[shift:, shift:], products_TT[:-shift, :-shift], rtol=1e-4, atol=1e-5)
    assert (products_TT[0] - products_TT[0, 0]).abs().max() > 0.1  # and they do depend on it


def test_rotation_keeps_lengths_and_leaves_the_first_place_alone():
    cos_TD, sin_TD = rotations(16, 8)
    x_TD = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    turned_TD = rotate(x_TD, cos_TD, sin_TD)
    assert_close(turned_TD.norm(dim=1), x_TD.norm(dim=1))
    assert_close(turned_TD[0], x_TD[0], rtol=0, atol=0)


@every_kind
def test_order_of_earlier_tokens_matters(shape):
    model = gpt(shape, trained=True)
    row = tokens(1, 16)
    swapped = row.clone()
    swapped[:, [2, 5]] = row[:, [5, 2]]
    assert (model(swapped)[:, -1] - model(row)[:, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("smear", [1, 3, 20])
def test_smear_adds_shares_of_the_previous_embeddings_of_the_row(smear):
    """In float64, for rows shorter than the number of previous tokens too."""
    model = gpt(replace(SMALL, smear=smear)).double()
    tokens_BT = tokens(2, 16)
    torch.nn.init.normal_(model.smear)
    for time in (1, 2, 16):
        embedded_BTC = model.embedding(tokens_BT[:, :time])
        expected_BTC = embedded_BTC.clone()
        for place in range(time):
            for back in range(1, min(smear, place) + 1):
                share_C = model.smear[(back - 1) * 32 : back * 32]
                expected_BTC[:, place] += share_C * embedded_BTC[:, place - back]
        assert_close(model._embedded(tokens_BT[:, :time], None), expected_BTC)


def test_smear_of_one_token_starts_at_zero():
    assert not gpt(replace(SMALL, smear=1)).smear.any()


@pytest.mark.parametrize("smear", [3, 20])
def test_smear_of_several_tokens_starts_with_a_value_of_its_own_for_each(smear):
    start = gpt(replace(SMALL, smear=smear)).double().smear
    assert start.numel() == smear * 32
    assert len(start.unique()) == start.numel()


def test_first_loss_is_ln_of_the_vocabulary():
    loss = cross_entropy(gpt()(tokens(4, 16)), tokens(4, 16))
    assert_close(loss.value.item(), math.log(SMALL.vocab_size), rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["modern", "gpt2"])
@pytest.mark.parametrize("width", [32, 128, 512])
def test_first_loss_of_a_tied_model_is_close_to_ln_of_the_vocabulary(width, family):
    shape = replace(SMALL, width=width, vocab_size=1000, tie_embeddings=True, family=family)
    inputs = tokens(16, 16, vocab_size=1000)
    loss = cross_entropy(gpt(shape)(inputs), inputs.flip(0))
    assert_close(loss.value.item(), math.log(1000), rtol=0, atol=0.1)


def test_matrices_start_with_the_documented_deviations():
    model = gpt(replace(SMALL, width=256, vocab_size=300))
    block = model.blocks[1]
    deviations = {
        "embedding": model.embedding.weight.std().item(),
        "qkv": block.attention.qkv.weight.std().item(),
        "up": block.mlp.up.weight.std().item(),
    }
    expected = {"embedding": 1.0, "qkv": 1 / 16, "up": 1 / 16}
    # 3 % is over ten standard errors of a deviation taken over 76,800 values or more
    assert_close(deviations, expected, rtol=0.03, atol=0)


def test_matrices_that_write_to_the_stream_start_at_zero():
    model = gpt()
    block = model.blocks[1]
    for layer in (block.attention.out, block.mlp.down, model.head):
        assert not layer.weight.any()


def test_queries_values_and_mlp_start_with_unit_size_at_any_width():
    model = gpt(replace(SMALL, width=512))
    x_BTC = torch.randn(8, 16, 512, generator=torch.Generator().manual_seed(2))
    normed_BTC = F.rms_norm(x_BTC, (512,))

    assert_close(model.blocks[0].attention.qkv(normed_BTC).std().item(), 1.0, rtol=0.05, atol=0)
    assert_close(model.blocks[0].mlp.up(normed_BTC).std().item(), 1.0, rtol=0.05, atol=0)


def test_every_block_starts_as_identity():
    model = gpt()
    x_BTC = torch.randn(2, 16, 32)
    assert torch.equal(model.blocks[0](x_BTC, tuple(model.turns)), x_BTC)


def test_gpt2_starts_with_the_documented_deviations():
    model = gpt(replace(SMALL, layers=8, width=256, vocab_size=300, family="gpt2"))
    block = model.blocks[1]
    deviations = {
        "embedding": model.embedding.weight.std().item(),
        "positions": model.positions.weight.std().item(),
        "qkv": block.attention.qkv.weight.std().item(),
        "out": block.attention.out.weight.std().item(),
        "down": block.mlp.down.weight.std().item(),
    }
    expected = {"embedding": 0.02, "positions": 0.02, "qkv": 0.02, "out": 0.005, "down": 0.005}
    # 6 % is over five standard errors of a deviation taken over 4,096 values or more
    assert_close(deviations, expected, rtol=0.06, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_starts_with_one_deviation_for_every_matrix_and_with_gains_of_one(tied):
    shape = replace(SMALL, width=256, family="llama", kv_heads=1, tie_embeddings=tied)
    for name, parameter in gpt(shape).named_parameters():
        if parameter.ndim == 1:
            assert_close(parameter, torch.ones(256), rtol=0, atol=0)
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name


def test_a_head_of_keys_serves_the_heads_of_queries_that_stand_together():
    """Grouped queries are attention with repeated keys and values."""
    shared = replace(SMALL, heads=4, kv_heads=2, family="llama")
    model = gpt(shared, trained=True)
    whole = gpt(replace(shared, kv_heads=None), trained=True)
    state = model.state_dict()
    for layer in range(SMALL.layers):
        name = f"blocks.{layer}.attention.qkv.weight"
        q_CC, k_dC, v_dC = state[name].split([32, 16, 16])
        k_CC = k_dC.view(2, 8, 32)[[0, 0, 1, 1]].reshape(32, 32)
        v_CC = v_dC.view(2, 8, 32)[[0, 0, 1, 1]].reshape(32, 32)
        state[name] = torch.cat([q_CC, k_CC, v_CC])
    whole.load_state_dict(state)
    assert_close(model(tokens(2, 16)), whole(tokens(2, 16)), rtol=1e-5, atol=1e-5)
    assert model.new_cache(1).keys.numel() == whole.new_cache(1).keys.numel() / 2


def test_gpt2_starts_without_biases():
    model = gpt(replace(SMALL, family="gpt2"))
    biases = {name: bias for name, bias in model.named_parameters() if "bias" in name}
    assert biases
    assert [name for name, bias in biases.items() if bias.any()] == []


@every_kind
@pytest.mark.parametrize("how", ["blocks", "selective"])
def test_computing_blocks_again_changes_no_bit_of_the_gradient(shape, how):
    def gradients(*, again):
        model = gpt(replace(shape, dropout=0.3), trained=True)
        if again:
            compute_again({"model": model}, how)
        torch.manual_seed(1)
        cross_entropy(model(tokens(4, 16)), tokens(4, 16).flip(0)).value.backward()
        return [parameter.grad for parameter in model.parameters()]

    for again, kept in zip(gradients(again=True), gradients(again=False), strict=True):
        assert torch.equal(again, kept)


@every_kind
def test_every_parameter_has_a_gradient_that_is_not_zero_once_training_has_begun(shape):
    model = gpt(shape, trained=True)
    cross_entropy(model(tokens(4, 16)), tokens(4, 16).flip(0)).value.backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []


@in_one
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        {"family": "modern"},
        {"family": "modern", "activation": "swiglu", "smear": 2},
        {"family": "modern", "activation": "gelu", "ngrams": 3, "ngram_buckets": 150},
        {"family": "gpt2"},
        {"family": "llama", "mlp_width": 31, "kv_heads": 1},
    ],
)
@pytest.mark.parametrize("size", [(1, 1, 8, 10), (3, 4, 64, 257), (12, 12, 768, 100)])
def test_parameter_count_is_the_closed_form(size, tied, parts):
    layers, heads, width, vocab_size = size
    parts = {"tie_embeddings": tied, **parts}
    shape = GPTConfig(
        layers=layers, heads=heads, width=width, context=8, vocab_size=vocab_size, **parts
    )
    with torch.device("meta"):
        model = GPT(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_tied_head_is_the_embedding_and_gets_both_gradients():
    model = gpt(replace(SMALL, tie_embeddings=True))
    cross_entropy(model(tokens(2, 16)), tokens(2, 16).flip(0)).value.backward()

    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters() if "head" in name] == []
    unseen = [token for token in range(SMALL.vocab_size) if token not in tokens(2, 16)]
    through_the_head = model.embedding.weight.grad[unseen]
    assert through_the_head.any(dim=1).all()


def test_head_of_the_hidden_states_is_the_forward_pass():
    model = gpt(trained=True)
    inputs = tokens(3, 16)
    targets = tokens(3, 16).flip(0)
    chunked = chunked_cross_entropy(model.hidden(inputs), model.head.weight, targets, chunk=10)[0]
    assert_close(chunked.value, cross_entropy(model(inputs), targets).value, rtol=1e-5, atol=0)


def attention_dtypes(monkeypatch):
    """The number formats that attention is computed in, as it happens."""
    dtypes = []
    attention = F.scaled_dot_product_attention

    def spy(q_BHTD, k_BHTD, v_BHTD, **options):
        y_BHTD = attention(q_BHTD, k_BHTD, v_BHTD, **options)
        dtypes.extend(x_BHTD.dtype for x_BHTD in (q_BHTD, k_BHTD, v_BHTD, y_BHTD))
        return y_BHTD

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return dtypes


def test_attention_under_bfloat16_autocast_is_our_own_on_the_cpu_and_in_float32_with_many_places(
    monkeypatch,
):
    dtypes = attention_dtypes(monkeypatch)
    model = gpt(trained=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV = model(tokens(2, 16))
        assert logits_BTV.dtype == torch.bfloat16
        assert dtypes == []

        monkeypatch.setitem(_TILED, 16, 15)
        monkeypatch.setattr("surefoot.models.attention._WRITTEN_OUT", 15)
        model(tokens(2, 16))
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize(("time", "so_far"), [(9, 9), (3, 9), (1, 9)])
def test_attention_written_out_is_torchs_own(time, so_far):
    q_BHTD = torch.randn(2, 3, time, 8, dtype=torch.bfloat16)
    k_BHSD = torch.randn(2, 3, so_far, 8, dtype=torch.bfloat16)
    v_BHSD = torch.randn(2, 3, so_far, 8, dtype=torch.bfloat16)

    def of_torch(mask):
        return F.scaled_dot_product_attention(
            q_BHTD.float(), k_BHSD.float(), v_BHSD.float(), attn_mask=mask
        )

    # weights and values have 8 bits
    causal = causal_attention(q_BHTD, k_BHSD, v_BHSD, drop_fraction=0.0)
    mask_TS = torch.ones(time, so_far, dtype=torch.bool).tril(so_far - time)
    assert causal.dtype == torch.bfloat16
    assert_close(causal.float(), of_torch(mask_TS), rtol=0, atol=0.03)

    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])[:, None, None]
    masked = masked_attention(q_BHTD, k_BHSD, v_BHSD, mask=mask, drop_fraction=0.0)
    assert_close(masked.float(), of_torch(mask), rtol=0, atol=0.03)


def test_bfloat16_autocast_gives_the_float32_gradients_to_its_precision():
    model = gpt(trained=True)
    inputs = tokens(4, 16)
    targets = tokens(4, 16).flip(0)

    def gradient(**autocast):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, **autocast):
            loss = cross_entropy(model(inputs), targets).value
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exact = gradient(enabled=False)
    rounded = gradient()

    # 8 bits a rounding, some ten of them in a row
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_float64_stays_float64_through_attention(monkeypatch):
    dtypes = attention_dtypes(monkeypatch)
    model = gpt(trained=True).double()
    assert model(tokens(2, 16)).dtype == torch.float64
    assert set(dtypes) == {torch.float64}


def test_attention_is_the_formula():
    generator = torch.Generator().manual_seed(4)
    q_BHTD, k_BHTD, v_BHTD = torch.randn(3, 2, 2, 6, 8, generator=generator).double()
    scores_BHTT = q_BHTD @ k_BHTD.transpose(2, 3) / math.sqrt(8)
    later_TT = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = scores_BHTT.masked_fill(later_TT, float("-inf")).softmax(dim=-1) @ v_BHTD
    assert_close(causal_attention(q_BHTD, k_BHTD, v_BHTD, drop_fraction=0.0), expected)


def test_dropout_acts_in_training_only():
    model = gpt(replace(SMALL, dropout=0.5), trained=True)
    inputs = tokens(2, 16)
    assert not torch.equal(model.train()(inputs), model(inputs))
    assert torch.equal(model.eval()(inputs), model(inputs))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heads", 3),
        ("width", 2),
        ("layers", 0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("context", 0),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        replace(SMALL, **{name: value})


def test_the_gpt2_family_has_no_swiglu():
    with pytest.raises(ValueError, match="activation"):
        replace(SMALL, family="gpt2", activation="swiglu")


def test_more_tokens_than_the_context_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"17 .* 16"):
        gpt()(tokens(1, 17))


def test_a_few_steps_learn_to_count():
    shape = replace(SMALL, vocab_size=10)
    model = gpt(shape)
    counting = (torch.arange(17) + torch.arange(10)[:, None]) % 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(model(counting[:, :-1]), counting[:, 1:]).value.backward()
        optimizer.step()

    sampled = sample(model, [4], max_new_tokens=30, context=16, temperature=0)

    assert sampled == [(4 + place) % 10 for place in range(31)]
