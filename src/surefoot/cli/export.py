"""`surefoot export RUN`: the weights of a run in files for other programs."""

import sys
from dataclasses import dataclass
from typing import Literal

from surefoot.cli.options import RunOption, find_run, only_options
from surefoot.saved_run import SavedRun


@dataclass(frozen=True, kw_only=True)
class Export(RunOption):
    """Verify a checkpoint and write its weights as safetensors for other programs,
    with at most one tensor in memory. Sharded weights are joined. Averaged weights
    are exported if the run has them. The run's tokenizers are copied.

      surefoot export runs/mine
      surefoot export runs/mine --checkpoint best --layout transformers --out mine
      surefoot export runs/finetune --layout peft
    """

    checkpoint: str = "newest"
    """Checkpoint to export: newest, best, or a step."""
    out: str | None = None
    """Output directory. Default: export/ in the run's directory."""
    weights: Literal["auto", "averaged", "trained"] = "auto"
    """auto exports averaged weights if the run has them, else the trained weights."""
    layout: Literal["auto", "native", "gpt2", "transformers", "peft"] = "auto"
    """Files to write: native keeps parameter names. transformers writes a directory for
    transformers, with the tokenizer: of finetune runs, with the adapter merged into the weights,
    and of gpt runs with --model.family llama or gpt2. gpt2 is the latter with the tokenizer's file
    as it is. For every run that trained a model of peft, peft writes the adapter alone. By default
    (auto), finetune runs have the layout transformers, and others native."""
    max_file: str = "5 GB"
    """Maximum file size. A larger export is split into several files with an index."""
    model: str = "model"
    """Model to export if the run has several."""


def export(arguments: list[str]) -> None:
    """Run `surefoot export`: write the weights of a checkpoint in a layout of other programs."""
    options = only_options(Export, arguments, verb="export")
    done = SavedRun(find_run(options.run)).export(
        options.out,
        checkpoint=options.checkpoint,
        weights=options.weights,
        layout=options.layout,
        max_file=options.max_file,
        model=options.model,
    )
    for damage in done.damaged:
        print(f"warning: {damage}", file=sys.stderr)
    print(done)
