"""Law 20 for models of transformers: a document in a window is computed as if it stood alone, or the
probe says that a model cannot.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from identities.shared_windows import (
    LENGTHS,
    SECOND,
    THIRD,
    VOCABULARY,
    window,
    with_others,
)
from surefoot.models import document_arguments, keeps_documents_apart
from surefoot.recipes.finetune.config import Lora
from surefoot.recipes.finetune.models import quiet, tuned_model
from tuned_runs import FAMILIES, LLAMA

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

GEMMA = LLAMA | {"head_dim": 8, "sliding_window": 16}
APART = {
    "gpt2": FAMILIES["gpt2"],
    "llama": LLAMA,
    "qwen2": FAMILIES["qwen2"],
    "qwen3": LLAMA | {"head_dim": 8},
    "mistral": FAMILIES["mistral"],  # slides in its window
    "gemma2": GEMMA,  # slides in every second layer
    "gemma3_text": GEMMA,
    "gpt_neox": FAMILIES["gpt_neox"],
}
ROUNDS_TO_FLOAT32 = ("gemma2", "gemma3_text")  # softmax or norms, whatever the weights are
JOINED: dict[str, dict[str, Any]] = {
    "opt": FAMILIES["opt"],
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
    "recurrent_gemma": GEMMA | {"num_hidden_layers": 3},
}
of_each_family = pytest.mark.parametrize("family", APART)
in_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)


def config_of(family: str, sizes: dict[str, Any]) -> Any:
    names = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return transformers.AutoConfig.for_model(family, **(names | sizes))


def language_model(
    family: str, dtype: torch.dtype = torch.float32, *, lora: Lora | None = None
) -> Any:
    torch.manual_seed(0)
    model = tuned_model(config_of(family, APART[family]), None, lora=lora)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()


def packed(model: Any, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
    logits: Tensor = model(**document_arguments(model, tokens_BT, documents_BT)).logits
    return logits


def alone(model: Any, tokens_BT: Tensor) -> Tensor:
    """Return the logits of each document alone."""
    parts = tokens_BT.split(LENGTHS, dim=1)
    return torch.cat([model(input_ids=part_BT, use_cache=False).logits for part_BT in parts], dim=1)


def assert_law(model: Any, kept: slice) -> None:
    tokens_BT, documents_BT = window()
    logits = packed(model, tokens_BT, documents_BT)
    others = packed(model, with_others(tokens_BT, kept), documents_BT)
    assert torch.equal(logits[:, kept], others[:, kept])
    assert not torch.equal(logits, others)


@of_each_family
@in_each_dtype
@pytest.mark.parametrize("kept", [SECOND, THIRD], ids=["one token", "many tokens"])
@torch.no_grad()
def test_no_bit_of_a_documents_logits_depends_on_the_others(
    family: str, dtype: torch.dtype, kept: slice
) -> None:
    assert_law(language_model(family, dtype), kept)


@of_each_family
@torch.no_grad()
def test_without_documents_they_depend_on_the_others(family: str) -> None:
    model = language_model(family)
    tokens_BT, _ = window()
    others_BT = with_others(tokens_BT, SECOND)
    logits = model(input_ids=tokens_BT, use_cache=False).logits
    others = model(input_ids=others_BT, use_cache=False).logits
    assert not torch.equal(logits[:, SECOND], others[:, SECOND])


@of_each_family
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6)],
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("lora", [None, Lora(rank=4, dropout=0.0)], ids=["full", "lora"])
def test_loss_and_gradients_are_those_of_each_document_alone(
    family: str, dtype: torch.dtype, tolerance: float, lora: Lora | None
) -> None:
    model = language_model(family, dtype, lora=lora)
    tokens_BT, documents_BT = window()
    targets_BT, _ = window(seed=2)

    def loss_of(logits_BTV: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    packed_loss = loss_of(packed(model, tokens_BT, documents_BT))
    of_packed = torch.autograd.grad(packed_loss, trained)
    alone_loss = loss_of(alone(model, tokens_BT))
    of_alone = torch.autograd.grad(alone_loss, trained)

    assert packed_loss.item() == pytest.approx(alone_loss.item(), rel=tolerance)
    if family in ROUNDS_TO_FLOAT32:
        tolerance = 1e-6
    for of_window, of_document in zip(of_packed, of_alone, strict=True):
        torch.testing.assert_close(of_window, of_document, rtol=0, atol=tolerance)


@of_each_family
@in_each_dtype
def test_the_gradients_of_a_document_are_those_of_its_own_loss(
    family: str, dtype: torch.dtype
) -> None:
    model = language_model(family, dtype)
    tokens_BT, documents_BT = window()
    vectors_BTC = model.get_input_embeddings()(tokens_BT).detach().requires_grad_()
    arguments = document_arguments(model, tokens_BT, documents_BT)
    del arguments["input_ids"]
    logits_BTV = model(inputs_embeds=vectors_BTC, **arguments).logits
    logits_BTV[:, THIRD].float().logsumexp(dim=-1).sum().backward()
    of_others = vectors_BTC.grad.clone()
    of_others[:, THIRD] = 0
    assert of_others.eq(0).all()
    assert vectors_BTC.grad[:, THIRD].ne(0).any()


@of_each_family
def test_the_probe_finds_families_that_keep_documents_apart(family: str) -> None:
    with quiet():
        model = tuned_model(config_of(family, APART[family]), None, lora=None)
    model.train()
    model.get_input_embeddings().eval()
    assert keeps_documents_apart(model, max_tokens=128)
    assert model.training
    assert not model.get_input_embeddings().training


@pytest.mark.parametrize("family", JOINED)
def test_the_probe_finds_families_that_join_documents(family: str) -> None:
    torch.manual_seed(0)
    model = tuned_model(config_of(family, JOINED[family]), None, lora=None)
    assert not keeps_documents_apart(model)


def test_the_probe_finds_rotary_embeddings_that_depend_on_the_longest_document() -> None:
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = LLAMA | {"max_position_embeddings": 32, "rope_parameters": rotary}
    torch.manual_seed(0)
    model = tuned_model(config_of("llama", sizes), None, lora=None)
    assert keeps_documents_apart(model, max_tokens=32)
    assert not keeps_documents_apart(model, max_tokens=64)


class Unplaced(nn.Module):
    """A model whose documents are apart, with the positions of the window."""

    def __init__(self) -> None:
        super().__init__()
        self.model = language_model("gpt2")
        self.config = self.model.config

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **named: Any) -> Any:
        if position_ids is not None:
            first_places_BT = position_ids.eq(0) * torch.arange(position_ids.shape[1])
            position_ids = position_ids + first_places_BT.cummax(dim=1).values * 2
        return self.model(input_ids=input_ids, position_ids=position_ids, **named)


def test_the_probe_finds_positions_that_do_not_begin_anew() -> None:
    assert not keeps_documents_apart(Unplaced())


def test_flash_attention_gets_the_bounds_of_all_documents() -> None:
    model = language_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    documents = torch.tensor([[0, 0, 1], [0, 1, 1]])
    arguments = document_arguments(model, torch.zeros_like(documents), documents)
    for side in "qk":
        assert arguments[f"cu_seq_lens_{side}"].tolist() == [0, 2, 3, 4, 6]
        assert arguments[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert arguments[f"max_length_{side}"] == 2


def test_documents_need_the_shape_of_the_inputs() -> None:
    tokens_BT, documents_BT = window()
    with pytest.raises(ValueError, match="shape"):
        sf.models.document_arguments(nn.Identity(), tokens_BT, documents_BT[:, 1:])
