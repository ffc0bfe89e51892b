"""Time, memory and arithmetic of a step, and faster variants of the step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
