"""Speed: one connection, one training step, both against the baselines in one run."""
