"""A dry pass on torch's meta device: the memory and operations of a model's forward and backward
pass, as on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from surefoot.data.nested import map_tensors, tensors
from surefoot.errors import ConfigError, DataError, Setting, first_line
from surefoot.mean import Mean
from surefoot.memory import peak, tensor_bytes
from surefoot.optim.clipping import clear
from surefoot.run.components import RunComponents
from surefoot.train.loss_accumulator import scalar
from surefoot.train.precision import FORMATS
from surefoot.train.step_watch import CoupledLoss


@dataclass(frozen=True)
class Pass:
    """The memory and operations of one micro-batch's forward and backward pass, with gradients
    already allocated.
    """

    samples: int
    kept_bytes: int  # stored by the forward pass for the backward pass, without the weights
    peak_bytes: int  # of all tensors that coexist, including gradients in transit to their weights
    # multiplications and additions of the forward pass, and of the backward pass
    flops: tuple[float, float]


def dry_pass(
    parts: RunComponents, *, rows: int | None = None, weights_narrow: bool = False
) -> Pass:
    """Run the first micro-batch through the model on the meta device, resized to `rows` samples if
    given.

    With `weights_narrow`, weights are already bfloat16, as after a bfloat16 gather. Multiplications
    and additions of matrix products, convolutions and attention count, by torch's own formulas.
    Causal attention counts in full. Raises `ConfigError` if the loss needs tensor values.
    """
    batch, samples = _first_batch(parts, rows)
    narrow = torch.bfloat16 if weights_narrow else FORMATS[parts.plan.precision].autocast
    clear(parts.state.parameters)
    for parameter in parts.state.parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        casts = None
        if weights_narrow:  # a first pass finds which weights are cast
            *_, casts_of_first = _count_pass(parts, batch, narrow=narrow, casts={})
            casts = _leaves(casts_of_first)
        kept_bytes, max_bytes, forward, total, _ = _count_pass(
            parts, batch, narrow=narrow, casts=casts
        )
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as problem:
        raise ConfigError(
            "model-not-on-meta-device",
            problem=f"the model or its loss cannot run on the meta device: {first_line(problem)}",
            reason="does it read tensor values (.item(), if tensor, tensor[mask])"
            " or create tensors on a named device?",
        ) from problem
    finally:
        clear(parts.state.parameters)
    backward = total - forward
    if isinstance(parts.task.loss, CoupledLoss):
        ranks = parts.world.on_meta or parts.world.ranks
        if parts.pipeline.sizes.pieces > ranks:  # a coupled loss then encodes twice
            forward *= 2
    return Pass(samples, kept_bytes, max_bytes, (float(forward), float(backward)))


def _leaves(casts: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    leaves = {weight: cast.detach().requires_grad_() for weight, cast in casts.items()}
    for cast in leaves.values():
        cast.grad = torch.empty_like(cast)
    return leaves


class _Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # torch's `FlopCounterMode` would keep recomputed activations alive

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # this import creates loggers

        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.formulas = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = self.formulas.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def _count_pass(
    parts: RunComponents,
    batch: Any,
    *,
    narrow: torch.dtype | None,
    casts: dict[Tensor, Tensor] | None = None,
) -> tuple[int, int, int, int, dict[Tensor, Tensor]]:
    assert parts.task.loss is not None
    permanent: list[Tensor] = list((casts or {}).values())
    for model in parts.state.models.values():
        permanent += model.parameters()
        permanent += model.buffers()
    weights = {tensor.untyped_storage() for tensor in permanent}
    storages: set[torch.UntypedStorage] = set()

    def packed(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage() not in weights:
            storages.add(tensor.untyped_storage())
        return tensor

    mode = MetaMode(narrow, casts=casts)
    counted = _Arithmetic()
    with counted, peak(torch.device("meta")) as peak_memory, mode:
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            result = parts.task.loss(parts.task.forward, batch)
        if isinstance(result, tuple):
            result = result[0]
        loss = scalar(result.total if isinstance(result, Mean) else result)
        forward = counted.flops
        kept_bytes = sum(storage.nbytes() for storage in storages)
        storages.clear()
        if casts is None:  # after autocast's block, checkpoint recomputation casts again
            mode.casts.clear()
            mode.keeping = False
        del result
        # as `loss.backward()`, which would leave the mode as a handled function; checkpoints must
        # recompute inside the mode
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward(
            (loss,),
            (torch.ones_like(loss),),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    read = tensor_bytes(tensors(batch))
    return kept_bytes, peak_memory.memory_bytes + read, forward, counted.flops, mode.casts


def _first_batch(parts: RunComponents, rows: int | None) -> tuple[Any, int]:
    readable = [micro_batch for micro_batch in parts.pipeline.again(0) if micro_batch.count]
    if not readable:
        raise DataError(
            "first-micro-batch-unreadable",
            problem="the first micro-batch cannot be read",
            remedy=("for the reason, plan without", Setting("world_size")),
        )
    micro_batch = readable[0]
    sample_count = len(micro_batch.sample_ids)
    if rows is None or rows == sample_count:
        return micro_batch.batch, sample_count

    def resized(tensor: Tensor) -> Tensor:
        if tensor.ndim and len(tensor) == sample_count:
            return tensor.new_empty((rows, *tensor.shape[1:]))
        return tensor

    return map_tensors(resized, micro_batch.batch), rows


def _functions(functional: str, top: str, of_tensor: str) -> set[Any]:
    functions = set()
    for home, names in ((F, functional), (torch, top), (Tensor, of_tensor)):
        functions |= {getattr(home, name) for name in names.split()}
    return functions


_NARROW = _functions(  # run in 16 bits under autocast, after torch's list for CUDA
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    " scaled_dot_product_attention multi_head_attention_forward",
    "matmul mm bmm mv addmm baddbmm einsum conv1d conv2d conv3d prelu",
    "matmul __matmul__ __rmatmul__ mm bmm",
)
_WIDE = _functions(  # run in float32
    "layer_norm rms_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div"
    " binary_cross_entropy_with_logits softplus normalize cosine_similarity",
    "softmax log_softmax exp log pow rsqrt sum prod cumsum norm logsumexp",
    "softmax log_softmax exp log pow __pow__ rsqrt sum prod cumsum norm",
)


class MetaMode(TorchFunctionMode):
    """A torch function mode that imitates a GPU, with autocast to `narrow` if given. `casts` caches
    the 16-bit weights.
    """

    def __init__(
        self, narrow: torch.dtype | None, *, casts: dict[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.narrow = narrow
        self.casts = dict(casts or {})
        self.keeping = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.narrow is not None and func in _NARROW:
            args, kwargs = tree_map_only(Tensor, self._narrow, (args, kwargs))
        elif self.narrow is not None and func in _WIDE:
            args, kwargs = tree_map_only(Tensor, self._widened, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            func = _attention
        elif func is F.dropout:
            func = _dropout
        return func(*args, **kwargs)

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self.narrow else tensor

    def _narrow(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        cast = self.casts.get(tensor)
        if cast is None:
            cast = tensor.to(self.narrow)
            if self.keeping and tensor.is_leaf and tensor.requires_grad:
                self.casts[tensor] = cast
        return cast


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # a mask of one byte per element, as the GPU kernel stores
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
    # one kernel, which stores one value per row of weights: Dao et al. 2022, section 3.1
    # (arXiv:2205.14135)
    if not query.is_meta or query.ndim != 4 or others.get("enable_gqa"):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **others
        )
    aten: Any = torch.ops.aten
    if attn_mask is None:
        results: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal
        )
    else:
        bias = attn_mask
        if attn_mask.dtype is torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        wide = bias.expand(*query.shape[:3], key.shape[2])
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, wide, True, dropout_p, is_causal
        )
    return results[0]
