"""Configuration: frozen dataclasses to TOML and back, and what every run has; nothing here imports torch."""

from surefoot.config.files import from_toml, origins, program, to_toml, values, with_choices
from surefoot.config.settings import Settings, clipping, run_arguments
from surefoot.config.strategy import Sharding, Strategy
from surefoot.config.tree import LEADS, STAYS, differences, flatten, layered, nearest, unflatten

__all__ = [
    "LEADS",
    "STAYS",
    "Settings",
    "Sharding",
    "Strategy",
    "clipping",
    "differences",
    "flatten",
    "from_toml",
    "layered",
    "nearest",
    "origins",
    "program",
    "run_arguments",
    "to_toml",
    "unflatten",
    "values",
    "with_choices",
]
