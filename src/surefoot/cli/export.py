"""`surefoot export RUN`: the weights of a run in files that others load."""

import sys
from dataclasses import dataclass
from typing import Literal

from surefoot.cli.options import RunOption, find_run, only_options
from surefoot.saved_run import SavedRun


@dataclass(frozen=True, kw_only=True)
class Export(RunOption):
    """Write the weights of a checkpoint as safetensors for other programs, checked
    first, with at most one tensor in memory. Weights spread over several ranks are
    joined. Averaged weights are taken if the run has them. Tokenizers of the run
    are copied.

      surefoot export runs/mine
      surefoot export runs/mine --checkpoint best --layout gpt2 --out mine
    """

    checkpoint: str = "newest"
    """newest, best, or a step."""
    out: str | None = None
    """Directory. Default: export/ in the run's directory."""
    weights: Literal["auto", "averaged", "trained"] = "auto"
    """auto is averaged if the run has averaged weights."""
    layout: Literal["native", "gpt2"] = "native"
    """native keeps the model's names. gpt2 writes what transformers' GPT2LMHeadModel loads, with config.json, for gpt runs
    with --model.family gpt2."""
    max_file: str = "5 GB"
    """Larger exports are several files and an index."""
    model: str = "model"
    """Name of the model, if the run has several."""


def export(arguments: list[str]) -> None:
    """Write the weights of a run in another library's layout."""
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
