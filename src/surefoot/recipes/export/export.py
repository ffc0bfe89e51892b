"""Export of a run's weights into files that other programs load, from a checkpoint without the
training script.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from surefoot.checkpoint.format import Checkpoint, Damage
from surefoot.checkpoint.gpt2 import SETTINGS, gpt2_settings, named_in_gpt2
from surefoot.checkpoint.manifest import MANIFEST, logical_name
from surefoot.checkpoint.reader import read_manifest
from surefoot.checkpoint.store import Store, without_checkpoint
from surefoot.checkpoint.tensor_file import Stored
from surefoot.checkpoint.weight_files import Written, write_weights
from surefoot.config.paths import run_path
from surefoot.distributed.world import World
from surefoot.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Setting,
    SurefootError,
    error_as_json,
    first_line,
    out_of_range,
    together,
)
from surefoot.memory import in_words, parsed_bytes
from surefoot.models.gpt_layers import GPTConfig
from surefoot.recipes.export.llama import llama_settings, llama_tensors
from surefoot.recipes.export.peft_adapter import write_adapter
from surefoot.recipes.export.tokenizer_files import tokenizer_files
from surefoot.tokenizers.bpe import from_json
from surefoot.tokenizers.tokenizer import Tokenizer
from surefoot.tracking.run_directory import output_into_run

Weights = Literal["auto", "averaged", "trained"]
Layout = Literal["auto", "native", "gpt2", "transformers", "peft"]
Writes = Callable[..., list[str]]  # `export` of a recipe


@dataclass(frozen=True)
class ExportResult:
    """The files of an export, their directory, and the step of the weights. `damaged` lists newer
    checkpoints that were unusable.

    >>> print(ExportResult(Path("runs/a/export"), (), step=40, averaged=True))
    exported the averaged weights of step 40 to runs/a/export
    """

    directory: Path
    files: tuple[str, ...]
    step: int
    averaged: bool
    damaged: tuple[Damage, ...] = ()

    def __str__(self) -> str:
        weights = "averaged" if self.averaged else "trained"
        lines = [f"exported the {weights} weights of step {self.step:,} to {self.directory}"]
        for file in self.files:
            size = in_words((self.directory / file).stat().st_size)
            lines.append(f"  {file:<36} {size:>10}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return vars(self) | {
            "directory": str(self.directory),
            "files": list(self.files),
            "damaged": [str(damage) for damage in self.damaged],
        }


def export(
    run: Path | str,
    out: Path | str | None = None,
    *,
    checkpoint: str | int = "newest",
    weights: Weights = "auto",
    layout: Layout = "auto",
    max_file: str = "5 GB",
    model: str = "model",
    writes: Writes | None = None,
) -> ExportResult:
    """Write a checkpoint's weights into files that other programs load; `SavedRun.export` describes
    the arguments and errors.

    `writes` is the function of a recipe that writes the layouts transformers and peft itself.
    """
    run = run_path(run, setting="run")
    if out is None and (run / "export").is_symlink():
        raise ConfigError(
            "export-through-link",
            problem=f"{run / 'export'} is a link, and exports are not written through links",
            remedy=("another directory:", Setting("out", "DIR")),
            setting="out",
            path=run / "export",
        )
    out = run / "export" if out is None else run_path(out, setting="out")
    limit = _checked(run, out, checkpoint, weights, layout, max_file)
    store = Store(run / "checkpoints")

    def write_chosen() -> ExportResult:
        source, damaged = _newest_or_best(store, str(checkpoint), weights, model)
        (file,) = source.files
        if writes is not None and layout in ("auto", "transformers", "peft"):
            files = writes(run=run, checkpoint=source, out=out, layout=layout, max_bytes=limit)
        elif layout == "peft":
            files = write_adapter(run, source, file, out, model=model)
        elif layout in ("gpt2", "transformers"):
            files = _write_for_transformers(run, source, file, out, layout=layout, max_bytes=limit)
        else:
            files = _write(run, source, file, out, max_bytes=limit, model=model)
        averaged = file.partition("-")[0] == "ema"
        return ExportResult(out, tuple(files), source.step, averaged, tuple(damaged))

    # tensors are read while they are written: the run may train, and remove their checkpoint
    return store.choose(write_chosen)


def _write(
    run: Path, source: Checkpoint, file: str, out: Path, *, max_bytes: int, model: str
) -> list[str]:
    """Write the weights in a file of a checkpoint, with their own names, and the tokenizers of the
    run. Return the files' names.
    """
    aliases: Mapping[str, str] = source.saved.aliases.get(model, {})
    tensors = [Written(name, stored) for name, stored in _weights_in(source, file).items()]
    return write_weights(
        tensors, out, max_bytes=max_bytes, aliases=aliases, beside=_tokenizers_of(run)
    )


def _write_for_transformers(
    run: Path, source: Checkpoint, file: str, out: Path, *, layout: str, max_bytes: int
) -> list[str]:
    """Write a `GPT` with the names of transformers, its config.json and its tokenizer. Return the
    files' names.
    """
    shape = _gpt_of(source, run, layout)
    weights = _weights_in(source, file)
    tokenizer = _tokenizer_of(run)
    eos_id = None if tokenizer is None else tokenizer.eos_id
    if shape.family == "llama":
        tensors = [*llama_tensors(weights, shape)]
        settings = llama_settings(shape, eos_id=eos_id)
    else:
        tensors = [*_gpt2_tensors(weights)]
        settings = gpt2_settings(shape, eos_id=eos_id)
    beside: Iterable[tuple[str, bytes]] = _tokenizers_of(run)
    if layout == "transformers":
        beside = ()
        if tokenizer is not None:
            beside = tokenizer_files(tokenizer, context=shape.context).items()
    contents = chain([(SETTINGS, settings)], beside)
    return write_weights(tensors, out, max_bytes=max_bytes, aliases={}, beside=contents)


def _weights_in(source: Checkpoint, file: str) -> dict[str, Stored]:
    weights = {}
    for name, stored in source.files[file].items():
        if isinstance(stored, Stored) and not name.startswith("extra/"):
            weights[name] = stored
    return weights


def _gpt2_tensors(weights: Mapping[str, Stored]) -> Iterator[Written]:
    for name, stored in weights.items():
        name_in_gpt2, is_turned = named_in_gpt2(name)
        if name_in_gpt2:
            yield Written(name_in_gpt2, stored, is_turned and len(stored.shape) == 2)


def _tokenizers_of(run: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(run.glob("*tokenizer*.json")):
        if path.is_file() and not path.is_symlink():
            yield path.name, path.read_bytes()


def _checked(
    run: Path, out: Path, checkpoint: str | int, weights: str, layout: str, max_file: str
) -> int:
    limit = 0
    problems: list[SurefootError] = []
    if checkpoint not in ("newest", "best") and not _is_step(checkpoint):
        problems.append(out_of_range("checkpoint", checkpoint, "newest, best or a step"))
    for setting, value, choices in (("weights", weights, Weights), ("layout", layout, Layout)):
        names = get_args(choices)
        if value not in names:
            problems.append(out_of_range(setting, value, f"one of {', '.join(names)}"))
    try:
        limit = parsed_bytes(max_file, setting="max_file")
    except ConfigError as problem:
        problems.append(problem)
    if any((out / name).exists() for name in (MANIFEST, "config.toml", "checkpoints")):
        problems.append(output_into_run(out, instead=f"{run}/export"))
    if problems:
        raise together(problems)
    if not (run / "checkpoints").is_dir():
        raise without_checkpoint(run)
    return limit


def _is_step(which: str | int) -> bool:
    if isinstance(which, int):
        return True
    return which.isascii() and which.isdigit()


def _newest_or_best(
    store: Store, which: str, weights: Weights, model: str
) -> tuple[Checkpoint, list[Damage]]:
    alone = World(torch.device("cpu"))
    newest = store.newest_intact(only=(), world=alone)
    if newest is None:
        raise without_checkpoint(store.directory.parent)
    chosen, damaged = newest
    if _is_step(which):
        chosen = store.at(int(which), only=(), world=alone)
        damaged = []
    elif which == "best":
        chosen = store.at(store.best_step(chosen), only=(), world=alone)
    # an average may begin or end between two checkpoints of a run
    assert chosen.directory is not None
    only = [_file_of(chosen.directory, weights, model)]
    if which == "newest":
        return store.newest_intact(only=only, world=alone) or newest
    return store.at(chosen.step, only=only, world=alone), damaged


def _file_of(path: Path, weights: Weights, model: str) -> str:
    files = read_manifest(path).files
    there = {logical_name(file.removesuffix(".safetensors")) for file in files}
    trained = "model"
    averaged = "ema"
    if model != "model":
        trained = f"model-{model}"
        averaged = f"ema-{model}"
    if trained not in there:
        models = [name for name in there if name.partition("-")[0] == "model"]
        names = sorted(name.removeprefix("model-") for name in models)
        raise ConfigError(
            "model-not-in-run",
            problem=f"model = {model!r} is not a model of this run; available: {', '.join(names)}",
            setting="model",
            value=model,
            available=names,
        )
    if weights == "averaged" and averaged not in there:
        raise ConfigError(
            "weights-not-averaged",
            problem="weights = averaged: this run has no averaged weights (from an EMA or a"
            " schedule-free optimizer)",
            remedy=Setting("weights", "trained"),
            setting="weights",
            value=weights,
        )
    if weights == "trained" or averaged not in there:
        return trained
    return averaged


def _layout_misfit(layout: str, why: str) -> ConfigError:
    return ConfigError(
        "layout-of-another-model",
        problem=f"layout = {layout}: {why}",
        remedy=Setting("layout", "native"),
        setting="layout",
        value=layout,
    )


def _gpt_of(checkpoint: Checkpoint, run: Path, layout: str) -> GPTConfig:
    """Return the configuration of a run's `GPT`; raise `ConfigError` if the layout has no such
    model.
    """
    try:
        shape = GPTConfig(**checkpoint.saved.identity["identity"].get("model"))
    except (TypeError, ValueError) as problem:
        recipes = "gpt" if layout == "gpt2" else "gpt or finetune"
        raise _layout_misfit(layout, f"{run} is not a run of surefoot train {recipes}") from problem
    is_gpt2 = shape.family == "gpt2" and shape.tie_embeddings
    if is_gpt2 or (layout == "transformers" and shape.family == "llama"):
        return shape
    model = f"a model of the family {shape.family}"
    if shape.family == "gpt2":
        model += " with an untied head"
    theirs = "a GPT-2" if layout == "gpt2" else "a GPT-2 or a Llama"
    raise _layout_misfit(layout, f"{model} is not {theirs}")


def _tokenizer_of(run: Path) -> Tokenizer | None:
    path = run / "tokenizer.json"
    try:
        return from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (DataError, OSError, ValueError) as problem:
        raise CheckpointError(
            "run-file-damaged",
            problem=f"{path} is damaged",
            reason=first_line(problem),
            path=path,
            cause=error_as_json(problem),
        ) from problem
