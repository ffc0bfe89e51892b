"""Experiment trackers: Weights & Biases, MLflow and trackio, each in a process beside the training."""
