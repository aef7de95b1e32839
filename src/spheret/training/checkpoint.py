"""Checkpoints: RUN/checkpoints/step_XXXXXXX/ with

    model.safetensors   weights
    state.pt            optimizer, monitor, counters, random state (read with weights_only=True)
    config.json         the run's configuration, so that the model can be built from this folder alone

A checkpoint is written under a temporary name and then renamed, so every folder named step_XXXXXXX is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import safetensors.torch
import torch

from spheret.models import GPT
from spheret.training.config import TrainConfig, config_from_dict, config_to_dict
from spheret.training.run_folder import CHECKPOINTS, CONFIG, checkpoints, read_json, write_json
from spheret.training.state import TrainState

FORMAT = 1
WEIGHTS, STATE = "model.safetensors", "state.pt"


def save_checkpoint(run: Path, state: TrainState, config: TrainConfig, fingerprint: str) -> Path:
    """Save `state` under its step, unless that checkpoint exists; keep the newest `config.keep_checkpoints` (0: all).

    `fingerprint` is that of the training data. Returns the folder of the checkpoint.
    """
    folder = run / CHECKPOINTS
    target = folder / f"step_{state.step:07d}"
    if target.exists():  # a resumed run with nothing left to do, or a signal in a step that is saved anyway
        return target
    _sweep(folder)
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    temporary.mkdir(parents=True)
    safetensors.torch.save_model(state.model, str(temporary / WEIGHTS))
    torch.save({"format": FORMAT, "fingerprint": fingerprint, **state.extras()}, temporary / STATE)
    write_json(temporary / CONFIG, config_to_dict(config))
    _flush(temporary)
    os.replace(temporary, target)
    if config.keep_checkpoints > 0:
        for old in checkpoints(run)[: -config.keep_checkpoints]:
            _remove(old)
    return target


def load_checkpoint(folder: Path, state: TrainState, fingerprint: str) -> None:
    """Restore `state` from a checkpoint. ValueError: another format, other data, or other parameters."""
    # weights_only: a checkpoint from elsewhere must not run code.
    saved = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    if saved["format"] != FORMAT:
        raise ValueError(
            f"{folder / STATE} has format {saved['format']}, expected {FORMAT}; use the version that wrote it"
        )
    if saved["fingerprint"] != fingerprint:
        raise ValueError(
            f"{folder} was trained on data with fingerprint {saved['fingerprint']}, not {fingerprint}; "
            "resume with the same corpus and tokenizer"
        )
    load_weights(state.model, folder)
    state.load_extras(saved)


def load_weights(model: GPT, folder: Path) -> None:
    """Read a checkpoint's weights into `model`, on any device. ValueError: lists missing and unknown parameters."""
    missing, unknown = safetensors.torch.load_model(model, str(folder / WEIGHTS), strict=False, device="cpu")
    if missing or unknown:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit the model: missing {sorted(missing)}, unknown {sorted(unknown)}; "
            "build the model from the config.json beside it"
        )


def load_model(folder: Path | str) -> GPT:
    """The trained model, on the CPU in eval mode. `folder`: a checkpoint, or a run, whose newest checkpoint is taken.

    FileNotFoundError: there is no complete checkpoint.
    """
    folder = Path(folder)
    if not (folder / WEIGHTS).exists():
        complete = checkpoints(folder)
        if not complete:
            raise FileNotFoundError(
                f"no checkpoint in {folder}; name a run folder trained with save_final or checkpoint_interval, "
                "or one of its checkpoints/step_* folders"
            )
        folder = complete[-1]
    model = GPT(config_from_dict(read_json(folder / CONFIG)).model)
    load_weights(model, folder)
    return model.eval()


def _sweep(folder: Path) -> None:
    """Remove unfinished checkpoints of a process that was killed."""
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover)


def _remove(checkpoint: Path) -> None:
    # Renamed first: a kill during rmtree must not leave part of a checkpoint under a name that says it is complete.
    doomed = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.tmp")
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def _flush(folder: Path) -> None:
    """Force the files to disk, so that a power cut after the rename cannot leave an empty newest checkpoint."""
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
