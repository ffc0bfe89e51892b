"""Runs whose layers are watched, on any number of ranks: their weights, and the records that rank 0
keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import surefoot as sf
from identities import strategy_runs, world_runs


class Net(strategy_runs.Net):
    """With an activation that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = nn.Tanh()

    def forward(self, inputs: Any) -> Any:
        logits, mask = super().forward(inputs)
        return self.bend(logits) * 3, mask


def watched(
    *, layer_stats_every: str | None, sharding: Any = None, **changes: Any
) -> dict[str, Any]:
    """What a run comes to of which every step is watched, or none."""
    if sharding is not None:
        changes["parallel"] = sf.fsdp(**sharding)
    settings = {
        "model": Net,
        "steps": 3,
        "bad": 97,
        "layer_stats_every": layer_stats_every,
        "log_every": "1 steps",
    }
    run = world_runs.built(**(settings | changes))
    kept: list[Any] = []
    with run:
        assert run.session is not None
        run.session.journal.sinks.append(world_runs.Kept(kept))
        for _ in run:
            pass
    return {
        "weights": world_runs.weights(run),
        "layers": [record for record in kept if record["kind"] == "layer_stats"],
        "seen": sorted(run.parts.run_state.updated_parameters),
    }


def of_example(*, name: str, run_dir: str, **changes: Any) -> dict[str, Any]:
    """As `world_runs.of_example`, with the records."""
    from surefoot.tracking.jsonl import records

    weights = world_runs.of_example(name=name, run_dir=run_dir, **changes)
    return {"weights": weights, "records": records(Path(run_dir) / "metrics.jsonl")}
