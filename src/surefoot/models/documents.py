"""Documents that share a window: what each token may see, and where it stands in its own document.

`documents_BT` has the number of each token's document in its window: integers (B, T), equal within
a document, different from one document to the next. Shapes: B batch, T time (tokens).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_LEAST_CHANNELS = 16  # of a head, for flex attention


def check_documents(documents_BT: Tensor, tokens_BT: Tensor, cache: object) -> None:
    """Raise `ValueError` unless every token has the number of its document, and no tokens are
    cached.
    """
    if cache is not None:
        raise ValueError("documents: a cache continues one document, so give no documents")
    if documents_BT.shape != tokens_BT.shape:
        raise ValueError(
            f"documents must have the shape of the tokens, {tuple(tokens_BT.shape)}, and has"
            f" {tuple(documents_BT.shape)}"
        )


def places_in_documents(documents_BT: Tensor) -> Tensor:
    """Return the place (B, T) of each token in its document, from 0 on.

    >>> places_in_documents(torch.tensor([[0, 0, 0, 1, 1, 2]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    is_first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    is_first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    first_BT = torch.where(is_first_BT, places_T, 0).cummax(dim=1).values
    return places_T - first_BT


def is_of_document(documents_BT: Tensor, *, back: int) -> Tensor:
    """Return (B, T), true where the token `back` places before is of the same document.

    >>> is_of_document(torch.tensor([[0, 0, 0, 1, 1, 2]]), back=1).int().tolist()
    [[0, 1, 1, 0, 1, 0]]
    """
    is_same_BT = torch.zeros_like(documents_BT, dtype=torch.bool)
    is_same_BT[:, back:] = documents_BT[:, back:] == documents_BT[:, :-back]
    return is_same_BT


def document_mask(
    documents_BT: Tensor, *, channels: int, drop_fraction: float
) -> Tensor | BlockMask:
    """Return the mask of causal attention within documents: a token sees the tokens of its own
    document up to itself.

    On a GPU it is a `BlockMask` of flex attention, which skips the blocks between documents. On a
    CPU, and with attention dropout, it is a tensor (B, 1, T, T) that is added to the scores: 0
    where a token sees another, -inf elsewhere.
    """
    batch, time = documents_BT.shape
    has_kernel = not drop_fraction and channels >= _LEAST_CHANNELS
    if has_kernel and _is_on_gpu(documents_BT):

        def is_visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents_BT[row, query] == documents_BT[row, key])

        device = str(documents_BT.device)
        mask: BlockMask = _compiled(create_block_mask)(
            is_visible, batch, None, time, time, device=device
        )
        return mask
    is_same_B1TT = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    return torch.where(is_same_B1TT.tril(), 0.0, float("-inf"))


def attention_in_blocks(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: BlockMask) -> Tensor:
    """Compute attention by flex attention (Dong et al. 2024: https://arxiv.org/abs/2412.05496)."""
    dtype = v_BHTD.dtype
    y_BHTD: Tensor = _compiled(flex_attention)(
        q_BHTD.to(dtype), k_BHTD.to(dtype), v_BHTD, block_mask=mask
    )
    return y_BHTD


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@cache
def _compiled(function: Any) -> Any:
    # without compilation, flex attention holds all scores
    return torch.compile(function)
