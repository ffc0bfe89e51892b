"""What happens around the steps of a run: build, resume, evaluate, save, stop, report."""
