"""Comparisons of schemes. Read `compare.py` first; it calls `runs.py` (which runs), `runner.py` and `worker.py` (in
processes of their own) and `statistics.py` (what they allow one to claim).
"""
