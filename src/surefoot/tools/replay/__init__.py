"""Replay steps of a run from its checkpoints, and inspect one step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
