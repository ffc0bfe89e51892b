"""Steps of a run made again from its checkpoints, and one of them looked at closely."""
