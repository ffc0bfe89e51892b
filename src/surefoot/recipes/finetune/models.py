"""Models of transformers: read from a directory or built by their configuration, with adapters of
peft, and written again.

Imports transformers and peft, and torch, when used.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path, read_regular
from surefoot.errors import first_line
from surefoot.recipes.finetune.config import ALL_LINEAR, Lora

SETTINGS = "model_config.json"  # in the run's directory: the model's config.json


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and notes of transformers and peft in the block."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def model_directory(model: str) -> Path:
    """Return the directory of a model. Raises `ConfigError` unless it has a configuration and
    weights without code.
    """
    path = local_path(model, setting="model")
    cure = "copy the model's files there, or type --model DIR"
    if not path.is_dir():
        raise sf.ConfigError(
            f"model = {model!r} {'is a file' if path.exists() else 'does not exist'}\n"
            f"  surefoot downloads nothing: a model is a directory with config.json, weights and a tokenizer\n  {cure}"
        )
    if (path / "adapter_config.json").is_file():
        raise sf.ConfigError(
            f"model = {model!r} has an adapter of peft\n  its base model is elsewhere, or would be changed by it\n"
            "  merge the adapter into its base model first: merge_and_unload()"
        )
    if not (path / "config.json").is_file():
        raise sf.ConfigError(
            f"model = {model!r} has no config.json\n  a model of transformers has one\n  {cure}"
        )
    if not any(path.glob("*.safetensors")):
        raise sf.ConfigError(
            f"model = {model!r} has no weights in .safetensors files\n  other files may run code when they are loaded\n"
            "  if you trust them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return path


def model_config(file: Path) -> Any:
    """Return the configuration in a config.json. Raises `ConfigError` if transformers has no
    language model for it.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        settings = json.loads(read_regular(file))
        kind = settings.pop("model_type", None)
        config: Any = AutoConfig.for_model(kind, **settings)
    except Exception as problem:  # the library raises errors of many kinds
        raise sf.ConfigError(
            f"{file} does not describe a model that transformers has: {first_line(problem)}\n"
            "  code beside a model is never run\n  choose another model, or another version of transformers"
        ) from problem
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise sf.ConfigError(
            f"{file}: a model of the type {kind!r} does not continue text\n"
            "  conversations need a causal language model, such as GPT-2, Llama or Qwen2\n  choose another model: --model DIR"
        )
    return config


def context_of(config: Any) -> int | None:
    """Return the number of positions of a model; None if the configuration has no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def base_model(config: Any, directory: Path | None) -> Any:
    """Return a model in float32 with the weights of a directory, or with random weights if it is
    None or on the meta device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with quiet():
        if directory is None or torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as problem:  # the library raises errors of many kinds
            raise sf.ConfigError(
                f"the weights in {directory} cannot be loaded: {first_line(problem)}\n"
                "  they must be those of the model in its config.json\n  copy the model's files again"
            ) from problem
    if missing := sorted(report["missing_keys"]):
        raise sf.ConfigError(
            f"the weights in {directory} lack {len(missing)} tensors of its config.json: {', '.join(missing[:3])}\n"
            "  transformers would start these with random values\n  copy the model's files again, or choose another model"
        )
    return model


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
    from peft import LoraConfig, get_peft_model

    targets = list(lora.target_modules)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets[0] if lora.target_modules == ALL_LINEAR else targets,
    )
    try:
        with quiet():
            adapted = get_peft_model(model, settings)
    except ValueError as problem:
        linear = sorted(
            {
                each.rpartition(".")[2]
                for each, part in model.named_modules()
                if "Linear" in type(part).__name__ or type(part).__name__ == "Conv1D"
            }
        )
        raise sf.ConfigError(
            f"lora.target_modules = {' '.join(targets)}: {first_line(problem)}\n"
            f"  linear layers of this model: {', '.join(linear)}\n  type --lora.target-modules all-linear, or some of these"
        ) from problem
    adapted.peft_config[
        "default"
    ].base_model_name_or_path = name  # peft takes the configuration's, which has none
    return adapted.train()


def write_tuned(
    model: Any, tokenizer: Any, out: Path, *, config: Any, adapter: bool, max_bytes: int
) -> list[str]:
    """Write a tuned model and its tokenizer as transformers reads them, or its adapter as peft
    reads it. Return the files' names.

    The adapter is merged into the weights, unless `adapter`. Older weights in the directory are
    removed before the new ones are complete.
    """
    from peft import PeftModel

    if adapter and not isinstance(model, PeftModel):
        raise sf.ConfigError(
            "layout = peft: this run trained all weights (method full), so it has no adapter\n"
            "  export the model: --layout transformers"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".writing-") as scratch, quiet():
            if adapter:
                model.save_pretrained(scratch, save_embedding_layers=False)
                Path(scratch, "README.md").unlink(missing_ok=True)  # a form to fill in
            else:
                model = model.merge_and_unload() if isinstance(model, PeftModel) else model
                model.config.pad_token_id = config.pad_token_id
                model.save_pretrained(scratch, max_shard_size=max_bytes)
            tokenizer.save_pretrained(scratch)
            for old in out.glob("*.safetensors*"):
                old.unlink()
            files = sorted(each.name for each in Path(scratch).iterdir())
            for name in files:
                os.replace(Path(scratch, name), out / name)
    except OSError as problem:
        raise sf.CheckpointError(
            f"cannot write to {out}: {problem.strerror or problem}"
        ) from problem
    return files
