"""Run directories of behavior 1, as commit 9ef75382 wrote them: `runs_of_behavior_1/`.

`own` is a run of a script: an average of the weights, batch normalization, and buffers that are no
statistics. Its arithmetic is exact (small multiples of powers of two, in float64), so that it has
the same bits on every machine. `gpt` and `images` are runs of recipes over the texts and pictures
in `inputs`: a tokenizer trained on the text; pictures with an orientation, 16 bits, a palette and
transparency. Each run was stopped in its middle. `ends` has the last checkpoint of each, after a
copy of the run was resumed.

    PYTHONPATH=CLONE_OF_9EF75382/src python tests/golden/runs_of_behavior_1.py OUT
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.cli import main as command_line

sys.path.insert(0, str(Path(__file__).parent))
from run_of_0_1_0 import forget_the_machine

STORED = Path(__file__).with_suffix("")
STEPS = {"own": 8, "gpt": 8, "images": 8}
GPT = (
    *("gpt", "--data.path=inputs/text", "--data.vocab-size=270", "--data.cache=False"),
    *("--model.layers=1", "--model.width=16", "--model.heads=2", "--model.context=8"),
    *("--model.ngrams=1", "--model.smear=False", "--optimizer.name=adamw", "--optimizer.lr=0.01"),
    *("--batch-size=4", "--length=8 steps", "--ema=0.9", "--schedule.warmup=2 steps"),
)
IMAGES = (
    *("images", "--data.path=inputs/pictures", "--data.size=8", "--data.channels=3"),
    *("--model.width=2", "--batch-size=4", "--length=8 steps", "--ema=0.9"),
    *("--schedule.warmup=2 steps", "--channels-last=False"),
)
FLAGS = (
    *(
        "--log-every=1 steps",
        "--save-every=2 steps",
        "--evaluate-every=4 steps",
        "--precision=fp32",
    ),
    *("--device=cpu", "--tensorboard=False", "--report=False", "--compile=False"),
)


class Net(nn.Module):
    """Batch normalization and a trained layer; a queue, its position, a counter and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, eps=1e-300, momentum=0.5).double()
        self.head = nn.Linear(2, 1).double()
        self.register_buffer("queue", torch.zeros(8, 2, dtype=torch.float64))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[1.0, -1.0]]))
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            at = int(self.position)
            self.queue[at : at + 2] = x[:2]
            self.position.copy_((self.position + 2) % 8)
            self.passes += 1
            self.begun.fill_(True)
        outputs: Tensor = self.head(self.norm(x))
        return outputs


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def rows() -> Tensor:
    """Rows whose pairs differ by powers of two, so that a norm over two of them is exact."""
    lower = [(float(index % 4), float(index % 3)) for index in range(8)]
    pairs = []
    for index, (a, b) in enumerate(lower):
        pairs += [(a, b), (a + 2.0 ** (index % 3), b - 2.0 ** (index % 2))]
    return torch.tensor(pairs, dtype=torch.float64)


def build(run_dir: Path | str | None, **settings: Any) -> sf.Run:
    x = rows()
    y = x.sum(dim=1, keepdim=True)
    fixed: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": (x, y),
        "splits": {"val": sf.Split((x[:4], y[:4]))},
        "optimizer": sf.optim.sgd(lr=2**-4, momentum=0.5),
        "ema": 0.5,
        "length": f"{STEPS['own']} steps",
        "batch_size": 4,
        "micro_batch_size": 2,
        "order": "sequential",
        "device": "cpu",
        "console": False,
        "tensorboard": False,
        "report": False,
        "log_every": "1 step",
        "save_every": "2 steps",
        "evaluate_every": "2 steps",
        "run_dir": run_dir,
    }
    return sf.Run(**(fixed | settings))


def write_inputs(directory: Path) -> None:
    """Write eight short documents, and twelve pictures of two classes."""
    from PIL import Image

    (directory / "text").mkdir(parents=True)
    for index in range(8):
        lines = [
            f"line {row} of document {index}: {row * index % 7} and {row + index}"
            for row in range(12)
        ]
        (directory / "text" / f"{index}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    generator = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 170)):
        folder = directory / "pictures" / name
        folder.mkdir(parents=True)
        for index in range(12):
            pixels = generator.integers(level, level + 60, (10, 8, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels)
            if index == 0:  # stored turned by a quarter, as telephones do
                exif = Image.Exif()
                exif[0x0112] = 6
                picture.save(folder / "orientation.jpg", quality=95, exif=exif)
            elif index == 1:
                wide = pixels[..., 0].astype(np.uint16) * 257
                Image.fromarray(wide).save(folder / "sixteen-bits.png")
            elif index == 2:
                picture.convert("P", palette=Image.Palette.ADAPTIVE).save(folder / "palette.png")
            elif index == 3:
                picture.putalpha(128)
                picture.save(folder / "transparent.png")
            else:
                picture.save(folder / f"{index}.png")


def command(*words: str) -> None:
    try:
        command_line.main(list(words))
    except SystemExit as ended:
        if ended.code:
            raise


def clear(run: Path) -> None:
    """Leave only what a later session reads."""
    for name in ("report.html", ".lock"):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / "logs", ignore_errors=True)
    forget_the_machine(run / "environment.json")


def main(out: Path) -> None:
    out = out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.chdir(out)
    torch.set_num_threads(1)
    write_inputs(out / "inputs")
    half = "--stop-after=4 steps"
    build("own", stop_after="4 steps").train()
    command("train", *GPT, *FLAGS, half, "--run-dir=gpt")
    command("train", *IMAGES, *FLAGS, half, "--run-dir=images")
    for name, steps in STEPS.items():
        shutil.copytree(out / name, out / "whole" / name)
        if name == "own":
            build(out / "whole" / name).train()
        else:
            command("resume", str(out / "whole" / name), "--stop-after", f"{steps} steps")
        last = out / "whole" / name / "checkpoints" / f"step-{steps:08d}"
        (out / "ends").mkdir(exist_ok=True)
        shutil.copytree(last, out / "ends" / name)
        shutil.copy(out / "whole" / name / "metrics.jsonl", out / "ends" / f"{name}.jsonl")
        clear(out / name)
    shutil.rmtree(out / "whole")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
