"""Steps of a run made again from its checkpoints, and one of them looked at closely."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
