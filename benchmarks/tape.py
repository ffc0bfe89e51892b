"""What a step costs whose rows come from a tape, beside a step whose rows lie in a list.

    python benchmarks/tape.py [--seconds 20] [--of tiny,tokens,images]

Both runs train side by side in one process and one thread. Printed is the CPU time of the process,
and the CPU time of the process that reads the source, per row. `tiny` rows are 32 numbers, `tokens`
129 integers, `images` 12 kB.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from loops.alternating import paired_seconds, ratio_text
from loops.conditions import reported
from torch import Tensor, nn

import surefoot as sf

BATCH, STRETCH = 32, 25  # rows of a step, steps of a stretch
Rows = list[tuple[Tensor, int]]


def rows(inputs: Tensor) -> Rows:
    return [(row, index % 10) for index, row in enumerate(inputs)]


CASES: dict[str, tuple[Callable[[], Rows], Callable[[], nn.Module]]] = {
    "tiny": (
        lambda: rows(torch.randn(8192, 32)),
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
    ),
    "tokens": (
        lambda: rows(torch.randint(256, (8192, 129))),
        lambda: nn.Sequential(nn.EmbeddingBag(256, 64), nn.Linear(64, 10)),
    ),
    "images": (
        lambda: rows(torch.randint(256, (2048, 3, 64, 64), dtype=torch.uint8)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 10)),
    ),
}


def loss(model: Any, batch: Any) -> Tensor:
    inputs = batch[0].float() / 255 if batch[0].dtype == torch.uint8 else batch[0]
    return F.cross_entropy(model(inputs), batch[1])


def training(case: str, run_dir: Path, *, from_tape: bool) -> Iterator[None]:
    """A run whose next step is made when it is asked for."""
    build_rows, model = CASES[case]
    listed = build_rows()

    def source() -> Iterator[tuple[Tensor, int]]:
        while True:
            yield from listed

    run = sf.Run(
        model=model,
        loss=loss,
        train_data=sf.data.Stream(source, tape_size="200 MB") if from_tape else listed,
        order=None if from_tape else "sequential",
        batch_size=BATCH,
        length="1000000 steps",
        optimizer=sf.optim.adamw(lr=1e-3),
        run_dir=run_dir,
        log_every="50 steps",
        save_every="500 steps",
        report=False,
    )
    with run:
        for _ in run:
            yield


def children_s() -> float:
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--of", default=",".join(CASES), help="cases, with a comma between")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {BATCH} rows a step; from a tape / from a list")
    for case in arguments.of.split(","):
        torch.manual_seed(0)
        before_s = children_s()
        with tempfile.TemporaryDirectory() as place:
            loops = [
                training(case, Path(place) / kind, from_tape=kind == "tape")
                for kind in ("tape", "list")
            ]
            pairs = paired_seconds(loops, steps=STRETCH, seconds=arguments.seconds)
        reader_s = (children_s() - before_s) / (len(pairs) * STRETCH * BATCH)
        extra = median(tape - listed for tape, listed in pairs) / STRETCH / BATCH
        print(
            f"{case:<7} {ratio_text(pairs, steps=STRETCH)}; {extra * 1e6:.0f} us more per row; reader {reader_s * 1e6:.0f} us",
            flush=True,
        )


if __name__ == "__main__":
    with reported():
        main()
