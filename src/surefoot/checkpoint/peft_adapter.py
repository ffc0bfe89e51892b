"""The adapter of a peft model: a description in the run's directory, from which an export writes
peft's files without the program.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save
from torch import nn

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.weight_files import not_written
from surefoot.config.paths import write_whole
from surefoot.errors import ConfigError, Setting

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def file_of(model: str) -> str:
    """Return the file in a run's directory that describes the adapter of a model."""
    return "adapter.json" if model == "model" else f"adapter-{model}.json"


def adapter_files(models: Mapping[str, nn.Module]) -> dict[str, str | bytes]:
    """Return the description of each peft model's active adapter by file: its configuration, and
    its tensors' names in the model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    files: dict[str, str | bytes] = {}
    for name, model in models.items():
        if not isinstance(model, PeftModel) or not isinstance(model.active_adapter, str):
            continue
        adapter, state = model.active_adapter, model.state_dict(keep_vars=True)
        names = {id(tensor): own for own, tensor in reversed(state.items())}
        saved = get_peft_model_state_dict(
            model, state, adapter_name=adapter, save_embedding_layers=False
        )
        tensors = {key: names.get(id(tensor)) for key, tensor in saved.items()}
        settings = {"config": _config(model, adapter), "tensors": tensors}
        files[file_of(name)] = json.dumps(settings, indent=1)
    return files


def _config(model: Any, adapter: str) -> dict[str, object]:
    config = model.peft_config[adapter]
    with TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)  # knows which settings peft reads again
        settings: dict[str, object] = json.loads(Path(scratch, CONFIG).read_text(encoding="utf-8"))
    inner = model.get_base_model()
    if config.task_type is None:
        settings["auto_mapping"] = {
            "base_model_class": type(inner).__name__,
            "parent_library": type(inner).__module__,
        }
    return settings | {"inference_mode": True}


def write_adapter(run: Path, source: Checkpoint, file: str, out: Path, *, model: str) -> list[str]:
    """Write the adapter of a checkpoint's model as peft reads it; return the file names. Raises
    `ConfigError` without an adapter.
    """
    description = run / file_of(model)
    if not description.is_file():
        raise ConfigError(
            "run-without-adapter",
            problem=f"layout = peft: {run} did not train a peft model",
            reason="only such a run, or surefoot train finetune with the method lora, has an adapter",
            remedy=Setting("layout", "native"),
            setting="layout",
            value="peft",
            path=run,
        )
    settings = json.loads(description.read_text(encoding="utf-8"))
    if unlike := [key for key, own in settings["tensors"].items() if own is None]:
        raise ConfigError(
            "adapter-of-computed-tensors",
            problem=f"layout = peft: {unlike[0]} is not a tensor of the model, but computed from"
            " several",
            reason=f"adapters of the type {settings['config'].get('peft_type')} are written by peft"
            " alone",
            remedy="type sf.load(RUN).load_model(...).save_pretrained(DIR) in a program",
            setting="layout",
            value="peft",
            tensor=unlike[0],
        )
    aliases = source.saved.aliases.get(model, {})
    stored = source.tensors(file)
    tensors = {
        key: stored[aliases.get(own, own)].contiguous() for key, own in settings["tensors"].items()
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        write_whole(out / CONFIG, json.dumps(settings["config"], indent=2).encode())
    except OSError as problem:
        raise not_written(out, problem) from problem
    return [CONFIG, WEIGHTS]
