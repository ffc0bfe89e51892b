"""Variants of a run trained side by side, and searches over settings."""
