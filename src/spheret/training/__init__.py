"""Training one model: configuration, loop, optimizer, schedule and checkpoints."""

from spheret.training.checkpoint import checkpoints, load_model
from spheret.training.config import TrainConfig, config_from_dict, config_to_dict
from spheret.training.environment import machine, versions
from spheret.training.files import read_metrics
from spheret.training.interrupt import TrainingInterrupted
from spheret.training.loop import train
from spheret.training.result import COLLAPSE_MARGIN, RunResult, read_result
from spheret.training.schedule import learning_rate

__all__ = [
    "COLLAPSE_MARGIN",
    "RunResult",
    "TrainConfig",
    "TrainingInterrupted",
    "checkpoints",
    "config_from_dict",
    "config_to_dict",
    "learning_rate",
    "load_model",
    "machine",
    "read_metrics",
    "read_result",
    "train",
    "versions",
]
