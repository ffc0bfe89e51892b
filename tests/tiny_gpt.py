"""Settings of a gpt run of four steps, whose model is as small as can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.config.tree import layered
from surefoot.recipes import gpt


def tiny_config(path: Path, tokenizer: str | None = "bytes", **changes: Any) -> gpt.Config:
    """A run on the files of `path`, whose last 30 percent are for validation."""
    settings: dict[str, Any] = {
        "run_dir": None,
        "length": "4 steps",
        "evaluate_every": "4 steps",
        "data.path": str(path),
        "data.tokenizer": tokenizer,
        "data.vocab_size": None,
        "data.val_fraction": 0.3,
        "model.layers": 1,
        "model.width": 16,
        "model.heads": 2,
        "model.context": 8,
        "sample_tokens": 0,
        "cloze_questions": 0,
        "report": False,
    }
    config, _ = layered(gpt.Config, [("test", settings | changes)])
    return config
