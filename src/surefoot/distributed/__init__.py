"""Several processes as one run: how ranks meet, share a step, watch each other and stay equal."""
