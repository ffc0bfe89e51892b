"""The panels of a run that is there: those it wrote when it was over, or made anew by the program that made it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.building import built, of_run
from surefoot.cli.trained import checkpoint_of
from surefoot.config import flatten
from surefoot.errors import CheckpointError

if TYPE_CHECKING:
    from surefoot.panels import Panels


def panels_of(run_path: Path) -> Panels | None:
    """The panels of a run, computed with its best checkpoint, or the newest where none is best; writes nothing.

    None where the program that made it has no panels. Raises `SurefootError` where the run cannot be built again, its data
    cannot be read, or it has no intact checkpoint.
    """
    program, config = of_run(run_path, [], verb="surefoot report RUN")
    if config is not None and "out" in flatten(config):
        config = dataclasses.replace(config, out=str(run_path))  # whose tokenizer it is; nothing is opened or written
    run = built(program, config, of=run_path)
    if run.parts.panels is None:
        return None
    try:
        found = checkpoint_of(run_path, "best")
    except CheckpointError:  # none was watched, or that one is damaged
        found = checkpoint_of(run_path, "newest")
    run.load(found)
    return run.panels()
