"""The encoder-decoder: masks, torch's own at equal weights, decoding token by token; 4 seconds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from surefoot.losses.dense import cross_entropy
from surefoot.models.attention import Cache
from surefoot.models.layers import waves
from surefoot.models.seq2seq import Decoding, Seq2Seq
from surefoot.models.seq2seq_layers import (
    CrossAttention,
    DecoderBlock,
    SelfAttention,
    Seq2SeqConfig,
)

SMALL = Seq2SeqConfig(
    encoder_layers=2, decoder_layers=3, heads=2, width=32, mlp_width=48, vocab_size=50, context=32
)
KINDS = {
    "pre": SMALL,
    "post": replace(SMALL, norm_placement="post"),
    "learned positions, own vocabulary": replace(SMALL, positions="learned", source_vocab_size=40),
    "untied, gelu": replace(SMALL, tie_embeddings=False, activation="gelu"),
    "rotary, rms, normed queries and keys, relu2": replace(
        SMALL,
        positions="rotary",
        norm="rms",
        qk_norm=True,
        activation="relu2",
        zero_init_residual=True,
    ),
}
every_kind = pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS.keys())


def seq2seq(shape=SMALL):
    """A model at random, as if it had left its start."""
    torch.manual_seed(5)
    model = Seq2Seq(shape).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return model


def tokens(*shape):
    return torch.randint(1, 40, shape, generator=torch.Generator().manual_seed(9))


def filled(rows_BS, longer):
    return torch.cat([rows_BS, torch.zeros(len(rows_BS), longer, dtype=torch.long)], dim=1)


# --- masks ----------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("longer", [1, 7])
def test_logits_do_not_depend_on_how_far_a_row_is_filled_up(longer, shape):
    model = seq2seq(shape)
    source = tokens(3, 6)
    target = tokens(3, 5)
    long = model(filled(source, longer), filled(target, longer))
    assert_close(long[:, :5], model(source, target), rtol=1e-12, atol=1e-12)


@every_kind
def test_logits_of_a_pair_do_not_depend_on_what_it_is_batched_beside(shape):
    model = seq2seq(shape)
    pairs = [
        (tokens(1, 3), tokens(1, 9)),
        (tokens(1, 8), tokens(1, 2)),
        (tokens(1, 5), tokens(1, 5)),
    ]
    sources = torch.cat([filled(source, 8 - source.shape[1]) for source, _ in pairs])
    targets = torch.cat([filled(target, 9 - target.shape[1]) for _, target in pairs])

    together = model(sources, targets)

    for row, (source, target) in enumerate(pairs):
        beside_others = together[row : row + 1, : target.shape[1]]
        assert_close(beside_others, model(source, target), rtol=1e-12, atol=1e-12)


def logits_filled_up_and_plain():
    """Of a model in float32, for rows that are filled up and for the same rows as they are."""
    torch.manual_seed(1)
    model = Seq2Seq(replace(SMALL, context=64))
    source = tokens(3, 6)
    target = tokens(3, 5)
    return model(filled(source, 9), filled(target, 9))[:, :5], model(source, target)


def test_logits_of_filled_rows_in_float32_differ_by_1e_6():
    long, plain = logits_filled_up_and_plain()
    assert_close(long, plain, rtol=1e-6, atol=1e-6)


def test_logits_of_filled_rows_under_autocast_differ_by_the_rounding_of_bfloat16():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        long, plain = logits_filled_up_and_plain()
    assert_close(long.float(), plain.float(), rtol=0.02, atol=0.02)


@every_kind
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_changed_target_token_changes_the_logits_from_its_place_on_and_none_before(place, shape):
    model = seq2seq(shape)
    source = tokens(1, 4)
    before = tokens(1, 6)
    after = before.clone()
    after[0, place] = after[0, place] % 39 + 1
    change = (model(source, after) - model(source, before)).abs().amax(dim=(0, 2))
    assert not change[:place].any()
    assert (change[place:] > 1e-6).all()


@every_kind
@pytest.mark.parametrize("place", [0, 3])
def test_a_changed_source_token_changes_all_logits(place, shape):
    model = seq2seq(shape)
    before = tokens(1, 4)
    target = tokens(1, 6)
    after = before.clone()
    after[0, place] = after[0, place] % 39 + 1

    change = (model(after, target) - model(before, target)).abs().amax(dim=2)

    assert (change > 1e-6).all()


@every_kind
def test_the_order_of_the_source_matters(shape):
    model = seq2seq(shape)
    source = tokens(1, 5)
    target = tokens(1, 4)
    change = model(source.flip(1), target) - model(source, target)
    assert change.abs().max() > 1e-4


def test_padding_gets_no_gradient_from_the_source_side():
    model = seq2seq(replace(SMALL, source_vocab_size=40))
    model(filled(tokens(2, 4), 3), tokens(2, 5)).sum().backward()
    gradient = model.source_embedding.weight.grad
    assert gradient is not None
    assert not gradient[0].any()
    assert gradient.any()


# --- torch's own ----------------------------------------------------------------------------------


def of_torch(model: Seq2Seq) -> nn.Transformer:
    """torch's transformer with the weights of ours."""
    shape = model.shape
    pre = shape.norm_placement == "pre"
    settings = {
        "norm_first": pre,
        "batch_first": True,
        "dropout": 0.0,
        "activation": shape.activation,
    }
    sizes = (shape.width, shape.heads, shape.mlp_width)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(*sizes, **settings),
        shape.encoder_layers,
        norm=nn.LayerNorm(shape.width) if pre else None,
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(*sizes, **settings),
        shape.decoder_layers,
        norm=nn.LayerNorm(shape.width) if pre else None,
    )
    theirs = nn.Transformer(
        custom_encoder=encoder, custom_decoder=decoder, d_model=shape.width, nhead=shape.heads
    )
    theirs.batch_first = True

    def take(attention: nn.MultiheadAttention, ours: SelfAttention | CrossAttention) -> None:
        if isinstance(ours, SelfAttention):
            weight = ours.qkv.weight
            bias = ours.qkv.bias
        else:
            weight = torch.cat([ours.query.weight, ours.key_value.weight])
            bias = torch.cat([ours.query.bias, ours.key_value.bias])
        attention.in_proj_weight.data.copy_(weight.data)
        attention.in_proj_bias.data.copy_(bias.data)
        attention.out_proj.load_state_dict(ours.out.state_dict())

    their_layers = [*encoder.layers, *decoder.layers]
    our_blocks = [*model.encoder, *model.decoder]
    for layer, block in zip(their_layers, our_blocks, strict=True):
        take(layer.self_attn, block.attention)
        layer.linear1.load_state_dict(block.mlp.up.state_dict())
        layer.linear2.load_state_dict(block.mlp.down.state_dict())
        sums = [block.attention_sum, block.mlp_sum]
        if isinstance(block, DecoderBlock):
            take(layer.multihead_attn, block.cross)
            sums.insert(1, block.cross_sum)
        for place, residual_sum in enumerate(sums, start=1):
            getattr(layer, f"norm{place}").load_state_dict(residual_sum.norm.state_dict())
    if pre:
        encoder.norm.load_state_dict(model.encoder_norm.state_dict())
        decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    return theirs


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_it_is_torch_s_transformer_at_equal_weights(norm):
    shape = replace(SMALL, norm=norm)
    ours = seq2seq(shape).float()
    theirs = of_torch(ours).eval()
    source = filled(tokens(3, 6), 3)
    target = tokens(3, 5)
    padding = torch.zeros(source.shape).masked_fill(source == 0, -math.inf)
    causal = nn.Transformer.generate_square_subsequent_mask(5)

    def embedded(rows):
        positions = waves(32, shape.width)[: rows.shape[1]]
        return ours.embedding(rows) * math.sqrt(shape.width) + positions

    out = theirs(
        embedded(source),
        embedded(target),
        tgt_mask=causal,
        tgt_is_causal=True,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )

    assert_close(ours(source, target), ours.head(out), rtol=1e-5, atol=1e-5)


# --- token by token -------------------------------------------------------------------------------


@every_kind
def test_logits_token_by_token_are_those_of_the_whole_target(shape):
    model = seq2seq(shape)
    source = filled(tokens(2, 6), 2)
    target = tokens(6, 7)
    decoding = Decoding(model, source, hypotheses=3, max_tokens=7)
    steps = [decoding.logits(target[:, place].view(2, 3)) for place in range(7)]
    whole = model(source.repeat_interleave(3, dim=0), target)
    assert_close(torch.stack(steps, dim=2).flatten(0, 1), whole, rtol=1e-12, atol=1e-12)


def test_chosen_hypotheses_go_on_with_what_their_parents_were():
    model = seq2seq()
    source = tokens(3, 6)
    target = tokens(3, 2, 4)
    decoding = Decoding(model, source, hypotheses=2, max_tokens=8)
    for place in range(4):
        decoding.logits(target[:, :, place])
    sources = torch.tensor([0, 2])
    parents = torch.tensor([[1, 1, 0], [0, 1, 1]])
    following = tokens(2, 3)

    decoding.select(sources, parents)
    logits = decoding.logits(following)

    chosen = torch.stack([target[0][parents[0]], target[2][parents[1]]])
    whole = torch.cat([chosen, following[:, :, None]], dim=2).flatten(0, 1)
    expected = model(source[sources].repeat_interleave(3, dim=0), whole)[:, -1]
    assert_close(logits.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)


def test_a_cache_keeps_the_rows_that_are_chosen():
    cache = Cache((1, 3, 1, 4, 2), device=torch.device("cpu"), dtype=torch.float32)
    x_BHTD = torch.arange(12.0).view(3, 1, 2, 2)
    cache.extended(0, x_BHTD, -x_BHTD)
    cache.select(torch.tensor([2, 2, 0, 1]))
    keys, values = cache.extended(0, torch.zeros(4, 1, 1, 2), torch.zeros(4, 1, 1, 2))
    assert torch.equal(keys[:, :, :2], x_BHTD[[2, 2, 0, 1]])
    assert torch.equal(values[:, :, :2], -x_BHTD[[2, 2, 0, 1]])


# --- what it is made of ---------------------------------------------------------------------------


@every_kind
def test_its_shape_knows_how_many_numbers_are_trained(shape):
    assert sum(parameter.numel() for parameter in Seq2Seq(shape).parameters()) == shape.parameters


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("width", [64, 256])
def test_the_first_loss_is_close_to_ln_of_the_vocabulary(width, norm):
    torch.manual_seed(0)
    model = Seq2Seq(replace(SMALL, width=width, vocab_size=1000, norm=norm))
    loss = cross_entropy(model(tokens(16, 9), tokens(16, 8)), tokens(16, 8).flip(0))
    # logits of unit variance add half a nat to ln V
    assert_close(loss.value.item(), math.log(1000) + 0.5, rtol=0, atol=0.3)


def test_each_of_stacked_matrices_starts_as_one_by_itself():
    model = Seq2Seq(replace(SMALL, width=256))
    bound = math.sqrt(6 / (256 + 256))
    for matrix in (model.encoder[0].attention.qkv.weight, model.decoder[0].cross.key_value.weight):
        assert matrix.abs().max().item() == pytest.approx(bound, rel=1e-3)


def test_waves_are_the_published_ones():
    """Vaswani et al. 2017, section 3.5, one by one."""
    waves_TC = waves(40, 16)
    for place, pair in [(0, 0), (1, 0), (39, 3), (39, 7)]:
        angle = place / 10000 ** (2 * pair / 16)
        sine = waves_TC[place, 2 * pair].item()
        cosine = waves_TC[place, 2 * pair + 1].item()
        assert sine == pytest.approx(math.sin(angle), abs=1e-6)
        assert cosine == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads": 3}, r"^width = 32 .* heads = 3\b"),
        ({"width": 31, "heads": 1}, "^width = 31 "),
        ({"heads": 32, "positions": "rotary"}, "^width = 32 .* 2 x heads = 64"),
        (
            {"norm_placement": "post", "zero_init_residual": True},
            "^zero_init_residual .* norm_placement = 'pre'",
        ),
        ({"vocab_size": 0}, r"\bvocab_size=0\b"),
        ({"source_vocab_size": 0}, r"\bsource_vocab_size=0\b"),
        ({"attention_dropout": 1.0}, "^attention_dropout = 1.0 "),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **changes)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_more_tokens_than_there_are_places_are_refused(positions):
    with pytest.raises(ValueError, match=r"\b33 .* 32\b"):
        Seq2Seq(replace(SMALL, positions=positions))(tokens(1, 33), tokens(1, 2))


def test_rotary_positions_know_distances_only():
    """Attention of a side to itself is the same wherever its row begins: Su et al. 2021, equation
    16.
    """
    model = seq2seq(KINDS["rotary, rms, normed queries and keys, relu2"])
    attention = model.encoder[0].attention
    x_BTC = torch.randn(2, 5, 32, dtype=torch.float64)
    everywhere = torch.ones(2, 1, 1, 5, dtype=torch.bool)

    from_0 = attention(x_BTC, everywhere, model.rotation(0, 5))
    from_20 = attention(x_BTC, everywhere, model.rotation(20, 25))
    without_positions = attention(x_BTC, everywhere)

    assert_close(from_20, from_0, rtol=1e-6, atol=1e-6)  # float32 angles
    assert (without_positions - from_0).abs().max() > 1e-3


def test_queries_and_keys_that_are_normed_have_a_size_of_their_own():
    """Ten times as large a stream changes values only: Henry et al. 2020, section 3."""
    shape = replace(SMALL, qk_norm=True)
    cross = seq2seq(shape).decoder[0].cross
    x_BTC = torch.randn(2, 5, 32, dtype=torch.float64)
    nn.init.zeros_(cross.key_value.bias)
    keys, values = cross.keys_values(x_BTC)
    larger_keys, larger_values = cross.keys_values(10 * x_BTC)
    assert_close(larger_keys, keys, rtol=1e-4, atol=1e-4)
    assert_close(larger_values, 10 * values, rtol=1e-12, atol=1e-12)


def test_blocks_that_start_at_zero_start_as_identity():
    """Then a tied head sees a token's own embedding, through a norm with a gain of width**-0.5."""
    torch.manual_seed(0)
    model = Seq2Seq(replace(SMALL, zero_init_residual=True, positions="rotary", norm="rms"))
    target = tokens(2, 5)
    embedded = model.embedding.weight[target]
    size = embedded.square().mean(-1, keepdim=True).add(1e-6 / 32).sqrt()
    normed = embedded / size / 32**0.5
    expected = normed @ model.embedding.weight.T
    assert_close(model(tokens(2, 4), target), expected, rtol=1e-5, atol=1e-5)
