"""Comparisons of schemes.

Read `compare.py` first. It uses `runs.py` (which runs there are), `runner.py` and `worker.py` (each run in its own
process), `statistics.py` and `reach.py` (what the results support), and `verdict.py` (the same in words).
"""
