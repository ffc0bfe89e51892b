"""surefoot trains PyTorch models without losing its footing.

`dir(surefoot)` is the table of contents: objects and namespaces. Each is imported when it is first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, _public_names, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __dir__() -> list[str]:
    return ["__version__", *_public_names()]
