"""Configuration: dataclasses to TOML and back, and the settings of every run. Nothing here imports torch."""
