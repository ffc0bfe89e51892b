"""The process that trains one variant of a comparison: a run like any other, that ends with the process which started it."""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.cli import programs
from surefoot.cli.main import answered
from surefoot.config import layered, to_toml
from surefoot.errors import ConfigError
from surefoot.tune import planned


def command(name: str, directory: Path) -> list[str]:
    """The command line that trains the variant of that name."""
    import os

    own = [str(os.getpid()), sys.argv[0], str(directory.resolve()), name]
    return [sys.executable, "-m", "surefoot.cli.variant", *own]


def train(directory: Path, name: str) -> None:
    """Train a variant, or go on with it; then score it batch by batch, and leave its result."""
    plan = planned.read(directory)
    if plan is None:
        raise ConfigError(f"{directory} holds no {planned.FILE}")
    import torch

    from surefoot.directory import RunDirectory
    from surefoot.tune.batches import scores_by_batch
    from surefoot.tune.trained import read_run
    from surefoot.tune.trials import Outcome, write_outcome

    torch.set_num_threads(plan.threads)
    program = programs.again(dict(plan.program), run=directory / name)
    if program.config is None:
        raise ConfigError(f"{plan.program} takes no settings, so it has no variants")
    variant = plan.variant(name)
    own = {**variant.settings, "out": str(directory / name)}
    shared = {setting: value for setting, value in plan.base.items() if setting not in own}
    config, origins = layered(program.config, [("comparison", shared), ("variant", own)])
    kept = {
        setting: plan.origins.get(setting, "") if origin == "comparison" else origin
        for setting, origin in origins.items()
    }
    run = program.run(config)
    run.configuration = to_toml(config, kept, program.described)
    run.parts.scoring.leave_out_end()  # who chooses between variants must not know how they do on the test split
    run.train()
    batches = scores_by_batch(run, read_run(directory / name, score=plan.score))
    write_outcome(RunDirectory(directory), name, Outcome("finished"), batches=batches)


def main() -> None:
    """`python -m surefoot.cli.variant PARENT PROGRAM DIRECTORY NAME`, as `command` writes it."""
    parent, typed, directory, name = sys.argv[1:]
    from surefoot.tune.tether import die_with

    die_with(int(parent))
    sys.argv = [typed, "compare", directory]  # what goes on with it, for its environment.json and its messages
    answered(lambda: train(Path(directory), name), shown=False)


if __name__ == "__main__":
    main()
