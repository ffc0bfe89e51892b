"""Ready-made runs, each with a `Config` and `build(config) -> Run`, written with public names
only.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

NAMES = ("gpt", "translation", "images", "finetune")
