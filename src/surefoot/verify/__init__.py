"""Verify a run directory: check every byte against its hash, and replay steps."""
