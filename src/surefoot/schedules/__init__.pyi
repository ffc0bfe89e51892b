from .lr_schedule import (
    constant,
    cosine,
    cosine_restarts,
    exponential,
    inverse_sqrt,
    join,
    linear,
    multistep,
    one_cycle,
    polynomial,
    wsd,
)

__all__ = [
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "inverse_sqrt",
    "join",
    "linear",
    "multistep",
    "one_cycle",
    "polynomial",
    "wsd",
]
