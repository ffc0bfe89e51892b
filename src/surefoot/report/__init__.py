"""Run directories as pages: one self-contained file of HTML, of one run or of several."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
