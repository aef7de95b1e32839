"""Training one model: `train(config, out)`.

Read `loop.py` first; it calls `state.py` (what changes while a run trains), `step.py` (one optimizer step),
`run_folder.py` and `checkpoint.py` (what a run leaves on disk), and `collapse.py` (whether it learned anything).
"""

from spheret.training.checkpoint import DamagedCheckpoint, load_model
from spheret.training.collapse import COLLAPSE_MARGIN, has_collapsed
from spheret.training.config import TrainConfig, config_from_dict, config_to_dict
from spheret.training.device import machine, versions
from spheret.training.interrupt import TrainingInterrupted
from spheret.training.loop import train
from spheret.training.optimizer import learning_rate
from spheret.training.run_folder import RunBusy, RunResult, checkpoints, read_metrics, read_result

__all__ = [
    "COLLAPSE_MARGIN",
    "DamagedCheckpoint",
    "RunBusy",
    "RunResult",
    "TrainConfig",
    "TrainingInterrupted",
    "checkpoints",
    "config_from_dict",
    "config_to_dict",
    "has_collapsed",
    "learning_rate",
    "load_model",
    "machine",
    "read_metrics",
    "read_result",
    "train",
    "versions",
]
