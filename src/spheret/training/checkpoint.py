"""Checkpoints: RUN/checkpoints/step_XXXXXXX/ with

    model.safetensors   weights
    state.pt            optimizer, monitor, counters, random state (read with weights_only=True)
    config.json         the run's configuration, so that this folder is enough to build the model

A checkpoint is written under a temporary name and then renamed. Every folder named step_XXXXXXX is therefore complete.
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
    """Save `state` as the checkpoint of its step, and keep the newest `config.keep_checkpoints` (0: all).

    An existing checkpoint of that step is not written again. `fingerprint` identifies the training data. Returns the
    folder of the checkpoint.
    """
    folder = run / CHECKPOINTS
    target = folder / f"step_{state.step:07d}"
    if target.exists():  # a resumed run with no steps left, or a final checkpoint due at the same step as a regular one
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
    """Restore `state` from a checkpoint. ValueError: the format, the data or the parameters differ."""
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
    # strict=False, because safetensors' own error does not say which file it read or what to do.
    missing, unknown = safetensors.torch.load_model(model, str(folder / WEIGHTS), strict=False, device="cpu")
    if missing or unknown:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit the model: missing {sorted(missing)}, unknown {sorted(unknown)}; "
            "build the model from the config.json beside it"
        )


def load_model(folder: Path | str) -> GPT:
    """The trained model, on the CPU in eval mode. `folder` is a checkpoint, or a run folder (its newest checkpoint).

    FileNotFoundError: `folder` has no complete checkpoint.
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
    """Remove the unfinished checkpoints that a killed process left."""
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover)


def _remove(checkpoint: Path) -> None:
    # Renamed first: a kill during rmtree must not leave part of a checkpoint under the name of a complete one.
    doomed = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.tmp")
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def _flush(folder: Path) -> None:
    """Force the files to disk."""
    # A rename can reach the disk before the data: a power cut would then leave an empty newest checkpoint.
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
