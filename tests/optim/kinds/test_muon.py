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


def build_muon(model, **settings):
    spec = sf.optim.muon(0.02, **settings)
    hidden = hidden_matrices(model, excepted=spec.settings["adamw_modules"])
    groups = parameter_groups(model, spec.weight_decay)
    return build_optimizer(spec, split_hidden(groups, hidden))


def hidden_names(model, **settings):
    hidden = hidden_matrices(model, **settings)
    return [name for name, parameter in model.named_parameters() if parameter in hidden]


@pytest.mark.parametrize("adamw_lr", [None, 0.001])
def test_it_is_torchs_two_optimizers_side_by_side(adamw_lr, monkeypatch):
    monkeypatch.setattr(newton_schulz, "instruction_set", lambda: "unknown")  # as torch multiplies
    model = net()
    optimizer = build_muon(model, adamw_lr=adamw_lr)
    plain = net()
    muon = torch.optim.Muon(
        [plain[1].weight, plain[3].weight],
        lr=0.02,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    biases = [plain[1].bias, plain[3].bias, plain[4].bias]
    groups = [
        {"params": [plain[4].weight]},
        {
            "params": [plain[0].weight, *plain[2].parameters(), *biases],
            "weight_decay": 0.0,
        },
    ]
    adamw = torch.optim.AdamW(groups, lr=adamw_lr or 0.02, betas=(0.9, 0.95), weight_decay=0.1)

    for step in range(5):
        give_gradients(model, step)
        give_gradients(plain, step)
        for part in (optimizer, muon, adamw):
            for group in part.param_groups:  # as the loop does: a schedule
                group["lr"] = group.setdefault("initial_lr", group["lr"]) / (1 + step)
            part.step()

    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


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
    kernel = nn.Parameter(torch.ones(8, 3, 2, 2))
    kernel_muon = MuonWithAdamW([{"params": [kernel], "hidden": True}], lr=0.1)
    matrix = nn.Parameter(torch.ones(8, 12))
    matrix_muon = MuonWithAdamW([{"params": [matrix], "hidden": True}], lr=0.1)

    for step in range(3):
        gradient = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        kernel.grad = gradient.view(8, 3, 2, 2)
        kernel_muon.step()
        matrix.grad = gradient
        matrix_muon.step()

    assert torch.equal(kernel.detach().view(8, 12), matrix.detach())
    kernel_momentum = kernel_muon.state[kernel]["momentum_buffer"]
    matrix_momentum = matrix_muon.state[matrix]["momentum_buffer"]
    assert torch.equal(kernel_momentum, matrix_momentum)


@pytest.mark.parametrize("in_a_run", [True, False])
def test_a_gradient_that_is_let_go_keeps_no_memory(in_a_run):
    kernel = nn.Parameter(torch.ones(8, 3, 2, 2))
    matrix = nn.Parameter(torch.ones(8, 12))
    optimizer = MuonWithAdamW([{"params": [kernel, matrix], "hidden": True}], lr=0.1)
    kernel.grad = torch.ones(8, 3, 2, 2)
    matrix.grad = torch.ones(8, 12)

    if in_a_run:
        skipping(optimizer, torch.device("cpu")).apply(optimizer, torch.tensor(0.0))
    else:
        optimizer.step()
    assert kernel.grad is not None
    assert matrix.grad is not None
    kernel.grad = None
    matrix.grad = None

    for matrices in optimizer.matrices:
        assert all(part.grad is None for part in matrices)


def test_a_state_that_torch_saved_and_loaded_goes_on():
    model = net()
    optimizer = build_muon(model)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()

    loaded = net()
    loaded.load_state_dict(model.state_dict())
    loaded_optimizer = build_muon(loaded)
    loaded_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give_gradients(model, 2)
    optimizer.step()
    give_gradients(loaded, 2)
    loaded_optimizer.step()

    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


# --- who trains what ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["modern", "gpt2"])
def test_of_a_gpt_the_matrices_of_its_blocks_are_hidden(family, tied):
    # as many rows in a block's matrices as the vocabulary and the context have
    shape = sf.models.GPTConfig(
        layers=2, heads=2, width=16, context=16, vocab_size=64, family=family, tie_embeddings=tied
    )
    model = sf.models.GPT(shape)

    assert hidden_names(model) == matrix_names(model, "blocks")


def matrix_names(model, *parts):
    names = []
    for name, parameter in model.named_parameters():
        if name.startswith(parts) and parameter.ndim == 2:
            names.append(name)
    return names


def test_of_a_seq2seq_the_matrices_of_its_blocks_are_hidden():
    shape = sf.models.Seq2SeqConfig(
        vocab_size=32, width=16, heads=2, mlp_width=32, encoder_layers=1, decoder_layers=1
    )
    model = sf.models.Seq2Seq(shape)

    names = hidden_names(model)

    assert {name.split(".")[0] for name in names} == {"encoder", "decoder"}
    assert len(names) == len(matrix_names(model, "enc", "dec"))


def test_a_head_that_is_an_embedding_is_found_wherever_it_stands():
    head = nn.Linear(4, 9, bias=False)
    embedding = nn.Embedding(9, 4)
    head.weight = embedding.weight

    assert hidden_names(nn.Sequential(head, embedding, nn.Linear(4, 4))) == ["2.weight"]
    assert hidden_names(nn.Sequential(embedding, nn.Linear(4, 4), head)) == ["1.weight"]


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

    assert hidden_names(model) == ["0.weight", "2.in_proj_weight", "2.out_proj.weight"]


def test_what_the_user_names_is_left_to_adamw_and_the_head_is_not_guessed():
    model = net()

    assert hidden_names(model, excepted=("1", "3.weight")) == ["4.weight"]


def test_a_module_that_the_model_lacks_cannot_be_left_to_adamw():
    with refused("adamw-module-unknown", value="3.wieght"):
        hidden_matrices(net(), excepted=("3.wieght",))


def test_splitting_groups_keeps_all_that_they_say():
    model = net()
    names = [name for name, _ in model.named_parameters()]
    group = ParameterGroup("own", 0.5, list(model.parameters()), names, rate=0.25)

    hidden, rest = split_hidden([group], hidden_matrices(model))

    assert (hidden.decay, hidden.rate, hidden.hidden) == (0.5, 0.25, True)
    assert (rest.decay, rest.rate, rest.hidden) == (0.5, 0.25, False)
    assert sorted(hidden.names + rest.names) == sorted(names)
    expected_rest = replace(group, parameters=[], names=[])
    assert replace(rest, name="own", parameters=[], names=[]) == expected_rest


def test_a_model_without_hidden_matrices_is_refused():
    with refused("muon-without-matrices"):
        build_muon(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)))


def test_a_last_layer_that_is_a_convolution_is_the_head():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Conv2d(8, 2, 1))

    assert hidden_names(model) == ["0.weight", "1.weight"]


def test_how_it_skips_is_a_phrase_that_ends_a_sentence():
    description = skipping(build_muon(net()), torch.device("cpu")).description
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
    linear = net()
    linear_muon = build_muon(linear)
    transposed = net()
    transposed[1] = Conv1D(transposed[1])
    transposed[3] = Conv1D(transposed[3])
    transposed_muon = build_muon(transposed)

    for step in range(3):
        give_gradients(linear, step)
        pairs = zip(linear.parameters(), transposed.parameters(), strict=True)
        for parameter, other in pairs:
            other.grad = as_shaped(parameter.grad, other).clone()
        linear_muon.step()
        transposed_muon.step()

    for parameter, other in zip(linear.parameters(), transposed.parameters(), strict=True):
        torch.testing.assert_close(other, as_shaped(parameter, other), rtol=1e-2, atol=1e-4)


def as_shaped(tensor, other):
    """The tensor, transposed if only then it has the shape of the other one."""
    return tensor if tensor.shape == other.shape else tensor.t()


def test_the_matrix_of_a_conv1d_is_hidden_as_that_of_a_linear_layer():
    transposed = net()
    transposed[1] = Conv1D(transposed[1])
    transposed[3] = Conv1D(transposed[3])

    assert hidden_names(transposed) == hidden_names(net()) == ["1.weight", "3.weight"]
    assert hidden_names(transposed, conv1d=False) == []


def test_gpt2_of_transformers_has_hidden_matrices():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=4)
    names = hidden_names(transformers.GPT2LMHeadModel(config))

    assert [name.split(".", 3)[-1] for name in names] == [
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

    def count_matrices_of_muon(run):
        groups = run.state.optimizers["model"].optimizer.param_groups
        return sum(len(group["params"]) for group in groups if group["by"] == "Muon")

    assert count_matrices_of_muon(build()) == 2
    monkeypatch.setattr("surefoot.tracking.run_reader.newest_behavior", lambda: 1)
    assert count_matrices_of_muon(build()) == 1
