"""A run directory checked and proved: every byte against its hash, its steps made again."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
