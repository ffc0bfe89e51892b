"""The description of a peft model's adapter in the run's directory. From it and a checkpoint,
`write_adapter` of an export writes peft's files without the program.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

CONFIG = "adapter_config.json"  # the name that peft gives the file


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
        adapter = model.active_adapter
        state = model.state_dict(keep_vars=True)
        names = {id(tensor): key for key, tensor in reversed(state.items())}
        adapter_state = get_peft_model_state_dict(
            model, state, adapter_name=adapter, save_embedding_layers=False
        )
        tensors = {key: names.get(id(tensor)) for key, tensor in adapter_state.items()}
        description = {"config": _config(model, adapter), "tensors": tensors}
        files[file_of(name)] = json.dumps(description, indent=1)
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
