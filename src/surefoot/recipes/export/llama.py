"""The weights of a llama-family `GPT` as transformers' LlamaForCausalLM has them."""

import json
from collections.abc import Iterator, Mapping

from surefoot.checkpoint.tensor_file import Stored
from surefoot.checkpoint.weight_files import Written
from surefoot.models.gpt_layers import GPTConfig

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def llama_tensors(weights: Mapping[str, Stored], shape: GPTConfig) -> Iterator[Written]:
    """Yield the tensors of a model under the names of transformers. Matrices that the `GPT` keeps
    in one are cut by rows.
    """
    key_width = shape.width // shape.heads * shape.key_heads
    rows_of = {
        "attention.qkv.weight": {
            "self_attn.q_proj.weight": shape.width,
            "self_attn.k_proj.weight": key_width,
            "self_attn.v_proj.weight": key_width,
        },
        "mlp.up.weight": {
            "mlp.gate_proj.weight": shape.hidden,
            "mlp.up_proj.weight": shape.hidden,
        },
    }
    for name, stored in weights.items():
        if not name.startswith("blocks."):
            if name != "head.weight" or not shape.tie_embeddings:
                yield Written(_OUTSIDE[name], stored)
            continue
        _, layer, part = name.split(".", maxsplit=2)
        prefix = f"model.layers.{layer}."
        if part in _IN_BLOCK:
            yield Written(prefix + _IN_BLOCK[part], stored)
            continue
        start = 0
        for their_part, rows in rows_of[part].items():
            yield Written(prefix + their_part, stored.cut(start, start + rows))
            start += rows


def llama_settings(shape: GPTConfig, *, eos_id: int | None) -> bytes:
    """Return the config.json from which transformers builds the same model. `eos_id` is the token
    between documents.
    """
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.width // shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": shape.dropout,
        "initializer_range": 0.02,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
    }
    return (json.dumps(settings, indent=2) + "\n").encode()
