"""Directories of runs that nobody trained: records, settings and sessions, written as a run writes
them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from surefoot.checkpoint.state_json import SavedState, hints_of
from surefoot.tracking.jsonl import line
from surefoot.tracking.panels import Example, Examples, TextHeatmap
from surefoot.tracking.panels_file import Panels

HOSTILE = (
    '</pre></style><script>alert("1")</script><img src=x onerror=alert(2)> & \x1b[31m \x00 \ud800'
)
CONFIG = """absent = ["ema"]
seed = 3 # flag
length = "600 steps" # preset
clip = "norm 1.0" # default
[optimizer]
lr = 0.003 # file
[program]
kind = "recipe"
recipe = "gpt"
"""
SESSION = {
    "time": "2026-01-02T03:04:05+0000",
    "python": "3.11.7",
    "command": ["surefoot", "train", "gpt", "--seed", "3", "--run-dir", "runs/a b"],
    "directory": "/home/me",
    "git_commit": "0123456789abcdef",
    "count_unit": "tokens",
    "machine": {"torch": "2.13.0", "device": "cpu", "hardware": "x86_64", "threads": 2},
}


def written(
    path: Path, records: list[dict[str, Any]], *, config: str | None = None, **session: Any
) -> Path:
    """A run's directory with these records; of an environment where a session is given."""
    path.mkdir(parents=True)
    lines = [
        line(record) if "nonfinite" not in record else json.dumps(record) for record in records
    ]
    (path / "metrics.jsonl").write_text("".join(f"{text}\n" for text in lines), errors="replace")
    if config is not None:
        (path / "config.toml").write_text(config)
    if session:
        (path / "environment.json").write_text(json.dumps({"sessions": [session]}))
    return path


def state_json(*, length: str = "600 steps") -> dict[str, Any]:
    """The state of a checkpoint of a run without models."""
    machine = {
        **dict.fromkeys(("surefoot", "torch", "device", "hardware", "cpu", "parallel"), ""),
        "threads": 1,
        "deterministic": False,
        "ranks": 1,
    }
    identity = {
        "compile": False,
        "data": {},
        "length": length,
        "precision": "fp32",
        "schedule_of_steps": 600,
        "seed": 0,
        "identity": {},
    }
    fingerprints: dict[str, Any] = {
        "machine": machine,
        "format": "fp32",
        "samples": {},
        "splits": {},
        "micro_batch": None,
        "loss": None,
        "draws": False,
        "failed": False,
        "sources": {name: {} for name in ("loss", "model", "collate", "data", "optimizer")},
        "accepted": [],
        "not_looked_into": [],
    }
    state: dict[str, Any] = {name: {} for name in hints_of(SavedState)}
    state |= {
        "identity": identity,
        "machine": machine,
        "fingerprints": fingerprints,
        "monitor": None,
        "plateau": None,
        "epoch": None,
    }
    state |= dict.fromkeys(("evaluation_due", "ended", "stopped_early"), False)
    state |= {
        "trainable": {"frozen": [], "in_no_optimizer": []},
        "skipped_in_a_row": [0],
        "seen": [],
        "runners_up": [],
        "stopping": [],
    }
    return state | {"clock": {"total_s": {}, "window_s": {}, "first_steps": []}}


def train(step: int, loss: float = 2.0, **values: Any) -> dict[str, Any]:
    """A record of training."""
    return {"kind": "train", "step": step, "loss": loss, "skipped": 0, **values}


def scores(step: int, **values: float) -> dict[str, Any]:
    """A record of scores of the split "val"."""
    return {
        "kind": "eval",
        "step": step,
        **{f"val/{name}": value for name, value in values.items()},
    }


def falling(steps: int, *, every: int = 10, **values: Any) -> list[dict[str, Any]]:
    """Records of a run whose loss falls from 3 towards 1, scored every five records; `values` are
    in each of training.
    """
    found = []
    for step in range(every, steps + 1, every):
        loss = 1 + 2 * math.exp(-3 * step / steps)
        rate = 1e-3 * (1 - step / steps)
        times = {
            "training_s": 0.8,
            "data_wait_s": 0.1,
            "evaluating_s": 0.05,
            "saving_s": 0.03,
            "user_s": 0.02,
        }
        more = {
            "grad_norm": 0.5,
            "grad_norm_max": 0.9,
            "clip_fraction": 0.25,
            "lr": rate,
            "targets": 640.0,
        }
        found.append(
            train(
                step,
                loss,
                targets_per_s=711.0,
                host_memory_bytes=3 * 2**30,
                **more,
                **times,
                **values,
            )
        )
        if step % (5 * every) == 0:
            found.append(scores(step, loss=loss + 0.1, accuracy=1 - loss / 3))
    return found


def layers(
    step: int, names: tuple[str, ...] = ("up.weight", "down.weight"), **changes: Any
) -> dict[str, Any]:
    """A record of a watched step."""
    return {
        "kind": "layer_stats",
        "step": step,
        "measured_step": step - 1,
        "grad_norm": {name: 0.1 * (place + 1) for place, name in enumerate(names)},
        "weight_norm": dict.fromkeys(names, 10.0),
        "update_norm": dict.fromkeys(names, 0.01),
        "saturated_fraction": {"act": 0.5},
        "never_updated": [],
        **changes,
    }


def rich_run(path: Path) -> Path:
    """A run that has everything a page can show."""
    told: list[dict[str, Any]] = [{"kind": "resume", "step": 0}]
    for record in falling(600, memory=1.5):
        told.append(record)
        if record["kind"] == "train" and record["step"] % 100 == 0:
            told.append(layers(record["step"], never_updated=["head.bias"]))
    told += [
        {"kind": "sample", "step": 300, "text": "so it goes"},
        {"kind": "sample", "step": 600, "text": "as ever"},
    ]
    told += [{"kind": "final_eval", "step": 600, "weights_step": 550, "test/loss": 1.25}]
    told += [{"kind": "event", "step": 600, "event": "finished"}]
    run = written(path, told, config=CONFIG, **SESSION)
    text = TextHeatmap(
        title="Held-out text", legend="loss", unit="nats", pieces=(("one", None), (" two", 3.0))
    )
    pairs = Examples(
        title="Pairs",
        legend="BLEU",
        examples=(
            Example(source="cat", reference="Katze", output="Hund", score=None, group="worst"),
        ),
    )
    (run / "panels.json").write_text(Panels(step=550, panels=(text, pairs)).to_json())
    return run
