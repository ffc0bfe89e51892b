from .beam import END, Hypothesis, beam_search, penalty, searched, twice_and_ten
from .sampling import sample, sample_batch, stream

__all__ = [
    "END",
    "Hypothesis",
    "beam_search",
    "penalty",
    "sample",
    "sample_batch",
    "searched",
    "stream",
    "twice_and_ten",
]
