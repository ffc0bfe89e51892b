"""The lines of benchmarks/gpu.sh: each module has a function `check(device)`."""
