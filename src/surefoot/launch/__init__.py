"""Several processes on this machine, as ranks of one run: how many, started, watched, ended together, and started again."""
