from .find_batch import find_batch_size
from .lr_search import find_lr

__all__ = ["find_batch_size", "find_lr"]
