"""Tools that read runs: each is a package, and none is needed to train."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
