"""The scores of a trained run batch by batch, kept beside it, from which differences between runs are taken."""

import math
from typing import Any

from surefoot.checkpoint import Store
from surefoot.compare.trained import Trained
from surefoot.errors import CheckpointError
from surefoot.run.run import Run

BATCHES = 128  # fewer of a small split; neighbours, which are alike, stay together in one
# relative, between a whole score and the mean of its batches: the passes may be in bf16, in other batch sizes
_CLOSE = 1e-3


def scores_by_batch(run: Run, trained: Trained) -> dict[str, Any]:
    """The watched score of each batch of its split, with the best checkpoint's weights and with the last ones, as JSON.

    `run` has the settings of the trained one and is given its weights. {"why": ...} in words where there can be none.
    """
    if trained.watch is None or run.parts.directory is None:
        return {"why": "no score is watched"}
    score, best = trained.watch[1], trained.best
    split = score.partition("/")[0]
    if best is None or trained.final is None or split not in run.parts.scoring.splits:
        return {"why": f"{score} was never scored"}
    store = Store(run.parts.directory.checkpoints)
    last = trained.scores[-1][0]
    found: dict[str, Any] = {"score": score, "split": run.parts.scored[split]}
    for kind, step, whole in (("final", last, trained.final), ("best", *best)):
        if kind == "best" and step == last:
            found["best"] = found["final"]
            continue
        try:
            for difference in run.load(store.at(step)):
                return {"why": f"its data are not those it was trained on: {difference}"}
        except CheckpointError:
            found[kind] = None  # not every run keeps its best
            continue
        with run.parts.numerics():
            means = run.parts.scoring.score_by_batch(score, batches=BATCHES)
        if means is None:
            return {"why": f"{score} is no mean over samples"}
        counts = [float(mean.count) for mean in means]
        total = math.fsum(float(mean.total) for mean in means)
        size = math.fsum(abs(float(mean.total)) for mean in means)  # near 0 where all are, not where signs differ
        if abs(total - whole * math.fsum(counts)) > _CLOSE * size:
            return {"why": f"{score} is no mean over samples"}
        if found.setdefault("counts", counts) != counts:
            return {"why": f"{score} counts other targets from one checkpoint to the next"}
        found[kind] = {"step": step, "means": [float(mean.value) for mean in means]}
    return found
