"""GPT-2's weights as Hugging Face's transformers names them, and as `GPT` does. Pure renaming: no file in here.

There each matrix but the embeddings is a `Conv1D`, the other way round than in `nn.Linear`, and each block holds its causal
mask; the head is the embedding and mostly not saved. Names may begin with "transformer." or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from surefoot.models.gpt import LAYER_EPSILON, GPTShape

_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_OUTSIDE = {
    "wte.weight": "embedding.weight",
    "wpe.weight": "positions.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
_PARTS = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_BLOCK = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)")
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")


def is_gpt2_layout(names: Iterable[str]) -> bool:
    """Whether tensors of these names are GPT-2's as transformers names them.

    >>> is_gpt2_layout(["wte.weight", "wpe.weight", "h.0.ln_1.weight"]), is_gpt2_layout(["embedding.weight"])
    (True, False)
    """
    return {"wte.weight", "wpe.weight", "h.0.ln_1.weight"} <= {name.removeprefix(_PREFIX) for name in names}


def from_gpt2_layout(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a `GPT` of the family gpt2, from tensors named as by transformers; raises `ValueError` for foreign names.

    The head is given where it is saved, else it is the embedding.
    """
    plain = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    foreign = []
    for name, tensor in plain.items():
        block = _BLOCK.fullmatch(name)
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = tensor
        elif name == _HEAD:
            found["head.weight"] = tensor
        elif _MASK.fullmatch(name):
            continue
        elif block is not None and block[2] in _PARTS:
            turned = tensor.t().contiguous() if tensor.ndim == 2 else tensor
            found[f"blocks.{block[1]}.{_PARTS[block[2]]}.{block[3]}"] = turned
        else:
            foreign.append(name)
    if foreign:
        raise ValueError(f"{len(foreign)} tensors that no GPT-2 has: {', '.join(foreign[:3])}")
    found.setdefault("head.weight", found["embedding.weight"])
    return found


def to_gpt2_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a `GPT` of the family gpt2, with its head tied, as transformers names and turns it."""
    found = {}
    for name, tensor in state.items():
        there, turned = named_in_gpt2(name)
        if there is not None:
            found[there] = (tensor.t() if turned and tensor.ndim == 2 else tensor).contiguous()
    return found


def named_in_gpt2(name: str) -> tuple[str | None, bool]:
    """What transformers calls a tensor of a `GPT`, and whether its matrices are the other way round; None for the head.

    >>> named_in_gpt2("embedding.weight"), named_in_gpt2("blocks.0.mlp.up.weight")
    (('transformer.wte.weight', False), ('transformer.h.0.mlp.c_fc.weight', True))
    """
    if name == "head.weight":
        return None, False
    outside = {here: there for there, here in _OUTSIDE.items()}
    if name in outside:
        return _PREFIX + outside[name], False
    parts = {here: there for there, here in _PARTS.items()}
    _, layer, *part, kind = name.split(".")
    return f"{_PREFIX}h.{layer}.{parts['.'.join(part)]}.{kind}", True


def shape_of_gpt2(state: Mapping[str, Tensor], *, heads: int | None = None) -> GPTShape:
    """The shape of a GPT-2 whose state this is. `heads` cannot be seen in it; absent: one for 64 channels, as published."""
    vocabulary, width = state["embedding.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    return GPTShape(
        layers=layers,
        heads=max(1, width // 64) if heads is None else heads,
        width=width,
        context=len(state["positions.weight"]),
        vocabulary=vocabulary,
        family="gpt2",
        tied=True,
    )


def gpt2_settings(shape: GPTShape, *, end: int | None) -> dict[str, Any]:
    """The config.json with which transformers builds the same model; `end` is the token between documents."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": _ACTIVATIONS[0],
        "layer_norm_epsilon": LAYER_EPSILON,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "vocab_size": shape.vocabulary,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def foreign_to_gpt2(settings: Mapping[str, Any]) -> str | None:
    """What in a config.json of transformers makes it another network than the gpt2 of `GPT`; None where nothing does.

    >>> foreign_to_gpt2({"n_head": 12}), foreign_to_gpt2({"activation_function": "relu"})
    (None, "activation_function = 'relu'")
    """
    expected: dict[str, tuple[Any, ...]] = {
        "activation_function": _ACTIVATIONS,
        "layer_norm_epsilon": (LAYER_EPSILON,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    wrong = [name for name, right in expected.items() if name in settings and settings[name] not in right]
    return f"{wrong[0]} = {settings[wrong[0]]!r}" if wrong else None
