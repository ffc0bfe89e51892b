"""The directory of a model, which is data: found by its path or its name, its config.json read by a
list of keys, its sizes compared with the headers of its weights. Imports no torch.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path, read_regular
from surefoot.errors import Command, Remedy, Setting, first_line

CONFIG = "config.json"
GENERATION = "generation_config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # of a model on the hub
_FORM = "a model is a directory with config.json, .safetensors files and a tokenizer"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
_QUANTIZED = ("quantization_config", "compression_config")
# keys that the classes of transformers take although they do not declare them
_OLDER_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "dtype"}
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vocab_size"}
# keys that most files have, and that change nothing here: leaving them out needs no words
_USUAL = {
    *("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path"),
    *("torch_dtype", "dtype", "use_cache", "is_decoder", "is_encoder_decoder", "id2label"),
    *("label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions"),
    *("chunk_size_feed_forward", "task_specific_params", "_commit_hash", "name_or_path"),
    *("add_cross_attention", "tie_encoder_decoder", "cross_attention_hidden_size"),
    *("label_names", "num_classes"),
}
_LAYERS = re.compile(r"n_layers?|num_(\w+_)?(layers|blocks)|(encoder|decoder)_layers|depth")
_MOST_LAYERS = 10_000  # of a configuration without weights beside it
_MOST_EXPERTS = 1 << 20  # in all layers of such a configuration together
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_BUFFERS = 1 << 28  # values of buffers, such as masks, that a model may have beyond its weights


def model_directory(model: str) -> Path:
    """Return the directory of a model: a path, or the name of a model in the cache of the hub.

    Raises `ConfigError` unless it has a configuration and weights without code.
    """
    path = local_path(model, setting="model")
    is_name = not path.exists() and _NAME.fullmatch(model) is not None
    cure: list[Remedy] = ["copy the model's files there", Setting("model", "DIR")]
    if is_name:
        cached = _in_hub_cache(model)
        cure = [Command(f"hf download {model}")]
        if cached is None:
            raise sf.ConfigError(
                "model-not-in-cache",
                problem=f"model = {model!r} is no directory, and the hub's cache has no such model",
                reason=f"surefoot downloads nothing: {_FORM}",
                remedy=cure,
                setting="model",
                value=model,
            )
        path = cached
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise sf.ConfigError(
            "model-not-found",
            problem=f"model = {model!r} {what}",
            reason=f"surefoot downloads nothing: {_FORM}",
            remedy=cure,
            setting="model",
            value=model,
        )
    if (path / "adapter_config.json").is_file():
        raise sf.ConfigError(
            "model-is-adapter",
            problem=f"model = {model!r} has an adapter of peft",
            reason="its base model is elsewhere, or would be changed by it",
            remedy="merge the adapter into its base model first: merge_and_unload()",
            setting="model",
            value=model,
        )
    if not (path / CONFIG).is_file():
        raise sf.ConfigError(
            "model-without-config",
            problem=f"model = {model!r} has no config.json",
            reason="a model of transformers has one",
            remedy=cure,
            setting="model",
            value=model,
        )
    if not any(path.glob("*.safetensors")):
        others = list[str]()
        for pattern in _OTHER_WEIGHTS:
            others += sorted(file.name for file in path.glob(pattern))
        if not others:
            if not is_name:
                random = "AutoModelForCausalLM.from_config(config).save_pretrained(DIR)"
                cure.append(f"or write random ones: {random}")
            raise sf.ConfigError(
                "model-without-weights",
                problem=f"model = {model!r} has no weights: no .safetensors file",
                reason="a run starts from the weights of a model",
                remedy=cure,
                setting="model",
                value=model,
            )
        if not is_name:
            loads = "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
            cure = [f"if you trust them: {loads}"]
        raise sf.ConfigError(
            "model-weights-may-run-code",
            problem=f"model = {model!r} has its weights in {others[0]}",
            reason="such files may run code when they are loaded; .safetensors files cannot",
            remedy=cure,
            setting="model",
            value=model,
        )
    return path


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # the library raises errors of many kinds
        return Path(snapshot_download(name, local_files_only=True))
    return None


@dataclass(frozen=True)
class ModelSettings:
    """What transformers builds a model from: its type, and the keys that its class declares.

    `undeclared` are the keys that the class does not declare, or that name code, with the values
    in the file. A key of a part has the part's name and a dot before its own.
    """

    kind: Any
    values: dict[str, Any]
    undeclared: dict[str, Any]

    def unused(self, config: Any) -> list[str]:
        """Return the undeclared keys whose values the built configuration does not have. It has
        others, such as the size of a head, which a class derives and writes, but does not read.
        """
        unused = []
        for key, value in self.undeclared.items():
            if not _has(config, key.split("."), value):
                unused.append(key)
        return unused


def _has(config: Any, path: list[str], value: Any) -> bool:
    with suppress(Exception):  # properties of configurations raise errors of many kinds
        entry = config
        for name in path:
            entry = getattr(entry, name)
        as_in_file = json.loads(json.dumps(entry))
        return bool(as_in_file == value)
    return False


def read_settings(file: Path) -> ModelSettings:
    """Return the settings in a config.json. Raises `ConfigError` for a quantized model, and for
    more layers than its weights can have.
    """
    settings = json.loads(read_regular(file), object_hook=_with_floats)
    if not isinstance(settings, dict):
        raise TypeError(f"it is a {type(settings).__name__}, and must be an object")
    for place, key, value in _entries(settings):
        if key in _QUANTIZED and value is not None:
            method = value.get("quant_method", key) if isinstance(value, dict) else key
            raise sf.ConfigError(
                "model-is-quantized",
                problem=f"{file}: the weights are quantized ({method})",
                reason="they would be trained as they are, in float32",
                remedy="choose the model that it was made of, which has no quantization_config",
                path=str(file),
                key=place,
            )
    _refuse_too_many(file, settings)
    from transformers import CONFIG_MAPPING

    kind = settings.pop("model_type", None)
    undeclared = dict[str, Any]()
    values = _declared(CONFIG_MAPPING[kind], settings, undeclared)
    return ModelSettings(kind, values, undeclared)


def _with_floats(entry: dict[str, Any]) -> Any:
    # transformers writes infinity as {"__float__": "Infinity"}, because JSON has no word for it
    name = entry.get("__float__")
    if len(entry) == 1 and isinstance(name, str) and name in _FLOATS:
        return _FLOATS[name]
    return entry


def generation_in(directory: Path) -> str | None:
    """Return the text of a directory's generation_config.json, or None if it has none."""
    file = directory / GENERATION
    return read_regular(file).decode("utf-8", "replace") if file.is_file() else None


def _entries(settings: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, Any]]:
    for key, value in settings.items():
        yield f"{place}{key}", key, value
        if isinstance(value, dict):
            yield from _entries(value, f"{place}{key}.")


def _refuse_too_many(file: Path, settings: dict[str, Any]) -> None:
    # each layer takes time and memory to build, whatever its size, and has a tensor at least
    shapes = weight_shapes(file.parent) if file.name == CONFIG else {}
    numbers = [entry for entry in _entries(settings) if isinstance(entry[2], int)]
    if shapes:
        most_layers = len(shapes)
        most_experts = most_layers
        for shape in shapes.values():
            most_experts = max([most_experts, *shape])
        reason = f"the weights beside it have {len(shapes):,} tensors"
    else:
        layers = [value for _, key, value in numbers if _LAYERS.fullmatch(key)]
        most_layers = _MOST_LAYERS
        most_experts = _MOST_EXPERTS // max([1, *layers])
        reason = f"more than {most_layers:,} layers and {most_experts:,} experts are not built"
    for place, key, value in numbers:
        most = None
        if _LAYERS.fullmatch(key):
            most = most_layers
        elif "experts" in key:
            most = most_experts
        if most is not None and value > most:
            raise sf.ConfigError(
                "model-with-too-many-layers",
                problem=f"{file}: {place} = {value:,}",
                reason=reason,
                remedy="copy the model's files again, or choose another model",
                path=str(file),
                key=place,
                value=value,
            )


def _declared(
    declared: Any, settings: dict[str, Any], undeclared: dict[str, Any], place: str = ""
) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    keys = _OLDER_KEYS | _TOKENS | set(declared.attribute_map)
    for base in declared.__mro__:
        if base is PretrainedConfig:
            break
        keys |= set(getattr(base, "__annotations__", {}))  # of a dataclass
        init = vars(base).get("__init__")
        if init is not None:
            code = init.__code__
            keys |= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        post_init = vars(base).get("__post_init__")
        if post_init is not None:  # it takes keys by name, as in kwargs.pop("max_seq_len")
            keys |= {name for name in post_init.__code__.co_consts if isinstance(name, str)}
    parts = getattr(declared, "sub_configs", {})
    values = {}
    for key, value in settings.items():
        if key not in keys or "_implementation" in key:
            if key not in _USUAL:
                undeclared[f"{place}{key}"] = value
            continue
        if key in parts and isinstance(value, dict):
            part_settings = dict(value)
            part_class = parts[key]
            part_kind = part_settings.pop("model_type", getattr(part_class, "model_type", None))
            if part_kind:  # a part that is no model has no type, such as the attention of MPT
                part_class = CONFIG_MAPPING[part_kind]
            part_values = _declared(part_class, part_settings, undeclared, f"{place}{key}.")
            values[key] = {"model_type": part_kind} | part_values
        else:
            values[key] = value
    return values


def weight_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the headers of a model's .safetensors files, which reads
    no values. Raises `ConfigError` for a file that is not one.
    """
    from surefoot.checkpoint.tensor_file import stored_in  # imports torch

    files = [directory / _WEIGHTS]
    try:
        if not files[0].is_file() and (directory / _INDEX).is_file():
            names = set(json.loads(read_regular(directory / _INDEX))["weight_map"].values())
            elsewhere = [name for name in names if Path(name).name != name]
            if elsewhere:
                raise ValueError(f"{_INDEX} names {elsewhere[0]!r}, which is not beside it")
            files = [directory / name for name in sorted(names)]
        shapes = {}
        for file in files:
            if file.is_file():
                for name, stored in stored_in(file).items():
                    shapes[name] = tuple(stored.shape)
        return shapes
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        raise sf.ConfigError(
            "model-weights-unreadable",
            problem=f"the weights in {directory} cannot be read: {first_line(problem)}",
            reason="a .safetensors file begins with the names and sizes of its tensors",
            remedy="copy the model's files again",
            path=str(directory),
        ) from problem


def refuse_larger(model: Any, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> None:
    """Raise `ConfigError` if a model on the meta device is not of the sizes of its weights."""
    prefix = f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        saved = shapes.get(name, shapes.get(name.removeprefix(prefix)))
        if saved is not None and saved != tuple(parameter.shape):
            raise sf.ConfigError(
                "model-sizes-differ",
                problem=f"{where}: {name} has the shape {list(saved)} in the weights, and"
                f" {list(parameter.shape)} by config.json",
                reason="they must be the weights of the model in its config.json",
                remedy="copy the model's files again",
                tensor=name,
            )
    stored_values = sum(math.prod(shape) for shape in shapes.values())
    parameter_values = sum(parameter.numel() for parameter in model.parameters())
    buffer_values = sum(buffer.numel() for buffer in model.buffers())
    if parameter_values > stored_values or buffer_values > stored_values + _BUFFERS:
        raise sf.ConfigError(
            "model-larger-than-weights",
            problem=f"{where}: config.json describes {parameter_values + buffer_values:,} values,"
            f" and the weights have {stored_values:,}",
            reason="transformers would start the others with random values",
            remedy="copy the model's files again, or choose another model",
            path=where,
        )
