"""Ready-made runs: each a frozen `Config` and `build(config) -> Run`, written with the public names only."""

NAMES = ("gpt", "translation", "images")
