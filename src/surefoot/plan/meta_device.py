"""A pass as a GPU would compute it, on torch's meta device, which computes nothing and knows neither autocast nor its kernels.

There a function's results have a shape and a type and take no memory, so a pass over a model of any size is a second's work. Three
things are done here by hand: what autocast would cast, attention in one kernel that never holds all its weights, and dropout's mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_NARROW = {  # computed in 16 bits under autocast, after torch's list for CUDA
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.mv,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.prelu,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.Tensor.mm,
    torch.Tensor.bmm,
}
_WIDE = {  # in float32
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.kl_div,
    F.binary_cross_entropy_with_logits,
    F.softplus,
    F.normalize,
    F.cosine_similarity,
    torch.softmax,
    torch.log_softmax,
    torch.exp,
    torch.log,
    torch.pow,
    torch.rsqrt,
    torch.sum,
    torch.prod,
    torch.cumsum,
    torch.norm,
    torch.logsumexp,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.exp,
    torch.Tensor.log,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    torch.Tensor.rsqrt,
    torch.Tensor.sum,
    torch.Tensor.prod,
    torch.Tensor.cumsum,
    torch.Tensor.norm,
}


class OnPaper(TorchFunctionMode):
    """Functions of torch that are called in its block act as on a GPU, under autocast to `narrow` where that is not None.

    Inside what `narrow` does to a function that calls others, only the outer one is seen. `casts` are the weights in 16 bits, each
    made once while `keeping`, as autocast does until its block is left; those that are there from the beginning are not made.
    """

    def __init__(self, narrow: torch.dtype | None, *, casts: dict[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.narrow = narrow
        self.casts = dict(casts or {})
        self.keeping = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.narrow is not None and func in _NARROW:
            args, kwargs = tree_map_only(Tensor, self._narrowed, (args, kwargs))
        elif self.narrow is not None and func in _WIDE:
            args, kwargs = tree_map_only(Tensor, self._widened, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _narrowed(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(self.narrow)
        if tensor in self.casts:
            return self.casts[tensor]
        made = tensor.to(self.narrow)
        if self.keeping:
            self.casts[tensor] = made
        return made

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self.narrow else tensor


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """With a mask of a byte a number, as the kernel on GPUs keeps it."""
    if not x.is_meta or not training or p == 0.0:
        return F.dropout(x, p, training, inplace)
    y: Tensor = torch.native_dropout(x, p, True)[0]
    return y


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """In one kernel, which keeps a number for each row of its weights: Dao et al. 2022, section 3.1 (https://arxiv.org/abs/2205.14135)."""
    if not query.is_meta or query.ndim != 4 or others.get("enable_gqa"):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **others)
    aten: Any = torch.ops.aten
    if attn_mask is None:
        made: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
        return made
    bias = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype is torch.bool else attn_mask
    wide = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    found: Tensor = aten._scaled_dot_product_efficient_attention(query, key, value, wide, True, dropout_p, is_causal)[0]
    return found
