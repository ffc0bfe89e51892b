"""Replay steps of a run from its checkpoints, and inspect one of them."""
