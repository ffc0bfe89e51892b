from .beam import Hypothesis as Hypothesis
from .beam import beam_search as beam_search
from .sampling import sample as sample
from .sampling import sample_batch as sample_batch
from .sampling import stream as stream
