"""Benchmarks of speed: one connection, and one training step, each against its baselines in the same process."""
