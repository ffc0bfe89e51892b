from .dense import chunked_cross_entropy, cross_entropy, linear_cross_entropy

__all__ = ["chunked_cross_entropy", "cross_entropy", "linear_cross_entropy"]
