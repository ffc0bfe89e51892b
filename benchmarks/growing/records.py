"""Records as a run writes them, in any number: a loss that falls, with noise, a spike and a gap now
and then.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

_LINE = (
    '{{"kind": "train", "step": {step}, "loss": {loss!r}, "targets": {targets}, "grad_norm": {norm!r}, "grad_norm_max": {most!r},'
    ' "clip_fraction": 0.25, "skipped": 0, "loss_max": {most!r}, "loss_max_step": {step}, "targets_per_s": {speed!r},'
    ' "lr": {rate!r}, "eta_s": {left!r}, "host_memory_bytes": 373719040, "training_s": {training!r},'
    ' "data_wait_s": 0.007075670000631362, "evaluating_s": 0.0, "saving_s": 0.0, "user_s": 0.0}}\n'
)


def write_records(path: Path, number: int, *, every: int) -> None:
    """Append so many records of training, one for every so many steps, and a score for each
    fiftieth.
    """
    draw = random.Random(0).random
    with path.open("a") as file:
        for place in range(1, number + 1):
            loss = 1.0 + 5.0 * place**-0.2 + 0.1 * draw() + (3.0 if place % 9973 == 0 else 0.0)
            training = 0.3 * (1 + 0.1 * draw())
            file.write(
                _LINE.format(
                    step=place * every,
                    loss=loss,
                    targets=every * 1024,
                    norm=0.5 + draw(),
                    most=loss + 1.0,
                    speed=every * 1024 / training,
                    rate=1e-3 * 0.5 * (1 + math.cos(math.pi * place / number)),
                    left=(number - place) * training,
                    training=training,
                )
            )
            if place % 50 == 0:
                file.write(
                    f'{{"kind": "eval", "step": {place * every}, "val/loss": {loss + 0.2 * draw()!r}}}\n'
                )
