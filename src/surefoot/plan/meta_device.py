"""A pass as a GPU would compute it, on torch's meta device, which computes nothing and knows neither autocast nor its kernels.

There a function's results have a shape and a type and take no memory, so a pass over a model of any size is a second's work. Three
things are done here by hand: what autocast would cast, attention in one kernel that never holds all its weights, and dropout's mask.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


def _functions(functional: str, top: str, of_tensor: str) -> set[Any]:
    """Functions by their names in `torch.nn.functional`, in `torch`, and of `torch.Tensor`."""
    homes = ((F, functional), (torch, top), (Tensor, of_tensor))
    return {getattr(home, name) for home, names in homes for name in names.split()}


_NARROW = _functions(  # computed in 16 bits under autocast, after torch's list for CUDA
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    " scaled_dot_product_attention multi_head_attention_forward",
    "matmul mm bmm mv addmm baddbmm einsum conv1d conv2d conv3d prelu",
    "matmul __matmul__ __rmatmul__ mm bmm",
)
_WIDE = _functions(  # in float32
    "layer_norm rms_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div"
    " binary_cross_entropy_with_logits softplus normalize cosine_similarity",
    "softmax log_softmax exp log pow rsqrt sum prod cumsum norm logsumexp",
    "softmax log_softmax exp log pow __pow__ rsqrt sum prod cumsum norm",
)


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
