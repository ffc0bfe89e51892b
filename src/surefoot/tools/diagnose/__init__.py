"""Problems of a run, found in its records alone: findings with evidence, causes and remedies.
Torch-free.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
