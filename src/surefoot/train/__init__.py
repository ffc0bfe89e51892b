"""The training loop, one step's computation, evaluation, and the state of a run."""
