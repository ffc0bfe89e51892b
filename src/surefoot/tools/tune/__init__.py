"""Settings from measurements: a learning rate range test, and a search for the micro-batch size."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
