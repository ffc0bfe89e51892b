from . import generate as generate

NAMES: tuple[str, ...]
