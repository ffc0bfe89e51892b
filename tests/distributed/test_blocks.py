"""A model's repeated blocks, found from how it is built or named by the user. (3 s)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from refused import refused
from surefoot.distributed.blocks import blocks_of
from surefoot.errors import ConfigError
from surefoot.models import GPT, GPTConfig, ResNet, Seq2Seq, Seq2SeqConfig


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Experts(nn.Module):
    """A block that has a list of parts of its own, with most of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(Block() for _ in range(4))


class Model(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def several(kind: type[nn.Module], number: int) -> list[nn.Module]:
    return [kind() for _ in range(number)]


def test_blocks_of_a_gpt_are_its_layers() -> None:
    model = GPT(GPTConfig(layers=3, heads=2, width=8, context=16, vocab_size=10))
    assert list(blocks_of(model)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert blocks_of(model)["blocks.1"] is model.blocks[1]


def test_encoder_and_decoder_are_both_found() -> None:
    shape = Seq2SeqConfig(
        encoder_layers=2, decoder_layers=3, heads=2, width=8, mlp_width=8, vocab_size=10
    )
    assert list(blocks_of(Seq2Seq(shape))) == [
        "encoder.0",
        "encoder.1",
        "decoder.0",
        "decoder.1",
        "decoder.2",
    ]


def test_torchs_own_transformer_is_one_of_blocks() -> None:
    found = blocks_of(nn.Transformer(8, 2, 2, 2, 8, batch_first=True))
    assert list(found) == [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    ]


def test_stages_of_a_resnet_are_looked_through() -> None:
    model = ResNet(18, classes=3, channels=3, stem="cifar")
    assert list(blocks_of(model)) == [
        f"layer{stage}.{place}" for stage in (1, 2, 3, 4) for place in (0, 1)
    ]


def test_stages_in_a_list_are_looked_through_and_those_of_one_block_counted() -> None:
    stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    head = nn.Sequential(nn.Linear(8, 2), nn.Tanh())
    stages = [
        nn.Sequential(Block()),
        nn.Sequential(Block(), Block(), nn.LayerNorm(8)),
        nn.Sequential(Block()),
    ]
    model = nn.Sequential(stem, *stages, head)
    found = list(blocks_of(model))
    assert [name for name in found if isinstance(model.get_submodule(name), Block)] == [
        "1.0",
        "2.0",
        "2.1",
        "3.0",
    ]


def test_layers_put_together_in_plain_lists_are_blocks() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    assert list(blocks_of(nn.Sequential(layer(), layer(), nn.Linear(8, 2)))) == ["0", "1"]


def test_pairs_of_two_classes_in_lists_without_forward_are_all_blocks() -> None:
    pairs = [nn.ModuleList([Block(), nn.TransformerEncoderLayer(8, 2, 8)]) for _ in range(2)]
    assert list(blocks_of(Model(layers=nn.ModuleList(pairs)))) == [
        "layers.0.0",
        "layers.0.1",
        "layers.1.0",
        "layers.1.1",
    ]


def test_a_list_of_modules_may_hold_one_block() -> None:
    shape = Seq2SeqConfig(
        encoder_layers=3, decoder_layers=1, heads=2, width=8, mlp_width=8, vocab_size=10
    )
    assert list(blocks_of(Seq2Seq(shape))) == ["encoder.0", "encoder.1", "encoder.2", "decoder.0"]
    assert list(
        blocks_of(GPT(GPTConfig(layers=1, heads=2, width=8, context=16, vocab_size=10)))
    ) == ["blocks.0"]


def test_what_stands_inside_a_block_is_none() -> None:
    assert list(blocks_of(Model(layers=nn.ModuleList(several(Experts, 2))))) == [
        "layers.0",
        "layers.1",
    ]


def test_a_list_of_small_heads_beside_the_blocks_is_none() -> None:
    heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 1), nn.Tanh()) for _ in range(2))
    assert list(blocks_of(Model(layers=nn.ModuleList(several(Block, 3)), heads=heads))) == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.Sequential(Block(), nn.Linear(8, 2)),
        Model(
            lists=nn.ModuleList(
                [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])]
            )
        ),
    ],
    ids=["a layer", "layers", "one block", "lists of layers"],
)
def test_a_model_without_repeated_blocks_has_none(model: nn.Module) -> None:
    assert blocks_of(model) == {}


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (["layers.1"], ["layers.1"]),
        (["layers"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.*"], ["layers.0", "layers.1", "layers.2"]),
        (["Block"], ["layers.0", "layers.1", "layers.2", "tail"]),
        (["*ock"], ["layers.0", "layers.1", "layers.2", "tail"]),
        ("Block", ["layers.0", "layers.1", "layers.2", "tail"]),
        (["tail", "layers.0.mlp", "layers.2"], ["layers.0.mlp", "layers.2", "tail"]),
        (["layers.2.mlp", "layers"], ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_blocks_are_named_by_module_class_or_pattern(
    named: str | list[str], found: list[str]
) -> None:
    assert (
        list(blocks_of(Model(layers=nn.ModuleList(several(Block, 3)), tail=Block()), named))
        == found
    )


def test_names_that_fit_nothing_are_told_together_with_the_nearest_ones() -> None:
    model = Model(layers=nn.ModuleList(several(Block, 2)))
    with pytest.raises(ConfigError) as caught:
        blocks_of(model, ["Blok", "layers.0", "stages"])
    assert [problem.code for problem in caught.value.problems] == ["no-such-block"] * 2
    assert [problem.fields for problem in caught.value.problems] == [
        {"value": "Blok", "nearest": "Block"},
        {"value": "stages", "nearest": None},
    ]
    with refused("no-such-block", value=""):
        blocks_of(model, [])
