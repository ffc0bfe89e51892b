"""Experiment trackers as sinks: Weights & Biases, MLflow and trackio, each in a process of its own beside the training."""
