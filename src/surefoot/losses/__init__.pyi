from .dense import chunked_cross_entropy, cross_entropy, linear_cross_entropy
from .mixing import MixedBatch, mixup, mixup_cross_entropy

__all__ = [
    "MixedBatch",
    "chunked_cross_entropy",
    "cross_entropy",
    "linear_cross_entropy",
    "mixup",
    "mixup_cross_entropy",
]
