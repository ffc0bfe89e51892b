"""Reports of run directories: one self-contained HTML file for one run or several runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
