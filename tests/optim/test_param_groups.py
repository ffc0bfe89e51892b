"""Which parameters decay, by the kind of module that owns them; 1 second."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from in_one import in_one
from same_bits import assert_same_bits
from surefoot.optim.build import build_optimizer
from surefoot.optim.optimizers import adamw
from surefoot.optim.param_groups import parameter_groups


def decaying(model, weight_decay=0.1):
    """The names of the parameters that decay."""
    names = set()
    for group in parameter_groups(model, weight_decay):
        if group.decay:
            names.update(group.names)
    return names


class Named(nn.Module):
    """Modules under names that have misled other loops."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@in_one
@pytest.mark.parametrize("name", ["norm1", "ln_f", "bn", "LayerNorm", "decay_me"])
@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4),
        nn.LayerNorm((3, 4)),
        nn.RMSNorm(4),
        nn.RMSNorm((3, 4)),
        nn.GroupNorm(2, 4),
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=str,
)
def test_no_norm_decays_whatever_its_name(name, norm):
    assert decaying(Named(**{name: norm})) == set()


@pytest.mark.parametrize("name", ["bias_proj", "norm", "embedding", "ln_bias"])
def test_a_matrix_decays_whatever_its_name(name):
    assert decaying(Named(**{name: nn.Linear(4, 4)})) == {f"{name}.weight"}


@pytest.mark.parametrize("embedding", [nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)], ids=str)
def test_no_embedding_decays(embedding):
    assert decaying(Named(proj=embedding)) == set()


def test_no_bias_decays_even_of_three_dimensions():
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)

    assert attention.bias_k.ndim == 3
    assert decaying(attention) == {"in_proj_weight", "out_proj.weight"}


def test_convolutions_and_recurrent_matrices_decay_and_their_biases_do_not():
    assert decaying(Named(conv=nn.Conv2d(3, 4, 3), rnn=nn.GRU(4, 4))) == {
        "conv.weight",
        "rnn.weight_ih_l0",
        "rnn.weight_hh_l0",
    }


def test_a_norm_written_by_hand_does_not_decay():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    assert decaying(Named(scale=Gain())) == set()


@pytest.mark.parametrize(("embedding_first", "decay"), [(True, 0.0), (False, 0.1)])
def test_a_tied_weight_stands_once_and_its_first_owner_decides(embedding_first, decay):
    embedding = nn.Embedding(9, 4)
    head = nn.Linear(4, 9, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head) if embedding_first else nn.Sequential(head, embedding)

    (group,) = parameter_groups(model, 0.1)

    assert group.decay == decay
    assert group.names == ["0.weight"]


def test_every_trainable_parameter_is_in_exactly_one_group_and_no_frozen_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[0].requires_grad_(False)

    grouped = []
    for group in parameter_groups(model, 0.1):
        grouped += group.parameters

    assert len(grouped) == len(set(grouped)) == 4
    assert set(grouped) == {*model[1].parameters(), *model[2].parameters()}


def test_names_and_parameters_agree_with_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    live = dict(model.named_parameters())

    for group in parameter_groups(model, 0.1):
        assert [live[name] for name in group.names] == group.parameters


def test_without_decay_there_is_one_group():
    (group,) = parameter_groups(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), 0.0)

    assert group.name == "all"
    assert group.decay == 0.0
    assert len(group.parameters) == 4


def test_a_group_without_decay_has_a_zero_of_the_type_of_the_decay():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    for weight_decay in (1, 0.5):
        decays = [group.decay for group in parameter_groups(model, weight_decay)]
        assert decays == [weight_decay, 0]
        assert {type(decay) for decay in decays} == {type(weight_decay)}


def test_a_model_without_trainable_parameters_has_no_groups():
    assert parameter_groups(nn.ReLU(), 0.1) == []


def train(build) -> nn.Module:
    """A model after three steps of the optimizer that `build` makes for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build(model)
    for _ in range(3):
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_decay_all_is_what_torch_does_with_all_parameters_and_matrices_is_not():
    def build_torchs(model):
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3, fused=True)

    def build_all(model):
        spec = adamw(0.1, weight_decay=0.3, decay="all")
        return build_optimizer(spec, parameter_groups(model, 0.3, decay=spec.decay))

    def build_matrices(model):
        spec = adamw(0.1, weight_decay=0.3, decay="matrices")
        return build_optimizer(spec, parameter_groups(model, 0.3, decay=spec.decay))

    expected = train(build_torchs)

    assert_same_bits(train(build_all).state_dict(), expected.state_dict())
    assert not torch.equal(train(build_matrices)[0].weight, expected[0].weight)
