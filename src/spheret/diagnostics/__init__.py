"""Diagnostics of a run: a probe of the residual stream, and a monitor that distinguishes spikes from divergence."""

from spheret.diagnostics.monitor import DivergenceMonitor, Event
from spheret.diagnostics.probe import probe

__all__ = ["DivergenceMonitor", "Event", "probe"]
