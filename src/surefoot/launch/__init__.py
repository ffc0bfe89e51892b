"""Several processes on this machine as the ranks of one run: their number, start, monitoring, end
and restart.
"""
