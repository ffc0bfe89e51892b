"""Readers of files that recipes and scripts train on: text, pairs of sentences, images."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
