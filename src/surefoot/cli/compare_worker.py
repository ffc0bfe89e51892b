"""The process that trains one variant of a comparison and evaluates it batch by batch. It ends with
its parent process.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint import Store
from surefoot.cli.compare_plan import program_of
from surefoot.cli.main import run_or_exit
from surefoot.config.tree import layered
from surefoot.distributed.environment import die_with
from surefoot.errors import CheckpointError
from surefoot.run.run import Run
from surefoot.tools.compare import plan as planned
from surefoot.tools.compare.resampling import resampled_scores
from surefoot.tools.compare.trained import Trained, read_run
from surefoot.tools.compare.trials import TrialOutcome, with_threads, write_outcome
from surefoot.tracking.run_directory import RunDirectory
from surefoot.tracking.run_reader import is_running
from surefoot.train.evaluate import means_by_batch
from surefoot.train.scorer import Evaluator

_PATIENCE_S = 20.0
BATCHES = 128  # fewer for a small split; adjacent samples, which are similar, share a batch
# relative tolerance between a score and the mean of its batches: bf16 and batch sizes change
# rounding
_CLOSE = 1e-3


def command(what: str, directory: Path, name: str) -> list[str]:
    """Return the worker's command line. `what` is "train", or "look" to build the variant without
    training it.
    """
    worker = [sys.executable, "-m", "surefoot.cli.compare_worker"]
    return [*worker, str(os.getpid()), sys.argv[0], what, str(directory.resolve()), name]


def build_facts(plan: planned.Planned, directory: RunDirectory) -> dict[str, Any]:
    """Build a variant in a worker and return its facts. If the build fails, exit with the worker's
    status before any training.
    """
    name = plan.names[0] if plan.names else "first"
    with subprocess.Popen(
        command("look", directory.path, name),
        # stays open during this process's life: see distributed/environment.py
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_threads(plan.threads),
        cwd=plan.started_in,
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode > 0:
        sys.exit(process.returncode)
    if process.returncode < 0:  # a signal
        sys.exit(128 - process.returncode)
    return dict(json.loads(printed.splitlines()[-1]))


def train(plan: planned.Planned, directory: Path, name: str) -> None:
    """Train or resume a variant, evaluate it batch by batch, and write its outcome."""
    run = build_variant(plan, directory, name)
    _wait_until_free(directory / name)
    run.train()
    trained = read_run(directory / name, metric=plan.metric)
    groups = {variant.name: variant.group for variant in plan.variants}
    repeats = Counter(groups.values())
    is_repeated = name in groups and repeats[groups[name]] > 1
    batches = scores_by_batch(run, trained, draws=is_repeated)
    write_outcome(RunDirectory(directory), name, TrialOutcome("finished"), batches=batches)


def scores_by_batch(run: Run, trained: Trained, *, draws: bool) -> dict[str, Any]:
    """Return the monitored score of each batch for the best checkpoint, or {"why": reason}. With
    `draws`, a score that is not a mean over samples is computed of resampled splits instead.
    """
    if trained.watch is None or run.parts.directory is None:
        return {"why": "no metric is monitored"}
    score = trained.watch[1]
    split = score.partition("/")[0]
    if trained.best is None or split not in run.parts.evaluator.splits:
        return {"why": f"{score} was never evaluated"}
    step, expected = trained.best
    scores: dict[str, Any] = {
        "score": score,
        "split": run.parts.plan.splits[split],
        "best": None,
        "final": {"step": trained.scores[-1][0]},
    }
    try:
        for difference in run.load_checkpoint(Store(run.parts.directory.checkpoints).at(step)):
            return {"why": f"its data set has changed: {difference}"}
    except CheckpointError:
        return scores  # the run may not keep its best checkpoint
    with run.parts.numerics():
        counts, measured = _by_batch(run.parts.evaluator, score, expected, draws=draws)
    if isinstance(measured, str):
        return {"why": f"{score} {measured}"}
    return scores | {"counts": counts, "best": {"step": step, **measured}}


def _by_batch(
    evaluator: Evaluator, score: str, expected: float, *, draws: bool
) -> tuple[list[float], dict[str, list[float]] | str]:
    """Return the counts of batches, and their means, or scores of resampled splits, or why there
    are none.
    """
    split, _, metric = score.partition("/")
    batches = evaluator.results_by_batch(split, batches=BATCHES)
    means = means_by_batch(batches, metric)
    if means is not None:
        counts = [float(mean.count) for mean in means]
        totals = [float(mean.total) for mean in means]
        # relative to the sum of absolute values, because opposite signs cancel in the plain sum
        error = abs(math.fsum(totals) - expected * math.fsum(counts))
        if error <= _CLOSE * math.fsum(map(abs, totals)):
            return counts, {"means": [float(mean.value_or(0.0)) for mean in means]}

    if not draws:
        return [], "is not a mean over samples"

    def score_of(chosen: Sequence[int]) -> float:
        return evaluator.score_of(split, metric, [batches[index] for index in chosen])

    counts = [float(results.samples) for results in batches]
    resampled = resampled_scores(score_of, batches=len(batches), expected=expected)
    if isinstance(resampled, str):
        return counts, resampled
    return counts, {"resampled": resampled}


def _wait_until_free(path: Path) -> None:
    # a driver may keep a killed process alive for seconds
    until = time.monotonic() + _PATIENCE_S
    while is_running(path) and time.monotonic() < until:
        time.sleep(0.1)


def look(plan: planned.Planned, directory: Path, name: str) -> None:
    """Build a variant and print as JSON the facts that only its program knows: precision, monitored
    metric, splits.
    """
    run = build_variant(plan, directory, name)
    run_plan = run.parts.plan
    monitored = [watch.text for watch in run.parts.run_state.watches if not watch.of_training]
    facts: dict[str, Any] = {"precision": run_plan.precision}
    if monitored:
        facts["score"] = monitored[0]
    facts["splits"] = list(run.parts.evaluator.splits)
    if run_plan.reasons.compile is not None:
        facts["compile"] = run_plan.compiles
    if run_plan.channels_last:
        facts["channels_last"] = True
    if run_plan.reasons.precision is not None:
        facts["chosen"] = run_plan.reasons.precision
    print(json.dumps(facts), flush=True)


def build_variant(plan: planned.Planned, directory: Path, name: str) -> Run:
    """Return the run of a variant without end-of-run splits, which must not influence the choice
    between variants.
    """
    torch.set_num_threads(plan.threads)
    program, kind = program_of(plan, run=directory / name)
    of_variant = {"run_dir": str(directory / name)}
    for variant in plan.variants:
        if variant.name == name:
            of_variant = {**variant.settings, **of_variant}
    # a single layer: the plan has already dropped settings of other optimizers
    settings = {**plan.base, **of_variant}
    # models of other sizes could choose differently, so all variants use the plan's choices
    chosen = {name: value for name, value in plan.settled.items() if settings[name] == "auto"}
    if "precision" in chosen and settings.get("channels_last") == "auto":
        chosen["channels_last"] = bool(plan.found.get("channels_last"))
    settings |= chosen
    config, origins = layered(kind, [("comparison", settings)])
    config_origins = {}
    for key, origin in origins.items():
        if key in chosen:
            config_origins[key] = "auto"
        elif key in of_variant:
            config_origins[key] = "variant"
        elif origin == "comparison":
            config_origins[key] = plan.origins.get(key, "default")
        else:
            config_origins[key] = origin
    run = program.run(config)
    run.configuration = program.config_text(config, config_origins, program.described)
    run.parts.evaluator.leave_out_end()
    return run


def main() -> None:
    """Be the process of one variant. The arguments are the parent's process id, the typed command,
    train or look, directory and variant.
    """
    parent, typed, what, directory, name = sys.argv[1:]
    die_with(int(parent))
    # the command that resumes the run, for environment.json and messages
    sys.argv = [typed, "compare", directory]

    def work() -> None:
        plan = planned.read(Path(directory))
        assert plan is not None  # written before the process is started
        if what == "look":
            look(plan, Path(directory), name)
        else:
            train(plan, Path(directory), name)

    run_or_exit(work, with_traceback=False)


if __name__ == "__main__":
    main()
