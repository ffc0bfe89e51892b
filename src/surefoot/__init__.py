"""A training system for PyTorch models. Each public name is imported on first use."""

import lazy_loader

__version__ = "0.1.0"

__getattr__, _public_names, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __dir__() -> list[str]:
    return ["__version__", *_public_names()]
