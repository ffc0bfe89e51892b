"""`surefoot export RUN`: the weights of a run in files that others load."""

import sys
from dataclasses import dataclass
from typing import Literal

from surefoot.cli.options import RunOption, find_run, only_options
from surefoot.saved_run import SavedRun


@dataclass(frozen=True, kw_only=True)
class Export(RunOption):
    """Write the weights of a checkpoint as safetensors that others load, checked first,
    never more than one tensor in memory. A run that was made by several ranks becomes
    whole. Averaged weights are taken where the run has them. Tokenizers of the run
    are copied along.

      surefoot export runs/mine
      surefoot export runs/mine --checkpoint best --layout gpt2 --out mine
    """

    checkpoint: str = "newest"
    """newest, best, or that of a step."""
    out: str | None = None
    """Directory. Absent: export/ in the run's directory."""
    weights: Literal["auto", "averaged", "trained"] = "auto"
    """auto is averaged where the run has such."""
    layout: Literal["own", "gpt2"] = "own"
    """own: the model's names. gpt2: named and turned as transformers' GPT2LMHeadModel loads them, with config.json; for runs of
    gpt with --model.family gpt2."""
    max_file: str = "5 GB"
    """More than this is several files and an index."""
    model: str = "model"
    """Of a run of several models, which."""


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
