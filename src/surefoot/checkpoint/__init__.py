"""Checkpoints: the format on disk, the store, and the conversion of a run to a checkpoint and
back.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
