"""Scores of resampled splits, which show how much of a score is due to the choice of the data."""

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np

DRAWS = 100  # the standard error of so many draws is known to 7 %
_CLOSE = 1e-3  # relative tolerance between a score and itself: batch sizes change rounding


def resampled_scores(
    score: Callable[[Sequence[int]], float], *, batches: int, expected: float
) -> list[float] | str:
    """Return the scores of `DRAWS` resampled splits, or the reason why they cannot be computed.

    `score` computes the score of a split that has these of its `batches`, in this order. Each draw
    takes as many batches, with replacement. All runs that are evaluated on the same batches get
    the same draws, so their scores are paired: the paired bootstrap of Koehn 2004
    (https://aclanthology.org/W04-3250), with batches of neighbors in the place of sentences.

    >>> resampled_scores(lambda some: sum(some) / len(some), batches=3, expected=1.0)[:2]
    [1.3333333333333333, 0.0]
    """
    generator = np.random.default_rng(0)
    draws = generator.integers(batches, size=(DRAWS, batches)).tolist()
    in_order = list(range(batches))
    try:
        with warnings.catch_warnings():  # the evaluation of the whole split has given them
            warnings.simplefilter("ignore")
            if not _is_close(score(in_order), expected):
                return "is not computed from the outputs of its batches"
            if not _is_close(score(in_order[::-1]), expected):
                return "depends on the order of its samples"
            scores = [score(draw) for draw in draws]
    except Exception as problem:  # of the user's metric, which may need every class, for example
        return f"cannot be computed of a part of its split: {type(problem).__name__}: {problem}"
    if not all(map(math.isfinite, scores)):
        return "is not finite on parts of its split"
    return scores


def _is_close(score: float, expected: float) -> bool:
    return math.isclose(score, expected, rel_tol=_CLOSE, abs_tol=1e-12)
