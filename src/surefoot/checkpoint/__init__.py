"""Checkpoints: what one is on disk, which exist, and how a run becomes one and comes back from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
