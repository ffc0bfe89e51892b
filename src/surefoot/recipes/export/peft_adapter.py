"""The files of peft for an adapter that a run trained, written without the run's program."""

import json
from pathlib import Path

from safetensors.torch import save

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.peft_adapter import CONFIG, file_of
from surefoot.checkpoint.weight_files import not_written
from surefoot.config.paths import write_whole
from surefoot.errors import ConfigError, Setting

WEIGHTS = "adapter_model.safetensors"  # the name that peft gives the file


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
    names = dict[str, str]()  # by the name that peft gives a tensor, that of the model
    for key, name in settings["tensors"].items():
        if name is None:
            raise ConfigError(
                "adapter-of-computed-tensors",
                problem=f"layout = peft: {key} is not a tensor of the model, but computed from"
                " several",
                reason=f"adapters of the type {settings['config'].get('peft_type')} are written by"
                " peft alone",
                remedy="type sf.load(RUN).load_model(...).save_pretrained(DIR) in a program",
                setting="layout",
                value="peft",
                tensor=key,
            )
        names[key] = name
    aliases = source.saved.aliases.get(model, {})
    stored = source.tensors(file)
    tensors = {}
    for key, name in names.items():
        tensors[key] = stored[aliases.get(name, name)].contiguous()
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        write_whole(out / CONFIG, json.dumps(settings["config"], indent=2).encode())
    except OSError as problem:
        raise not_written(out, problem) from problem
    return [CONFIG, WEIGHTS]
