"""Models as plain `nn.Module`s, which import no other package of surefoot."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
