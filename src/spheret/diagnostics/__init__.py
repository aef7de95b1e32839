"""What happens inside a run: probes of the residual stream, divergence monitor."""

from spheret.diagnostics.probe import probe

__all__ = ["probe"]
