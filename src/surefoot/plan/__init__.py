"""What a run would do before it does anything: its size, its schedule, and its time and memory on a cluster."""
