"""Documents that share a window, for causal language models of transformers.

transformers keeps documents apart whose position ids restart, if it gets no mask and no cache. Not
every family of models reads position ids, so a probe says whether a model does. Shapes: B batch, T
time (tokens), V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.models.documents import places_in_documents

_PROBE_TOKENS = 4  # of a document


def document_arguments(model: nn.Module, inputs: Tensor, documents: Tensor) -> dict[str, Any]:
    """Return the arguments with which a model of transformers computes each document of a window as
    if it stood alone: `model(**document_arguments(model, inputs, documents)).logits`.

    `documents` has the number of each token's document: integers (B, T), equal within a document,
    different from one document to the next. Models that attend by flash attention also get the
    bounds of the documents, which are read on the host. Whether a model heeds the arguments says
    `keeps_documents_apart`.

    >>> from torch import nn, tensor
    >>> arguments = document_arguments(nn.Identity(), tensor([[5, 6, 7]]), tensor([[0, 0, 1]]))
    >>> arguments["position_ids"].tolist()
    [[0, 1, 0]]
    """
    if documents.shape != inputs.shape:
        raise ValueError(
            f"documents must have the shape of the inputs, {tuple(inputs.shape)}, and has"
            f" {tuple(documents.shape)}"
        )
    places_BT = places_in_documents(documents)
    arguments: dict[str, Any] = {
        "input_ids": inputs,
        "position_ids": places_BT,
        "use_cache": False,  # with a cache, transformers joins the documents
    }
    if _attention_of(model).startswith("flash"):
        starts = places_BT.flatten().eq(0).nonzero().flatten()
        bounds = F.pad(starts, (0, 1), value=places_BT.numel()).int()
        longest = int(bounds.diff().max())
        arguments["cu_seq_lens_q"] = bounds
        arguments["cu_seq_lens_k"] = bounds
        arguments["max_length_q"] = longest
        arguments["max_length_k"] = longest
    return arguments


def keeps_documents_apart(model: nn.Module, *, max_tokens: int | None = None) -> bool:
    """Return True if a model of transformers computes a document of a window as if it stood alone,
    given `document_arguments`.

    The model computes windows of 12 tokens in which the other documents change: not one bit of the
    document's logits may. Nor may they if another document is `max_tokens` long, because some
    rotary embeddings depend on the longest one. And they are the logits of the document alone, up
    to rounding. The weights must be trained or random, because zeros hide what a model mixes.

    >>> from transformers import AutoModelForCausalLM, GPT2Config
    >>> shape = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
    >>> keeps_documents_apart(AutoModelForCausalLM.from_config(shape))
    True
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    device = next(model.parameters()).device
    size = _PROBE_TOKENS
    kept = slice(size, 2 * size)
    inputs_BT = torch.arange(1, 3 * size + 1, device=device)[None] % vocabulary
    others_BT = (inputs_BT + 1) % vocabulary
    others_BT[:, kept] = inputs_BT[:, kept]
    documents_BT = torch.arange(3, device=device).repeat_interleave(size)[None]

    arguments = document_arguments(model, inputs_BT, documents_BT)
    after_others = document_arguments(model, others_BT, documents_BT)
    after_long_one = arguments | {"position_ids": arguments["position_ids"].clone()}
    if max_tokens is not None and max_tokens > size:
        after_long_one["position_ids"][:, :size] += max_tokens - size

    modules = list(model.modules())
    was_training = [module.training for module in modules]
    model.eval()
    try:
        with torch.no_grad():
            logits_BTV = model(**arguments).logits[:, kept]
            is_apart = torch.equal(logits_BTV, model(**after_others).logits[:, kept])
            is_apart &= torch.equal(logits_BTV, model(**after_long_one).logits[:, kept])
            alone_BTV = model(input_ids=inputs_BT[:, kept], use_cache=False).logits
    finally:
        for module, mode in zip(modules, was_training, strict=True):
            module.training = mode
    rounding = torch.finfo(logits_BTV.dtype).eps ** 0.5
    difference = (logits_BTV - alone_BTV).abs().max()
    return is_apart and bool(difference <= rounding * alone_BTV.abs().max())


def _attention_of(model: nn.Module) -> str:
    """Return the name of a model's kernel of attention; empty for a model of another library."""
    for module in model.modules():
        config = getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str):
            return name
    return ""
