"""Data sets, plans of the samples in each training step, and the feed that loads the samples."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
