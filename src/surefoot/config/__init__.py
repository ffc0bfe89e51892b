"""Configuration dataclasses, their TOML files, and the settings of every run. Imports no torch."""
