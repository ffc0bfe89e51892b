"""Metrics that compare outputs with targets."""
