"""A preview of a run: its size, its schedule, and its time and memory on a cluster."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
