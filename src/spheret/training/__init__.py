"""Training one model: `train(config, out)`.

Read `loop.py` first. It calls `state.py` (model, optimizer and counters), `step.py` (one optimizer step),
`run_folder.py` and `checkpoint.py` (the files of a run).
"""

from spheret.training.checkpoint import load_model
from spheret.training.config import TrainConfig, config_from_dict, config_to_dict
from spheret.training.device import machine, versions
from spheret.training.interrupt import TrainingInterrupted
from spheret.training.loop import train
from spheret.training.optimizer import learning_rate
from spheret.training.run_folder import COLLAPSE_MARGIN, RunResult, checkpoints, read_metrics, read_result

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
