"""Comparisons of schemes: planning, running, statistics."""
