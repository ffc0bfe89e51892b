"""Activation checkpointing, which recomputes a block's activations in the backward pass instead of
storing them.

The method is from Chen et al., 2016 (https://arxiv.org/abs/1604.06174). Checkpointing does not
change a run's results. Recomputation starts from the same generator states and buffers, and its
changes to buffers are discarded.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from surefoot.distributed.blocks import blocks_of
from surefoot.errors import ConfigError, Setting

How = Literal["off", "blocks", "selective"]
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    _aten._scaled_mm,
    _aten._grouped_mm,
    _aten.convolution,
    _aten.linear,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable,
}


def check_how(how: str, blocks: Sequence[str] | None) -> None:
    """Raise `ConfigError` if `blocks` are named although checkpointing is off."""
    if blocks is not None and how == "off":
        raise ConfigError(
            "checkpointed-modules-without-checkpointing",
            problem=f"activation_checkpointing_modules = {list(blocks)} has no effect while"
            " activation_checkpointing is off",
            remedy=Setting("activation_checkpointing", "blocks"),
            setting="activation_checkpointing_modules",
            value=list(blocks),
        )


def compute_again(
    models: Mapping[str, nn.Module],
    how: Literal["blocks", "selective"],
    *,
    blocks: Sequence[str] | None = None,
) -> dict[str, nn.Module]:
    """Recompute the activations of the models' blocks in the backward pass; return these blocks by
    name.

    The mode "blocks" stores only the inputs of each block. "selective" also stores the outputs of
    matrix products, convolutions and attention. `blocks` are names as in `blocks_of`; if None, each
    model's repeated blocks are used. The function replaces the forward method of each block
    instance, so parameters keep their names and a copied model recomputes its own blocks.
    Checkpointing does not affect evaluation. Raises `ConfigError` if no block is found.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    >>> list(compute_again({"model": model}, "blocks")), model(torch.zeros(4)).requires_grad
    (['0', '1', '2'], True)
    """
    chosen: dict[str, nn.Module] = {}
    for model_name, model in models.items():
        prefix = f"{model_name}." if len(models) > 1 else ""
        for name, block in blocks_of(model, "auto" if blocks is None else blocks).items():
            chosen[prefix + name] = block
    if not chosen:
        kinds = ", ".join(type(model).__name__ for model in models.values())
        raise ConfigError(
            "model-without-blocks",
            problem=f"activation_checkpointing = {how}: {kinds} has no repeated blocks"
            " (two or more of one class in a list of modules)",
            remedy='name the modules to recompute: activation_checkpointing_modules=["encoder",'
            ' "MyBlock", "layers.*"], or leave it off',
            setting="activation_checkpointing",
            value=how,
        )
    for block in dict.fromkeys(chosen.values()):  # each once
        # a partial, not a closure: a deep copy of the block then holds its own forward
        vars(block)["forward"] = partial(
            _checkpointed_forward, block, block.forward, how == "selective"
        )
    return chosen


def plain_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a checkpointed block that stores all activations; None for another
    module.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func is _checkpointed_forward:
        plain: Callable[..., Any] = forward.args[1]
        return plain
    return None


def in_words(how: str, blocks: Mapping[str, nn.Module]) -> str:
    """Return a description of the checkpointing mode and of the blocks, counted by class.

    >>> in_words("selective", {"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    'selective, in 2 x Linear'
    """
    kinds = Counter(type(block).__name__ for block in blocks.values())
    counts = [f"{number} x {kind}" for kind, number in kinds.items()]
    return f"{how}, in {' and '.join(counts)}"


def _checkpointed_forward(
    block: nn.Module, forward: Callable[..., Any], selective: bool, /, *inputs: Any, **named: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    selected = partial(create_selective_checkpoint_contexts, _recompute_policy)
    if not torch.compiler.is_compiling():

        def contexts() -> _Contexts:
            if not selective:
                return nullcontext(), _AsBefore(nullcontext(), block)
            forward_context, recompute_context = selected()
            return forward_context, _AsBefore(recompute_context, block)

        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)
    # A compiled graph writes buffers once, even if it recomputes. Graph breaks are errors, since
    # the parts between them would run without the contexts above; torch 2.13 compiles only the two
    # contexts below.
    with torch._dynamo.error_on_graph_break(True):
        if selective:
            return checkpoint(forward, *inputs, use_reentrant=False, context_fn=selected, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, **named)


# Restores buffers and the generators of Python and NumPy for recomputation; `checkpoint` restores
# torch's. Copies replace the buffers meanwhile, so that other users of the real buffers see no
# change. A retained graph enters the context several times.
class _AsBefore:
    def __init__(self, within: AbstractContextManager[Any], block: nn.Module) -> None:
        self.within = within
        # persistent ones only: the others are constants, which may be large
        self.buffers = []
        for owner in block.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and name not in owner._non_persistent_buffers_set:
                    self.buffers.append((owner, name, buffer.detach().clone()))
        self.generators = random.getstate(), np.random.get_state()
        self.to_put_back: list[Any] = []  # arguments of `_put` for each entry

    def __enter__(self) -> None:
        buffers = [(owner, name, owner._buffers[name]) for owner, name, _ in self.buffers]
        self.to_put_back.append((buffers, random.getstate(), np.random.get_state()))
        copies = [(owner, name, buffer.clone()) for owner, name, buffer in self.buffers]
        self._put(copies, *self.generators)
        self.within.__enter__()

    def __exit__(self, *problem: Any) -> None:
        self.within.__exit__(*problem)
        self._put(*self.to_put_back.pop())

    @staticmethod
    def _put(
        buffers: Iterable[tuple[nn.Module, str, Tensor | None]], python: Any, numpy: Any
    ) -> None:
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer
        random.setstate(python)
        np.random.set_state(numpy)


def _recompute_policy(_: Any, operator: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    names = [argument.name for argument in operator._schema.arguments]
    arguments = dict(zip(names, inputs, strict=False)) | named
    # dropout in attention: the generator has to advance again
    if operator.overloadpacket in _PRODUCTS and not arguments.get("dropout_p"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
