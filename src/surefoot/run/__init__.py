"""The life of a run: build, resume, train, evaluate, save and stop."""
