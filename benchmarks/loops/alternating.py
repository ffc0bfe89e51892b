"""Two loops side by side in one process: a stretch of one, then of the other, so that a slower
machine slows both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from statistics import median, quantiles
from time import perf_counter, process_time

WARMUP = 4  # pairs of stretches that are not counted


def paired_seconds(
    loops: Sequence[Iterator[None]], *, steps: int, seconds: float, wall: bool = False
) -> list[tuple[float, ...]]:
    """Of each pair of stretches, the seconds of every loop: CPU time of the process, or wall time.
    What a loop prints is dropped.
    """
    now = perf_counter if wall else process_time
    pairs: list[tuple[float, ...]] = []
    with redirect_stdout(StringIO()):
        end = perf_counter() + seconds
        while perf_counter() < end or len(pairs) < 3 * WARMUP:
            spent = []
            for loop in loops:
                begin = now()
                for _ in range(steps):
                    next(loop)
                spent.append(now() - begin)
            pairs.append(tuple(spent))
        for loop in reversed(loops):
            loop.close()  # type: ignore[attr-defined]  # a generator
    return pairs[WARMUP:]


def ratio_text(pairs: Sequence[tuple[float, ...]], *, steps: int) -> str:
    """The median over all pairs of the first loop's time by the last one's, its quartiles, and
    milliseconds per step of both.
    """
    ratios = [pair[0] / pair[-1] for pair in pairs]
    low, _, high = quantiles(ratios, n=4)
    ours, plain = (median(pair[index] for pair in pairs) / steps * 1e3 for index in (0, -1))
    return f"{median(ratios):.3f}  ({low:.3f} to {high:.3f}, {len(ratios)} pairs; {ours:.3f} and {plain:.3f} ms a step)"
