"""Law 20: a document in a window is computed as if it stood alone.

Its logits do not depend on the other documents of the window, not in one bit. Its gradients are
those of its own loss, and the loss of a window is the sum of the losses of its documents.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
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
    WINDOW,
    window,
    with_others,
)
from surefoot.models import documents as masks
from surefoot.models.documents import document_mask
from surefoot.models.gpt_layers import GPTConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "embeddings that look back": {
        "activation": "swiglu",
        "smear": 2,
        "ngrams": 3,
        "ngram_buckets": 64,
    },
    "tied": {"tie_embeddings": True},
    "gpt2": {"family": "gpt2", "tie_embeddings": True},
    "llama": {"family": "llama", "heads": 4, "kv_heads": 2},
    "wide heads": {"heads": 1, "width": 192},  # tiles in float32 too
}
of_each_family = pytest.mark.parametrize("family", FAMILIES)
in_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)


def gpt(family: str, dtype: torch.dtype, **settings: Any) -> sf.models.GPT:
    sizes = {"layers": 2, "heads": 2, "width": 64} | FAMILIES[family] | settings
    torch.manual_seed(0)
    model = sf.models.GPT(GPTConfig(context=WINDOW, vocab_size=VOCABULARY, **sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def apart(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Return the logits of each document alone."""
    return torch.cat([model(part_BT) for part_BT in tokens_BT.split(LENGTHS, dim=1)], dim=1)


@of_each_family
@in_each_dtype
@pytest.mark.parametrize("kept", [SECOND, THIRD], ids=["one token", "many tokens"])
def test_no_bit_of_a_documents_logits_depends_on_the_others(
    family: str, dtype: torch.dtype, kept: slice
) -> None:
    model = gpt(family, dtype)
    tokens_BT, documents_BT = window()
    logits = model(tokens_BT, documents=documents_BT)
    others = model(with_others(tokens_BT, kept), documents=documents_BT)
    assert torch.equal(logits[:, kept], others[:, kept])
    assert not torch.equal(logits, others)


@of_each_family
def test_joined_documents_depend_on_the_others(family: str) -> None:
    model = gpt(family, torch.float32)
    tokens_BT, _ = window()
    others_BT = with_others(tokens_BT, THIRD)
    assert not torch.equal(model(tokens_BT)[:, THIRD], model(others_BT)[:, THIRD])


@of_each_family
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6)],
    ids=["fp64", "fp32"],
)
def test_logits_and_gradients_are_those_of_each_document_alone(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = gpt(family, dtype)
    tokens_BT, documents_BT = window()
    targets_BT, _ = window(seed=2)

    def loss_of(logits_BTV: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    packed = loss_of(model(tokens_BT, documents=documents_BT))
    packed.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    alone = loss_of(apart(model, tokens_BT))
    alone.backward()

    assert packed.item() == pytest.approx(alone.item(), rel=tolerance)
    for parameter, of_packed in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(of_packed, parameter.grad, rtol=0, atol=tolerance)


@of_each_family
@in_each_dtype
def test_the_gradients_of_a_document_are_those_of_its_own_loss(
    family: str, dtype: torch.dtype
) -> None:
    model = gpt(family, dtype)
    tokens_BT, documents_BT = window()
    table_VC = model.embedding.weight
    logits = model(tokens_BT, documents=documents_BT)
    (gradient_VC,) = torch.autograd.grad(logits[:, THIRD].float().sum(), table_VC)
    is_read_V = torch.zeros(VOCABULARY, dtype=torch.bool)
    is_read_V[tokens_BT[:, THIRD].unique()] = True
    if model.shape.tie_embeddings:  # the head has a gradient for every token
        return
    assert gradient_VC[~is_read_V].eq(0).all()
    assert gradient_VC[is_read_V].ne(0).any()


@of_each_family
def test_attention_dropout_keeps_documents_apart(family: str) -> None:
    model = gpt(family, torch.float32, dropout=0.3)
    tokens_BT, documents_BT = window()
    results = []
    for inputs_BT in (tokens_BT, with_others(tokens_BT, THIRD)):
        torch.manual_seed(3)
        results.append(model(inputs_BT, documents=documents_BT)[:, THIRD])
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")  # compiled on a GPU only
@torch.no_grad()
def test_flex_attention_computes_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt("plain", dtype)
    tokens_BT, documents_BT = window()
    expected = model(tokens_BT, documents=documents_BT)

    monkeypatch.setattr(masks, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(masks, "_compiled", lambda function: function)
    mask = document_mask(documents_BT, channels=32, drop_fraction=0.0)
    assert not isinstance(mask, Tensor)
    by_blocks = model(tokens_BT, documents=documents_BT)

    torch.testing.assert_close(by_blocks, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["plain", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gpu_keeps_documents_apart_in_blocks_without_waiting(
    family: str, dtype: torch.dtype
) -> None:
    model = gpt(family, dtype).cuda()
    tokens_BT, documents_BT = (tensor.cuda() for tensor in window())
    others_BT = with_others(tokens_BT.cpu(), THIRD).cuda()
    model(tokens_BT, documents=documents_BT).sum().backward()  # compiles
    model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = model(tokens_BT, documents=documents_BT)
        others = model(others_BT, documents=documents_BT)
        logits.float().square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(logits[:, THIRD], others[:, THIRD])
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits, apart(model, tokens_BT), rtol=0, atol=tolerance)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_compiled_models_keep_documents_apart() -> None:
    model = gpt("embeddings that look back", torch.float32)
    tokens_BT, documents_BT = window()
    compiled: Callable[..., Tensor] = torch.compile(model, backend="aot_eager")
    logits = compiled(tokens_BT, documents=documents_BT)
    torch.testing.assert_close(logits, apart(model, tokens_BT))


def test_documents_need_the_shape_of_the_tokens_and_no_cache() -> None:
    model = gpt("plain", torch.float32)
    tokens_BT, documents_BT = window()
    with pytest.raises(ValueError, match="shape"):
        model(tokens_BT, documents=documents_BT[:, 1:])
    with pytest.raises(ValueError, match="cache"):
        model(tokens_BT, model.new_cache(2), documents=documents_BT)


END = 9
TEXT = np.array([1, 2, END, 3, 4, 5, END, 6, END, END, 7, 8, 1, 2, END, 3, 4, END, 5])


def numbered(inputs: list[int]) -> tuple[list[int], list[bool]]:
    """Return the documents of a window, and which inputs have a target, one token after another."""
    documents = []
    has_target = []
    document = 0
    for token in inputs:
        documents.append(document)
        has_target.append(token != END)
        if token == END:
            document += 1
    return documents, has_target


@pytest.mark.parametrize("context", [2, 3, 5])
def test_windows_number_their_documents_and_end_tokens_have_no_target(context: int) -> None:
    joined = sf.data.EvalWindows(TEXT, context=context)
    windows = sf.data.EvalWindows(TEXT, context=context, end_token=END)
    ids = np.arange(len(windows))
    inputs_BT, targets_BT, documents_BT = windows.gather(ids, ids)
    assert torch.equal(inputs_BT, joined.gather(ids, ids)[0])
    for row in range(len(windows)):
        documents, has_target = numbered(inputs_BT[row].tolist())
        assert documents_BT[row].tolist() == documents
        expected = torch.where(torch.tensor(has_target), joined.gather(ids, ids)[1][row], -100)
        assert targets_BT[row].tolist() == expected.tolist()


def test_each_target_of_a_documents_text_is_counted_once() -> None:
    windows = sf.data.EvalWindows(TEXT, context=4, end_token=END)
    ids = np.arange(len(windows))
    _, targets_BT, _ = windows.gather(ids, ids)
    ends = np.flatnonzero(TEXT == END)
    of_documents = [document[1:] for document in np.split(TEXT, ends + 1)]
    expected = np.concatenate(of_documents).tolist()
    assert targets_BT[targets_BT >= 0].tolist() == expected


def test_training_windows_with_documents_have_the_tokens_of_those_without() -> None:
    joined = sf.data.TrainWindows(TEXT, context=4, seed=0)
    windows = sf.data.TrainWindows(TEXT, context=4, seed=0, end_token=END)
    assert windows.fingerprint() == {**joined.fingerprint(), "end_token": END}
    ids = np.array([0, 2, 1])
    epochs = np.array([0, 0, 3])
    inputs_BT, targets_BT, documents_BT = windows.gather(ids, epochs)
    assert torch.equal(inputs_BT, joined.gather(ids, epochs)[0])
    assert targets_BT[inputs_BT == END].eq(-100).all()
    assert documents_BT.shape == inputs_BT.shape
