from .beam import END, Hypothesis, beam_search, penalty, searched, twice_and_ten
from .sampling import sample, samples, stream

__all__ = ["END", "Hypothesis", "beam_search", "penalty", "sample", "samples", "searched", "stream", "twice_and_ten"]
