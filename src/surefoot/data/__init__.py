"""Data of each step: which samples it sees (plan), how they get there (feed), and the data sets."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
