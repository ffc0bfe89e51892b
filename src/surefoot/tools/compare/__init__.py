"""Training and comparison of variants of a run, and searches over settings."""
