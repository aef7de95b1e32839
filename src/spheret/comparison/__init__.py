"""Comparisons of schemes.

Read `compare.py` first. It uses `runs.py` (which runs there are), `runner.py` and `worker.py` (each run in its own
process) and `statistics.py` (what the results support).
"""
