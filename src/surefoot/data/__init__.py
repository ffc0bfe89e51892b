"""Data sets, plans of the samples in each training step, and the feed that loads the samples.

The readers of files stand with the recipes. Their names are names of this package too.
"""

import lazy_loader

from surefoot.recipes import readers

_name_of_core, _, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "mixture": ["Mixture"],
        "orders": ["Weighted"],
        "streams.stream": ["Stream"],
        "tables": ["Table"],
        "text.document_tokens": ["encode_documents"],
        "text.shards": ["TokenShards", "write_shards"],
        "text.windows": ["EvalWindows", "TrainWindows"],
    },
)
__all__ += readers.__all__


def __getattr__(name: str) -> object:
    if name in readers.__all__:
        return getattr(readers, name)
    return _name_of_core(name)


def __dir__() -> list[str]:
    return __all__.copy()
