"""GPT-2 weights in the format of Hugging Face transformers: model.safetensors and config.json."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.tensor_file import file_of
from surefoot.checkpoint.weight_files import WEIGHTS, not_written, read_weights
from surefoot.config.paths import local_path, write_whole
from surefoot.errors import CheckpointError, Setting
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import LAYER_EPSILON, GPTConfig

SETTINGS = "config.json"
_PREFIX = "transformer."
_OUTSIDE = {
    "wte.weight": "embedding.weight",
    "wpe.weight": "positions.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
}
_PARTS = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_BLOCK = re.compile(r"h\.(\d+)\.")
_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
_OF_GPT = {  # settings in transformers (all defaults) of a gpt2-family `GPT`
    "activation_function": _ACTIVATIONS,
    "layer_norm_epsilon": (LAYER_EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def is_gpt2_layout(names: Iterable[str]) -> bool:
    """Return True if the tensors have the names of GPT-2 in transformers.

    >>> (
    ...     is_gpt2_layout(["wte.weight", "wpe.weight", "h.0.ln_1.weight"]),
    ...     is_gpt2_layout(["embedding.weight"]),
    ... )
    (True, False)
    """
    plain_names = {name.removeprefix(_PREFIX) for name in names}
    return {"wte.weight", "wpe.weight", "h.0.ln_1.weight"} <= plain_names


def from_gpt2_layout(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map a GPT-2 state of transformers to the state of a gpt2-family `GPT`; raise `ValueError` for
    unknown tensor names.
    """
    plain: dict[str, Tensor] = {}
    layers: set[str] = set()
    for name, tensor in tensors.items():
        if _MASK.fullmatch(name):
            continue
        plain_name = name.removeprefix(_PREFIX)
        plain[plain_name] = tensor
        block = _BLOCK.match(plain_name)
        if block is not None:
            layers.add(block[1])
    our_names = _our_names(layers)
    foreign = [name for name in plain if name not in our_names]
    if foreign:
        raise ValueError(
            f"it has tensors that GPT-2 does not have ({len(foreign)}): {', '.join(foreign[:3])}"
        )
    state = {}
    for name, tensor in plain.items():
        state[our_names[name]] = _transpose(tensor, name.startswith("h."))
    state.setdefault("head.weight", state["embedding.weight"])
    return state


def to_gpt2_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map the state of a gpt2-family `GPT` with a tied head to the names and matrix orientation of
    transformers.
    """
    tensors = {}
    for our_name, tensor in state.items():
        name, is_transposed = named_in_gpt2(our_name)
        if name is not None:
            tensors[name] = _transpose(tensor, is_transposed).contiguous()
    return tensors


def named_in_gpt2(name: str) -> tuple[str | None, bool]:
    """Return the transformers name of a `GPT` tensor (None for the head), and True for a transposed
    matrix.

    >>> named_in_gpt2("embedding.weight"), named_in_gpt2("blocks.0.mlp.up.weight")
    (('transformer.wte.weight', False), ('transformer.h.0.mlp.c_fc.weight', True))
    """
    if name == "head.weight":
        return None, False
    in_block = name.startswith("blocks.")
    layers = [name.split(".")[1]] if in_block else []
    their_names = {ours: theirs for theirs, ours in _our_names(layers).items()}
    return _PREFIX + their_names[name], in_block


def _our_names(layers: Iterable[str]) -> dict[str, str]:
    """Return the name in `GPT` of each tensor of these layers and outside of layers."""
    names = dict(_OUTSIDE)
    for layer in layers:
        for part, our_part in _PARTS.items():
            for kind in ("weight", "bias"):
                names[f"h.{layer}.{part}.{kind}"] = f"blocks.{layer}.{our_part}.{kind}"
    return names


def _transpose(tensor: Tensor, is_transposed: bool) -> Tensor:
    if is_transposed and tensor.ndim == 2:
        return tensor.t().contiguous()
    return tensor


def gpt2_settings(shape: GPTConfig, *, eos_id: int | None) -> bytes:
    """Return the config.json from which transformers builds the same model. `eos_id` is the token
    between documents.
    """
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": _ACTIVATIONS[0],
        "layer_norm_epsilon": LAYER_EPSILON,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "vocab_size": shape.vocab_size,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "tie_word_embeddings": True,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
    }
    return (json.dumps(settings, indent=2) + "\n").encode()


def load_gpt2(path: Path | str, *, heads: int | None = None) -> GPT:
    """Return a `GPT` with GPT-2 weights of transformers, from a .safetensors file or its directory.

    The config.json beside the file, or else `heads`, sets the number of heads. The default is one
    head per 64 channels, as in all published sizes. Raises `CheckpointError` if the file holds
    another model.
    """
    path = local_path(path, setting="path")
    file = path / WEIGHTS if path.is_dir() else path
    tensors = read_weights(path)
    if not is_gpt2_layout(tensors):
        raise _not_gpt2(file, f"it holds {', '.join(list(tensors)[:3])} ...")
    saved_heads = _read_heads(file)
    if heads is not None and saved_heads not in (None, heads):
        raise CheckpointError(
            "gpt2-heads-differ",
            problem=f"heads = {heads}, but {file.with_name(SETTINGS)} has n_head = {saved_heads}",
            setting="heads",
            value=heads,
            expected=saved_heads,
        )
    if heads is None:
        heads = saved_heads
    state, shape = _from_gpt2(tensors, file, heads)
    model = GPT(shape)
    misfit = _misfit(state, model)
    if misfit is not None:
        raise _not_gpt2(file, misfit)
    model.load_state_dict(state)
    return model


def _not_gpt2(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "not-a-gpt2-model",
        problem=f"{file} is not a GPT-2 model of transformers: {why}",
        remedy="to load the weights of a run: sf.load(RUN).load_model(model)",
        path=file,
    )


def save_gpt2(model: GPT, directory: Path | str, *, eos_id: int | None) -> None:
    """Write a gpt2-family model for GPT2LMHeadModel.from_pretrained(directory) of transformers.

    `eos_id` is the token between documents: `tokenizer.eos_id`, or None. An existing model in the
    directory is replaced. Raises `CheckpointError` for another family, an untied head, or an
    `eos_id` outside the vocabulary.

    >>> import tempfile
    >>> model = GPT(
    ...     GPTConfig(
    ...         layers=1,
    ...         heads=1,
    ...         width=8,
    ...         context=4,
    ...         vocab_size=10,
    ...         family="gpt2",
    ...         tie_embeddings=True,
    ...     )
    ... )
    >>> save_gpt2(model, directory := tempfile.mkdtemp(), eos_id=9)
    >>> load_gpt2(directory).shape == model.shape
    True
    """
    shape = model.shape
    directory = local_path(directory, setting="directory")
    if eos_id is not None and not 0 <= eos_id < shape.vocab_size:
        raise CheckpointError(
            "eos-id-outside-vocabulary",
            problem=f"eos_id = {eos_id} is outside this model's vocabulary of {shape.vocab_size}"
            " tokens",
            setting="eos_id",
            value=eos_id,
            vocab_size=shape.vocab_size,
        )
    if shape.family != "gpt2" or not shape.tie_embeddings:
        untied = "" if shape.tie_embeddings else " with an untied head"
        raise CheckpointError(
            "not-saved-as-gpt2",
            problem=f"a model of the family {shape.family}{untied} cannot be saved as GPT-2",
            remedy=Setting("model.family", "gpt2"),
            family=shape.family,
        )
    tensors = to_gpt2_layout(model.state_dict())
    on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / WEIGHTS, file_of(on_host, {"format": "pt"}))
        write_whole(directory / SETTINGS, gpt2_settings(shape, eos_id=eos_id))
    except OSError as problem:
        raise not_written(directory, problem) from problem


def fitted_gpt2(tensors: Mapping[str, Tensor], model: GPT, *, path: Path) -> dict[str, Tensor]:
    """Return the state of a `GPT` from the tensors of the file `path`; raise `CheckpointError`
    unless all tensors fit.
    """
    shape = model.shape
    saved_heads = _read_heads(path)
    state, saved_shape = _from_gpt2(tensors, path, saved_heads)
    if shape.family != "gpt2":
        raise CheckpointError(
            "gpt2-family-differs",
            problem=f"{path} is a GPT-2 model, but this model is of the family {shape.family}",
            remedy=Setting("model.family", "gpt2"),
            path=path,
            family=shape.family,
        )
    differing = []
    mismatches = []
    remedy: list[str | Setting] = []
    for name in ("layers", "heads", "width", "context", "vocab_size"):
        saved_size = getattr(saved_shape, name)
        size = getattr(shape, name)
        if saved_size != size:
            differing.append(name)
            mismatches.append(f"{name} {saved_size} (here {size})")
            if name != "vocab_size":
                remedy.append(Setting(f"model.{name}", saved_size))
    if "vocab_size" in differing:
        tokenizer = Setting("data.tokenizer")
        remedy += [tokenizer, "with as many tokens (padded vocabularies are not cut)"]
    if differing:
        sizes = ", ".join(mismatches)
        if "heads" in differing and saved_heads is None:
            sizes += (
                f"; without n_head in a {SETTINGS} beside it, one head per 64 channels is assumed"
            )
        raise CheckpointError(
            "gpt2-size-differs",
            problem=f"{path} is a GPT-2 model of another size: {sizes}",
            remedy=tuple(remedy),
            path=path,
            names=differing,
        )
    misfit = _misfit(state, model)
    if misfit is not None:
        raise CheckpointError(
            "gpt2-tensors-differ", problem=f"{path} does not fit this model: {misfit}", path=path
        )
    return state


def _misfit(state: Mapping[str, Tensor], model: GPT) -> str | None:
    live = model.state_dict()
    lacking = [name for name in live if name not in state]
    if lacking:
        return f"it has no {', '.join(lacking[:3])}"
    foreign = [name for name in state if name not in live]
    if foreign:
        return f"this model has no {', '.join(foreign[:3])}"
    for name, tensor in live.items():
        if tensor.shape != state[name].shape:
            return f"its {name} has shape {list(state[name].shape)}, here {list(tensor.shape)}"
    head = state["head.weight"]
    embedding = state["embedding.weight"]
    are_equal = head.dtype == embedding.dtype and torch.equal(head, embedding)
    if model.shape.tie_embeddings and not are_equal:
        return "its head differs from its embedding, but GPT-2 ties them"
    return None


def _from_gpt2(
    tensors: Mapping[str, Tensor], file: Path, heads: int | None
) -> tuple[dict[str, Tensor], GPTConfig]:
    try:
        state = from_gpt2_layout(tensors)
        vocab_size, width = state["embedding.weight"].shape
        if heads is None:
            heads = max(1, width // 64)
        layers = [int(name.split(".")[1]) for name in state if name.startswith("blocks.")]
        shape = GPTConfig(
            layers=1 + max(layers),
            heads=heads,
            width=width,
            context=len(state["positions.weight"]),
            vocab_size=vocab_size,
            family="gpt2",
            tie_embeddings=True,
        )
    except ValueError as problem:
        raise _not_gpt2(file, str(problem)) from problem
    return state, shape


def _read_heads(file: Path) -> int | None:
    path = file.with_name(SETTINGS)
    settings: Any = {}
    try:
        if path.is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it holds a {type(settings).__name__}, not a JSON object")
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(
            "gpt2-config-unreadable", problem=f"{path} cannot be read: {problem}", path=path
        ) from problem
    for name, supported in _OF_GPT.items():
        if name in settings and settings[name] not in supported:
            raise CheckpointError(
                "gpt2-setting-unsupported",
                problem=f"{path}: {name} = {settings[name]!r}, which surefoot's gpt2 does not"
                " support",
                reason="its results would differ",
                path=path,
                name=name,
                value=settings[name],
            )
    heads = settings.get("n_head")
    return heads if isinstance(heads, int) else None
