"""The optimizers that a run can name; each file has a class and its `OptimizerKind`."""
