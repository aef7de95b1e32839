"""What a run costs before it is run: parameters, FLOPs, memory, hours."""
