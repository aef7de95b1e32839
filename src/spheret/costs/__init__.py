"""The cost of a run, computed before the run: parameters, FLOPs, memory, hours."""
