"""Optimizers that a run can be given by name: each file has the class, and how to build it, shard it and skip its steps."""
