"""The process that trains one variant of a comparison: a run like any other, that ends with the process which started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.compare_plan import program_of
from surefoot.cli.main import answered
from surefoot.compare import plan as planned
from surefoot.config.toml import to_toml
from surefoot.config.tree import flatten, layered
from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.compare.plan import Planned
    from surefoot.run.run import Run
    from surefoot.tracking.run_directory import RunDirectory

_PATIENCE_S = 20.0


def command(what: str, directory: Path, name: str) -> list[str]:
    """The command line that does with a variant what `what` says: "train" it, or "look" at what it is built as."""
    own = [str(os.getpid()), sys.argv[0], what, str(directory.resolve()), name]
    return [sys.executable, "-m", "surefoot.cli.compare_worker", *own]


def what_building_tells(plan: Planned, directory: RunDirectory) -> dict[str, Any]:
    """What building one of the runs tells; where it cannot be built, this ends as that did, before anything is trained."""
    name = plan.names[0] if plan.names else "first"
    threads = {"OMP_NUM_THREADS": str(plan.threads), "MKL_NUM_THREADS": str(plan.threads)}
    with subprocess.Popen(
        command("look", directory.path, name),
        stdin=subprocess.PIPE,  # open as long as this process lives: see distributed/environment.py
        stdout=subprocess.PIPE,
        env=os.environ | threads,
        cwd=plan.started_in,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode if process.returncode > 0 else 128 - process.returncode)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def train(plan: Planned, directory: Path, name: str) -> None:
    """Train a variant, or go on with it; then score it batch by batch, and leave its result."""
    from surefoot.compare.batch_scores import scores_by_batch
    from surefoot.compare.trained import read_run
    from surefoot.compare.trials import Outcome, write_outcome
    from surefoot.tracking.run_directory import RunDirectory

    run = _built(plan, directory, name)
    _wait_until_free(directory / name)
    run.train()
    batches = scores_by_batch(run, read_run(directory / name, score=plan.score))
    write_outcome(RunDirectory(directory), name, Outcome("finished"), batches=batches)


def _wait_until_free(path: Path) -> None:
    """Give a variant that was killed a moment ago the time to be gone: a driver may hold a dead process for seconds."""
    from surefoot.tracking.run_directory import RunDirectory

    until = time.monotonic() + _PATIENCE_S
    while True:
        directory = RunDirectory(path)
        try:
            directory.open()
        except ConfigError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.1)
        else:
            directory.close()
            return


def look(plan: Planned, directory: Path, name: str) -> None:
    """Build a variant, and print as JSON what only that tells: its precision and whether it is compiled, its score, its splits."""
    from surefoot.train.auto_precision import settle_choices

    run = _built(plan, directory, name)
    auto = settle_choices(run.parts)
    watch = run.parts.whole.watch
    found = {
        "precision": run.parts.whole.precision.name,
        "score": None if watch is None else f"{watch.direction} {watch.score}",
        "splits": list(run.parts.scoring.splits),
        "compile": None if auto.compile is None else run.parts.compiled,
        "channels_last": True if run.parts.layout.channels_last else None,
        "chosen": auto.precision,
    }
    print(json.dumps({name: value for name, value in found.items() if value is not None}), flush=True)


def _built(plan: Planned, directory: Path, name: str) -> Run:
    """The run that a variant is, without what is for the end alone: who chooses between variants must not know that."""
    import torch

    torch.set_num_threads(plan.threads)
    program, kind = program_of(plan, run=directory / name)
    settings: dict[str, Any] = dict(plan.variant(name).settings) if name in plan.names else {}
    own = {**settings, "out": str(directory / name)}
    # one layer, not two: what another optimizer makes fall away fell away when this was planned
    config, origins = layered(kind, [("comparison", {**plan.base, **own})])
    kept = {
        key: "variant" if key in own else plan.origins.get(key, "default") if origin == "comparison" else origin
        for key, origin in origins.items()
    }
    run = program.run(config)
    # models of other sizes would choose otherwise, and then they would not be alike
    precision, described = run.parts.whole.precision, run.parts.described
    settled: dict[str, Any] = {}
    if precision.open and "precision" in plan.found:
        precision.settle(plan.found["precision"])
        run.parts.layout.settle(bool(plan.found.get("channels_last", False)))
        described["channels_last"] = run.parts.layout.channels_last
        settled["precision"] = described["precision"] = precision.name
    if run.parts.compiling.open and "compile" in plan.found:
        run.parts.compiling.settle(plan.found["compile"])
        settled["compile"] = described["compile"] = run.parts.compiled
    for setting, value in settled.items():
        if (values := flatten(config)).get(setting) == "auto":
            config, _ = layered(kind, [("comparison", {**values, setting: value})])
            kept[setting] = "auto"
    run.configuration = to_toml(config, kept, program.described)
    run.parts.scoring.leave_out_end()
    return run


def main() -> None:
    """`python -m surefoot.cli.compare_worker PARENT PROGRAM train|look DIRECTORY NAME`, as `command` writes it."""
    parent, typed, what, directory, name = sys.argv[1:]
    from surefoot.distributed.environment import die_with

    die_with(int(parent))
    sys.argv = [typed, "compare", directory]  # what goes on with it, for its environment.json and its messages

    def done() -> None:
        plan = planned.read(Path(directory))
        if plan is None:
            raise ConfigError(f"{directory} holds no {planned.FILE}")
        (look if what == "look" else train)(plan, Path(directory), name)

    answered(done, shown=False)


if __name__ == "__main__":
    main()
