"""Models of transformers: read from a directory or built by their configuration, with adapters of
peft, and written again.

Imports transformers and peft, and torch, when used.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import surefoot as sf
from surefoot.checkpoint.weight_files import not_written
from surefoot.errors import Setting, first_line
from surefoot.recipes.finetune.config import ALL_LINEAR, Lora
from surefoot.recipes.finetune.model_directory import (
    GENERATION,
    read_settings,
    refuse_larger,
    weight_shapes,
)
from surefoot.seeding import untouched

SETTINGS = "model_config.json"  # in the run's directory: the model's config.json
# loggers of libraries that peft and transformers import, which write about what is not used here
_FOREIGN = ("torchao", "bitsandbytes", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and notes of transformers and peft in the block, and what the
    libraries that they import write to standard error.
    """
    levels = {name: logging.getLogger(name).level for name in _FOREIGN}
    for name in _FOREIGN:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    from transformers.utils import logging as notes

    verbosity = notes.get_verbosity()
    has_bars = notes.is_progress_bar_enabled()
    notes.set_verbosity_error()
    notes.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        notes.set_verbosity(verbosity)
        if has_bars:
            notes.enable_progress_bar()


def model_config(file: Path) -> Any:
    """Return the configuration in a config.json. Raises `ConfigError` if transformers has no
    language model for it.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        settings = read_settings(file)
        with quiet():
            config: Any = AutoConfig.for_model(settings.kind, **settings.values)
    except sf.SurefootError:
        raise
    except Exception as problem:  # the library raises errors of many kinds
        raise sf.ConfigError(
            "model-unknown",
            problem=f"{file} does not describe a model that transformers has: {first_line(problem)}",
            reason="code beside a model is never run",
            remedy="choose another model, or another version of transformers",
            path=str(file),
        ) from problem
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise sf.ConfigError(
            "model-not-causal",
            problem=f"{file}: a model of the type {settings.kind!r} does not continue text",
            reason="conversations need a causal language model, such as GPT-2, Llama or Qwen2",
            remedy=Setting("model", "DIR"),
            path=str(file),
            kind=settings.kind,
        )
    return config


def context_of(config: Any) -> int | None:
    """Return the number of positions of a model; None if the configuration has no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def base_model(config: Any, directory: Path | None) -> Any:
    """Return a model in float32 with the weights of a directory, or with random weights if it is
    None or on the meta device. Nothing is built unless its sizes are those of the weights.
    """
    import torch

    with quiet():
        from transformers import AutoModelForCausalLM

        if directory is not None:
            refuse_other_sizes(config, weight_shapes(directory), where=str(directory))
        if directory is None or torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                config=deepcopy(config),
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as problem:  # the library raises errors of many kinds
            raise sf.ConfigError(
                "model-weights-do-not-fit",
                problem=f"the weights in {directory} cannot be loaded: {first_line(problem)}",
                reason="they must be those of the model in its config.json",
                remedy="copy the model's files again",
                path=str(directory),
            ) from problem
    missing = sorted(report["missing_keys"])
    if missing:
        raise sf.ConfigError(
            "model-weights-missing",
            problem=f"the weights in {directory} lack {len(missing)} tensors of its config.json:"
            f" {', '.join(missing[:3])}",
            reason="transformers would start these with random values",
            remedy="copy the model's files again, or choose another model",
            path=str(directory),
            missing=missing,
        )
    return model


def refuse_other_sizes(config: Any, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> None:
    """Raise `ConfigError` if a configuration describes other tensors than the weights have. Nothing
    but names and shapes is built.
    """
    import torch

    with untouched(), torch.device("meta"), quiet():
        from transformers import AutoModelForCausalLM

        try:
            outline = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
        except Exception as problem:  # sizes that are no sizes raise errors of many kinds
            raise sf.ConfigError(
                "model-not-built",
                problem=f"{where}: transformers cannot build this model: {first_line(problem)}",
                reason="its config.json must have the sizes of its weights",
                remedy="copy the model's files again, or choose another model",
                path=where,
            ) from problem
    refuse_larger(outline, shapes, where=where)


def tuned_model(
    config: Any, directory: Path | None, *, lora: Lora | None, name: str | None = None
) -> Any:
    """Return the model to train, in training mode: all of it, or its adapters of peft. `name` is
    the base model's in the adapter.
    """
    model = base_model(config, directory)
    model.config.pad_token_id = None  # else GPT-2 compares tokens with it on the host
    if lora is None:
        return model.train()
    with quiet():
        from peft import LoraConfig, get_peft_model

    targets = list(lora.target_modules)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        # peft knows all-linear as a text, not as a list of one
        target_modules=targets[0] if lora.target_modules == ALL_LINEAR else targets,
    )
    try:
        with quiet():
            adapted = get_peft_model(model, settings)
    except ValueError as problem:
        linear = set()
        for module_name, module in model.named_modules():
            kind = type(module).__name__
            if "Linear" in kind or kind == "Conv1D":
                linear.add(module_name.rpartition(".")[2])
        raise sf.ConfigError(
            "lora-without-layers",
            problem=f"lora.target_modules = {' '.join(targets)}: {first_line(problem)}",
            reason=f"linear layers of this model: {', '.join(sorted(linear))}",
            remedy=[Setting("lora.target_modules", "all-linear"), "some of these"],
            setting="lora.target_modules",
            value=targets,
        ) from problem
    # peft takes the configuration's name, which has none
    adapted.peft_config["default"].base_model_name_or_path = name
    return adapted.train()


def end_tokens(config: Any, generation: str | None) -> list[int]:
    """Return the tokens that end a text of a model, by its generation_config.json or else by its
    configuration.
    """
    ends = config.get_text_config().eos_token_id
    if generation is not None:
        ends = _generation_of(generation).get("eos_token_id", ends)
    if isinstance(ends, int):
        ends = [ends]
    return [end for end in ends or [] if isinstance(end, int)]


def _generation_of(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def write_tuned(
    model: Any,
    tokenizer: Any,
    out: Path,
    *,
    config: Any,
    adapter: bool,
    max_bytes: int,
    generation: str | None = None,
    ends: Sequence[int] = (),
) -> list[str]:
    """Write a tuned model and its tokenizer as transformers reads them, or its adapter as peft
    reads it. Return the files' names.

    The adapter is merged into the weights, unless `adapter`. `generation` is the text of the base
    model's generation_config.json; `ends` are the tokens that end an answer. Older weights in the
    directory are removed before the new ones are complete.
    """
    with quiet():
        from peft import PeftModel

    if adapter and not isinstance(model, PeftModel):
        raise sf.ConfigError(
            "layout-without-adapter",
            problem="layout = peft: this run trained all weights (method full)",
            reason="so it has no adapter",
            remedy=Setting("layout", "transformers"),
            setting="layout",
            value="peft",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".writing-") as scratch, quiet():
            if adapter:
                model.save_pretrained(scratch, save_embedding_layers=False)
                Path(scratch, "README.md").unlink(missing_ok=True)  # a form to fill in
            else:
                if isinstance(model, PeftModel):
                    model = model.merge_and_unload()
                model.config.pad_token_id = config.pad_token_id
                model.save_pretrained(scratch, max_shard_size=max_bytes)
            tokenizer.save_pretrained(scratch)
            _write_generation(Path(scratch, GENERATION), config, generation, ends)
            for old in out.glob("*.safetensors*"):
                old.unlink()
            files = sorted(file.name for file in Path(scratch).iterdir())
            for name in files:
                os.replace(Path(scratch, name), out / name)
    except OSError as problem:
        raise not_written(out, problem) from problem
    return files


def _write_generation(file: Path, config: Any, base: str | None, ends: Sequence[int]) -> None:
    if base is not None:
        settings = _generation_of(base)
    else:
        settings = {}
        text_config = config.get_text_config()
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(text_config, key, None)
            if value is not None:
                settings[key] = value
    if ends:
        settings["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
