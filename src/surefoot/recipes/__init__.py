"""Ready-made runs, each with a `Config` and `build(config) -> Run`, written with public names
only.
"""

NAMES = ("gpt", "translation", "images", "finetune")
