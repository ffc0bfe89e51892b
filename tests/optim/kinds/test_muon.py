"""Muon beside AdamW: torch's own two, near-orthogonal updates, and who trains what. (2 s)"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from refused import refused
from surefoot.optim import newton_schulz
from surefoot.optim.build import build_optimizer
from surefoot.optim.kinds.muon import MuonWithAdamW
from surefoot.optim.param_groups import (
    ParameterGroup,
    hidden_matrices,
    parameter_groups,
    split_hidden,
)
from surefoot.optim.skip_step import skipping


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, 16),
        nn.Linear(16, 32),
        nn.LayerNorm(32),
        nn.Linear(32, 16),
        nn.Linear(16, 9),
    )


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def built(model, **settings):
    spec = sf.optim.muon(0.02, **settings)
    hidden = hidden_matrices(model, excepted=spec.settings["adamw_modules"])
    return build_optimizer(spec, split_hidden(parameter_groups(model, spec.weight_decay), hidden))


def names(model, hidden):
    return [name for name, parameter in model.named_parameters() if parameter in hidden]


@pytest.mark.parametrize("adamw_lr", [None, 0.001])
def test_it_is_torchs_two_optimizers_side_by_side(adamw_lr, monkeypatch):
    monkeypatch.setattr(newton_schulz, "instruction_set", lambda: "unknown")  # as torch multiplies
    ours, theirs = net(), net()
    optimizer = built(ours, adamw_lr=adamw_lr)
    muon = torch.optim.Muon(
        [theirs[1].weight, theirs[3].weight],
        lr=0.02,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [theirs[1].bias, *theirs[2].parameters(), theirs[3].bias, theirs[4].bias]
    groups = [
        {"params": [theirs[4].weight]},
        {"params": [theirs[0].weight, *rest], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=adamw_lr or 0.02, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        for model in (ours, theirs):
            give_gradients(model, step)
        for each in (optimizer, muon, adamw):
            for group in each.param_groups:  # as the loop does: a schedule
                group["lr"] = group.setdefault("initial_lr", group["lr"]) / (1 + step)
            each.step()

    torch.testing.assert_close(
        dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (24, 24)])
def test_an_update_is_nearly_orthogonal_and_as_large_as_adamws(shape):
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = MuonWithAdamW([{"params": [weight], "hidden": True}], lr=1.0)
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    update = weight.detach() / (0.2 * max(shape) ** 0.5)

    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.5
    assert singular.max() < 1.5
    assert weight.detach().square().mean().sqrt() == pytest.approx(0.2, rel=0.25)


def test_a_kernel_is_trained_as_the_matrix_of_its_outputs():
    kernel, matrix = nn.Parameter(torch.ones(8, 3, 2, 2)), nn.Parameter(torch.ones(8, 12))
    pair = [
        MuonWithAdamW([{"params": [held], "hidden": True}], lr=0.1) for held in (kernel, matrix)
    ]
    for step in range(3):
        gradient = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        kernel.grad = gradient.view(8, 3, 2, 2)
        matrix.grad = gradient
        for optimizer in pair:
            optimizer.step()

    assert torch.equal(kernel.detach().view(8, 12), matrix.detach())
    assert torch.equal(
        *(next(iter(optimizer.state.values()))["momentum_buffer"] for optimizer in pair)
    )


@pytest.mark.parametrize("in_a_run", [True, False])
def test_a_gradient_that_is_let_go_keeps_no_memory(in_a_run):
    kernel, matrix = nn.Parameter(torch.ones(8, 3, 2, 2)), nn.Parameter(torch.ones(8, 12))
    optimizer = MuonWithAdamW([{"params": [kernel, matrix], "hidden": True}], lr=0.1)
    kernel.grad, matrix.grad = torch.ones(8, 3, 2, 2), torch.ones(8, 12)
    if in_a_run:
        skipping(optimizer, torch.device("cpu")).apply(optimizer, torch.tensor(0.0))
    else:
        optimizer.step()
    assert kernel.grad is not None
    assert matrix.grad is not None
    kernel.grad = matrix.grad = None

    assert all(part.grad is None for group in optimizer.matrices for part in group)


def test_a_state_that_torch_saved_and_loaded_goes_on():
    models = net(), net()
    optimizers = [built(model) for model in models]
    for step in range(2):
        give_gradients(models[0], step)
        optimizers[0].step()
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 2)
        optimizer.step()

    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)


# --- who trains what ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["modern", "gpt2"])
def test_of_a_gpt_the_matrices_of_its_blocks_are_hidden(family, tied):
    # as many rows in a block's matrices as the vocabulary and the context have
    shape = sf.models.GPTConfig(
        layers=2, heads=2, width=16, context=16, vocab_size=64, family=family, tie_embeddings=tied
    )
    model = sf.models.GPT(shape)
    blocks = [
        name
        for name, held in model.named_parameters()
        if name.startswith("blocks") and held.ndim == 2
    ]

    assert names(model, hidden_matrices(model)) == blocks


def test_of_a_seq2seq_the_matrices_of_its_blocks_are_hidden():
    model = sf.models.Seq2Seq(
        sf.models.Seq2SeqConfig(
            vocab_size=32, width=16, heads=2, mlp_width=32, encoder_layers=1, decoder_layers=1
        )
    )
    found = names(model, hidden_matrices(model))

    assert {name.split(".")[0] for name in found} == {"encoder", "decoder"}
    assert len(found) == sum(
        name.startswith(("enc", "dec")) and held.ndim == 2
        for name, held in model.named_parameters()
    )


def test_a_head_that_is_an_embedding_is_found_wherever_it_stands():
    head = nn.Linear(4, 9, bias=False)
    embedding = nn.Embedding(9, 4)
    head.weight = embedding.weight
    for model in (
        nn.Sequential(head, embedding, nn.Linear(4, 4)),
        nn.Sequential(embedding, nn.Linear(4, 4), head),
    ):
        assert [tuple(held.shape) for held in hidden_matrices(model)] == [(4, 4)]


def test_kernels_and_attention_are_hidden_and_grouped_kernels_and_tables_are_not():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(7, 4))

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.MultiheadAttention(4, 2),
        Tables(),
        nn.Linear(4, 2),
    )

    assert names(model, hidden_matrices(model)) == [
        "0.weight",
        "2.in_proj_weight",
        "2.out_proj.weight",
    ]


def test_what_the_user_names_is_left_to_adamw_and_the_head_is_not_guessed():
    model = net()

    assert names(model, hidden_matrices(model, excepted=("1", "3.weight"))) == ["4.weight"]
    with refused("adamw-module-unknown", value="3.wieght"):
        hidden_matrices(model, excepted=("3.wieght",))


def test_splitting_groups_keeps_all_that_they_say():
    model = net()
    group = ParameterGroup(
        "own",
        0.5,
        list(model.parameters()),
        [name for name, _ in model.named_parameters()],
        rate=0.25,
    )
    parts = split_hidden([group], hidden_matrices(model))

    assert [(part.decay, part.rate, part.hidden) for part in parts] == [
        (0.5, 0.25, True),
        (0.5, 0.25, False),
    ]
    assert sorted(name for part in parts for name in part.names) == sorted(group.names)
    assert replace(parts[1], name="own", parameters=[], names=[]) == replace(
        group, parameters=[], names=[]
    )


def test_a_model_without_hidden_matrices_is_refused():
    with refused("muon-without-matrices"):
        built(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)))


def test_a_last_layer_that_is_a_convolution_is_the_head():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Conv2d(8, 2, 1))
    assert names(model, hidden_matrices(model)) == ["0.weight", "1.weight"]


def test_how_it_skips_is_a_phrase_that_ends_a_sentence():
    description = skipping(built(net()), torch.device("cpu")).description
    of_muon, of_adamw = description.split("), ")
    assert " BatchedMuon (" in of_muon
    assert " fused AdamW " in of_adamw


class Conv1D(nn.Module):
    """As transformers has it: a Linear layer whose weight is stored transposed."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


def test_a_conv1d_of_transformers_is_trained_as_the_linear_layer_that_it_is(monkeypatch):
    monkeypatch.setattr(newton_schulz, "instruction_set", lambda: "unknown")
    linear, transposed = net(), net()
    for index in (1, 3):
        transposed[index] = Conv1D(transposed[index])
    hidden = hidden_matrices(transposed)
    assert names(transposed, hidden) == names(linear, hidden_matrices(linear)) != []
    assert hidden_matrices(transposed, conv1d=False) == set()
    optimizers = [built(model) for model in (linear, transposed)]
    for step in range(3):
        give_gradients(linear, step)
        for ours, theirs in zip(linear.parameters(), transposed.parameters(), strict=True):
            theirs.grad = (ours.grad.t() if ours.shape != theirs.shape else ours.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(linear.parameters(), transposed.parameters(), strict=True):
        expected = ours.t() if ours.shape != theirs.shape else ours
        torch.testing.assert_close(theirs, expected, rtol=1e-2, atol=1e-4)


def test_gpt2_of_transformers_has_hidden_matrices():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=4)
    found = names(model := transformers.GPT2LMHeadModel(config), hidden_matrices(model))
    assert [name.split(".", 3)[-1] for name in found] == [
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    ]


def test_a_run_of_an_older_behavior_gives_conv1d_to_adamw(monkeypatch):
    def build():
        layers = net()
        layers[1] = Conv1D(layers[1])
        return sf.Run(
            model=lambda: layers,
            loss=lambda model, batch: model(batch[0]).square().mean(),
            train_data=(torch.arange(8) % 9,),
            batch_size=4,
            length="1 steps",
            optimizer=sf.optim.muon(lr=0.02),
            console=False,
        )

    def of_muon(run):
        groups = run.state.optimizers["model"].optimizer.param_groups
        return sum(len(group["params"]) for group in groups if group["by"] == "Muon")

    assert of_muon(build()) == 2
    monkeypatch.setattr("surefoot.tracking.run_reader.newest_behavior", lambda: 1)
    assert of_muon(build()) == 1
