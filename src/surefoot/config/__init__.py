"""Configuration: frozen dataclasses to TOML and back, where each value came from, and what every run has. Torch-free."""

from surefoot.config.files import from_toml, program, to_toml, values
from surefoot.config.settings import Settings, clipping, run_arguments
from surefoot.config.tree import differences, flatten, layered, nearest, unflatten

__all__ = [
    "Settings",
    "clipping",
    "differences",
    "flatten",
    "from_toml",
    "layered",
    "nearest",
    "program",
    "run_arguments",
    "to_toml",
    "unflatten",
    "values",
]
