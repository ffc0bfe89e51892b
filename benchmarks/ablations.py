"""What settings of the presets `fashion-mnist` and `multi30k-fast` win or lose: the preset with one
setting changed, at equal steps.

    python benchmarks/ablations.py images --data DIR [--steps 211] [--only NAME ...]
    python benchmarks/ablations.py translation --data DIR [--steps 100] [--only NAME ...]

Scored is a part held out of the training data: 6,000 images, 3 % of the pairs by a hash of the
source (300 of them); the files for validation and test are not read. Each row is one seed:
differences of 0.3 % of accuracy, or of 0.02 nats, say little. ms are of the process's own CPU time
for a step, so that they can be read on a busy machine too.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import process_time
from typing import Any

import torch

import surefoot as sf
from surefoot.config.tree import layered
from surefoot.recipes import images, translation

Changes = dict[str, Any]

_ADAMW: Changes = {"optimizer.name": "adamw", "optimizer.lr": 3e-3, "optimizer.weight_decay": 0.1}
_32: Changes = {"model.width": 32}
IMAGES: dict[str, Changes] = {
    "as it is": {},
    "width 64": {"model.width": 64},
    "width 32": _32,
    "width 32, adamw 3e-3, cosine": {**_32, **_ADAMW, "schedule.name": "cosine"},
    "width 32, rate 1e-2": {**_32, "optimizer.lr": 1e-2},
    "width 32, rate 4e-2": {**_32, "optimizer.lr": 4e-2},
    "width 32, cosine": {**_32, "schedule.name": "cosine"},
    "width 32, no smoothing": {**_32, "label_smoothing": 0.0},
    "width 32, no crop, no flip": {
        **_32,
        "augmentation.crop_padding": 0,
        "augmentation.flip": False,
    },
}
_SMOOTHED: Changes = {"label_smoothing": 0.1}
_SLOW: Changes = {**_SMOOTHED, "optimizer.lr": 1e-2}
TRANSLATION: dict[str, Changes] = {
    "as it is": {},
    "smoothing 0.1": _SMOOTHED,
    "smoothing 0.1, adamw 4e-3, cosine": {
        **_SMOOTHED,
        "optimizer.name": "adamw",
        "optimizer.lr": 4e-3,
        "schedule.name": "cosine",
    },
    "smoothing 0.1, squared relu": {**_SMOOTHED, "model.activation": "relu2"},
    "smoothing 0.1, rate 1e-2": _SLOW,
    "smoothing 0.1, rate 1e-2, squared relu": {**_SLOW, "model.activation": "relu2"},
    "smoothing 0.1, rate 1e-2, rotary positions": {**_SLOW, "model.positions": "rotary"},
    "rate 3e-2": {"optimizer.lr": 3e-2},
    "blocks start at zero": {"model.zero_init_residual": True},
    "rms norms": {"model.norm": "rms"},
    "queries and keys normed": {"model.qk_norm": True},
}


def of_images(data: str, changes: Changes, *, steps: int) -> str:
    """The preset with changes after so many steps, as a row."""
    asked: Changes = {
        "data.path": data,
        "length": f"{steps} steps",
        "evaluate_every": "100%",
        "run_dir": None,
    }
    asked["precision"] = "bf16"
    config = layered(
        images.Config, [("preset", images.PRESETS["fashion-mnist"]), ("ablation", asked | changes)]
    )[0]
    spent_s, run = trained(images.build(config), steps=steps)
    scores = run.evaluate("val")
    return f"loss {scores['val/loss']:.4f}  accuracy {scores['val/accuracy']:.4f}  {1e3 * spent_s / steps:6.1f} ms a step"


def of_translation(data: str, changes: Changes, *, steps: int) -> str:
    """The preset with changes after so many steps of 2,048 tokens, as a row; `data` has a training
    part only.
    """
    asked: Changes = {
        "data.path": data,
        "length": f"{steps} steps",
        "evaluate_every": "100%",
        "run_dir": None,
    }
    asked |= {"precision": "bf16", "val_pairs": 300}
    layers = [("preset", translation.PRESETS["multi30k-fast"]), ("ablation", asked | changes)]
    spent_s, run = trained(translation.build(layered(translation.Config, layers)[0]), steps=steps)
    scores = run.evaluate("val")
    return f"loss {scores['val/loss']:.4f}  BLEU {scores['val/bleu']:5.2f}  {1e3 * spent_s / steps:6.1f} ms a step"


def trained(run: sf.Run, *, steps: int) -> tuple[float, sf.Run]:
    """Seconds of CPU time that all steps but the first took, and the run, not yet scored."""
    begun = 0.0
    with run:
        for _ in run:
            if run.state.step == 1:
                begun = process_time()
            if run.state.step == steps:
                break
    return (process_time() - begun) * steps / (steps - 1), run


def without_other_parts(data: str, directory: Path) -> str:
    """The training part of parallel files, alone in a directory."""
    pairs = sf.data.load_pairs(data).train
    for language, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (directory / f"train.{language}").write_text(
            "".join(f"{line}\n" for line in side), newline="\n"
        )
    return str(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("recipe", choices=["images", "translation"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="+", help="rows by their names")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    variants = IMAGES if asked.recipe == "images" else TRANSLATION
    steps = asked.steps or (211 if asked.recipe == "images" else 100)
    print(
        f"{asked.recipe}: {steps} steps, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        data = (
            asked.data
            if asked.recipe == "images"
            else without_other_parts(asked.data, Path(directory))
        )
        row = of_images if asked.recipe == "images" else of_translation
        for name in asked.only or variants:
            with redirect_stdout(StringIO()):
                told = row(data, variants[name], steps=steps)
            print(f"{name:44s} {told}", flush=True)


if __name__ == "__main__":
    main()
