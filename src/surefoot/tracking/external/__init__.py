"""Experiment trackers: Weights & Biases, MLflow and trackio, each in a separate process."""
