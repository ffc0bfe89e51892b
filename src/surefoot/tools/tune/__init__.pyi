from .batch_size_search import BatchSizeSearch as BatchSizeSearch
from .find_batch import find_batch_size as find_batch_size
from .lr_range_test import LRRangeTest as LRRangeTest
from .lr_search import find_lr as find_lr
