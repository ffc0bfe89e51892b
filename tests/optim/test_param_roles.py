"""Depth, inputs and outputs as the structure of a model tells them; 2 seconds."""

from __future__ import annotations

import pytest
from torch import nn

import surefoot as sf
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.models.seq2seq import Seq2Seq
from surefoot.models.seq2seq_layers import Seq2SeqConfig
from surefoot.optim.param_groups import depths, final_layer, input_matrices, matrices


def gpt(**changes) -> GPT:
    shape = {"layers": 3, "heads": 2, "width": 8, "context": 16, "vocab_size": 10}
    return GPT(GPTConfig(**(shape | changes)))


def seq2seq(**changes) -> Seq2Seq:
    sizes = {
        "encoder_layers": 2,
        "decoder_layers": 3,
        "heads": 2,
        "width": 8,
        "mlp_width": 16,
        "vocab_size": 10,
    }
    return Seq2Seq(Seq2SeqConfig(**sizes | changes))


def assert_depths(model, expected):
    """All parameters of a part of the model, by the beginning of their names, have its depth."""
    depth_by_name = depths(model)
    for prefix, depth in expected.items():
        of_part = {depth for name, depth in depth_by_name.items() if name.startswith(prefix)}
        assert of_part == {depth}, prefix


@pytest.mark.parametrize("family", ["modern", "gpt2"])
def test_a_gpt_is_as_deep_as_its_blocks_between_embeddings_and_head(family):
    expected = {"embedding": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3, "norm": 4, "head": 4}

    assert_depths(gpt(family=family), expected)


def test_the_decoder_stands_deeper_than_the_encoder():
    expected = {"embedding": 0, "source_": 0, "target_": 0}
    expected |= {"encoder.0": 1, "encoder.1": 2}
    expected |= {"decoder.0": 3, "decoder.1": 4, "decoder.2": 5, "head": 6}

    model = seq2seq(source_vocab_size=12, tie_embeddings=False, positions="learned")

    assert_depths(model, expected)


@pytest.mark.parametrize(
    ("layers", "last", "blocks"), [(18, "layer4.1", 8), (34, "layer4.2", 16), (50, "layer4.2", 16)]
)
def test_the_stages_of_a_resnet_follow_each_other(layers, last, blocks):
    model = sf.models.ResNet(layers, channels=3, classes=10)

    assert_depths(model, {"conv1": 0, "bn1": 0, "layer1.0": 1, last: blocks, "fc": blocks + 1})


def test_without_a_stem_the_first_block_is_at_0():
    model = sf.models.SimpleCNN(channels=1, classes=10, width=4)

    assert_depths(model, {"blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "head": 3})


class Nested(nn.Module):
    """Stages that are lists of blocks, with something between them, and an MLP in a Sequential
    inside each block.
    """

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(nn.Linear(4, 4).weight.detach().clone())
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        stages = [nn.Sequential(self.Block(), self.Block()) for _ in range(2)]
        self.first = nn.Sequential(*stages)
        self.between = nn.Linear(4, 4)
        self.second = nn.ModuleList([self.Block()])
        self.norm = nn.LayerNorm(4)
        self.outputs = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_lists_of_lists_are_opened_and_blocks_are_not():
    expected = {"scale": 0, "stem": 0}
    expected |= {"first.0.0": 1, "first.0.1": 2, "first.1.0": 3, "first.1.1": 4}
    expected |= {"between": 4, "second.0": 5, "norm": 6, "outputs": 6}

    assert_depths(Nested(), expected)


def test_where_lists_hold_single_layers_each_with_a_matrix_is_one_deeper():
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Sequential(nn.Linear(4, 2)),
    )
    expected = {"0.weight": 0, "0.bias": 0, "1.weight": 0, "1.bias": 0}
    expected |= {"3.weight": 1, "3.bias": 1, "5.0.weight": 2, "5.0.bias": 2}

    assert depths(model) == expected


def test_every_parameter_has_one_depth_and_a_tied_one_that_of_its_first_place():
    model = gpt(family="gpt2", tie_embeddings=True)

    depth_by_name = depths(model)

    assert list(depth_by_name) == [name for name, _ in model.named_parameters()]
    assert depth_by_name["embedding.weight"] == 0


@pytest.mark.parametrize("model", [nn.Linear(3, 4), nn.Bilinear(2, 2, 2), nn.GRU(3, 4)], ids=str)
def test_a_model_without_lists_has_no_depth(model):
    assert depths(model) is None


@pytest.mark.parametrize(
    ("model", "last"),
    [
        (gpt(), "head"),
        (gpt(family="gpt2", tie_embeddings=True), "head"),
        (seq2seq(), "head"),
        (sf.models.ResNet(18, channels=3, classes=10), "fc"),
        (sf.models.SimpleCNN(channels=1, classes=10, width=4), "head"),
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.BatchNorm1d(1)), "2"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_final_layer_is_the_one_that_makes_the_outputs(model, last):
    assert final_layer(model) is model.get_submodule(last)


def test_what_is_no_matrix_is_no_final_layer():
    assert final_layer(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4))) is None


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (gpt(), ["embedding.weight"]),
        (gpt(family="gpt2"), ["embedding.weight", "positions.weight"]),
        (
            seq2seq(positions="learned", tie_embeddings=False),
            ["embedding.weight", "source_positions.table", "target_positions.table"],
        ),
        (sf.models.ResNet(18, channels=3, classes=10), ["conv1.weight"]),
        (sf.models.SimpleCNN(channels=1, classes=10, width=4), ["blocks.0.widening.weight"]),
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1)), ["0.weight"]),
        (nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 3), nn.Linear(3, 1)), ["1.weight"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_takes_in_the_data_is_an_embedding_a_stem_or_the_first_matrix(model, expected):
    name_of = {parameter: name for name, parameter in model.named_parameters()}

    names = [name_of[parameter] for parameter in input_matrices(model)]

    assert list(dict.fromkeys(names)) == expected


def test_no_bias_and_no_norm_is_a_matrix():
    model = nn.Sequential(
        nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.LayerNorm((3, 4)), nn.Conv1d(3, 4, 2)
    )

    shapes = [tuple(parameter.shape) for _, parameter in matrices(model)]

    assert shapes == [(12, 4), (4, 4), (4, 3, 2)]
