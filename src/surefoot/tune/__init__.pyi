from .find_batch import find_batch_size as find_batch_size
from .lr_search import find_lr as find_lr
