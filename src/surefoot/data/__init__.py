"""Data sets, plans of the samples in each training step, and the feed that loads the samples.

The readers of files stand with the recipes. Their names are names of this package too.
"""

import lazy_loader

_name_of_core, _, _names_of_core = lazy_loader.attach(
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


def __getattr__(name: str) -> object:
    if name in _names_of_core:
        return _name_of_core(name)
    from surefoot.recipes import readers

    if name == "__all__":
        return [*_names_of_core, *readers.__all__]
    return getattr(readers, name) if name in readers.__all__ else _name_of_core(name)


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")  # type: ignore[assignment]
    return names
