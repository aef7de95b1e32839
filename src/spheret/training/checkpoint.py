"""Checkpoints: RUN/checkpoints/step_XXXXXXX/ with

    model.safetensors   weights
    state.pt            optimizer, monitor, counters, random state (read with weights_only=True)
    config.json         the run's configuration, so that this folder is enough to build the model

A checkpoint is written under a temporary name and then renamed. Every folder named step_XXXXXXX is therefore complete.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from spheret.models import GPT
from spheret.training.config import TrainConfig, config_to_dict
from spheret.training.run_folder import CHECKPOINTS, CONFIG, checkpoints, free_name, other_data, read_config, write_json
from spheret.training.state import STATE_PARTS, TrainState

FORMAT = 1
WEIGHTS, STATE = "model.safetensors", "state.pt"


def save_checkpoint(run: Path, state: TrainState, config: TrainConfig, fingerprint: str) -> Path:
    """Save `state` as the checkpoint of its step, and keep the newest `config.keep_checkpoints` (0: all).

    An existing checkpoint of that step is not written again. `fingerprint` identifies the training data. Returns the
    folder of the checkpoint.

    OSError: it cannot be written, for want of space for example; earlier checkpoints stay as they are.
    """
    folder = run / CHECKPOINTS
    target = folder / f"step_{state.step:07d}"
    if target.exists():  # a resumed run with no steps left, or a final checkpoint due at the same step as a regular one
        return target
    _sweep(folder)
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        safetensors.torch.save_model(state.model, str(temporary / WEIGHTS))
        torch.save({"format": FORMAT, "fingerprint": fingerprint, **state.extras()}, temporary / STATE)
        shutil.copymode(temporary / STATE, temporary / WEIGHTS)  # safetensors' file is readable by its owner alone
        write_json(temporary / CONFIG, config_to_dict(config))
        _flush(temporary)
        os.replace(temporary, target)
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:  # the libraries have errors of their own
        shutil.rmtree(temporary, ignore_errors=True)
        saved = checkpoints(run)
        start = f"{saved[-1].name}, which is whole" if saved else "the start"
        raise OSError(
            f"cannot save {target} ({_one_line(error)}): make room, then continue from {start}, with --resume"
        ) from error
    if config.keep_checkpoints > 0:
        for old in checkpoints(run)[: -config.keep_checkpoints]:
            _remove(old)
    return target


class DamagedCheckpoint(ValueError):
    """A checkpoint from which a run cannot continue; the message lists what is missing or cannot be read."""


def resume_state(run: Path, state: TrainState, fingerprint: str) -> Path | None:
    """Restore `state` from the newest whole checkpoint of a run; returns its folder, None if the run has no checkpoint.

    Damaged checkpoints after it are renamed, with a warning that names the file: the run comes to their steps again.

    DamagedCheckpoint: no checkpoint is whole; the message lists what each one lacks, and the ways on. ValueError: as in
    `load_checkpoint`.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    for folder in reversed(checkpoints(run)):
        try:
            load_checkpoint(folder, state, fingerprint)
        except DamagedCheckpoint as error:
            damaged[folder] = error
            continue
        for bad, why in damaged.items():
            aside = free_name(bad.with_name(f"damaged_{bad.name}"))
            os.replace(bad, aside)
            warnings.warn(f"{why}; it is now {aside.name}, and the run continues from {folder.name}", stacklevel=2)
        return folder
    if not damaged:
        return None
    found = "; ".join(map(str, damaged.values()))
    raise DamagedCheckpoint(
        f"{found}. No older checkpoint is whole. Restore one, or start a new run from the weights alone with "
        f"--init-from {next(iter(damaged))} (init_from) and another --out"
    )


def load_checkpoint(folder: Path, state: TrainState, fingerprint: str) -> None:
    """Restore `state` from a checkpoint.

    DamagedCheckpoint: a part is missing or cannot be read; `state` may then hold some of the others. ValueError:
    another format, other data, or other parameters.
    """
    saved, damage = _read_state(folder / STATE)
    if "format" in saved and saved["format"] != FORMAT:
        raise ValueError(
            f"{folder / STATE} has format {saved['format']}, expected {FORMAT}; use the version that wrote it"
        )
    if "fingerprint" in saved and saved["fingerprint"] != fingerprint:
        raise ValueError(other_data(folder, saved["fingerprint"], fingerprint))
    try:
        load_weights(state.model, folder)
    except DamagedCheckpoint as error:
        damage.append(str(error))
    if not damage:
        try:
            state.load_extras(saved)
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            damage.append(f"{folder / STATE} does not fit the run ({_one_line(error)})")
    if damage:
        raise DamagedCheckpoint("; ".join(damage))


def _read_state(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The content of state.pt, and what is wrong with it."""
    try:
        # weights_only: a checkpoint from elsewhere must not run code.
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return {}, [f"{path} is missing"]
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file: torch raises errors of many types, from pickle, zip and its own reader
        return {}, [f"{path} cannot be read; was it cut short? ({_one_line(error)})"]
    if not isinstance(saved, dict):
        return {}, [f"{path} holds a {type(saved).__name__}, not the state of a run"]
    missing = [part for part in ("format", "fingerprint", *STATE_PARTS) if part not in saved]
    # Without all of them it is another file, such as a bare state dict of weights; its keys mean nothing here.
    return saved, [f"{path} lacks {', '.join(missing)}"] if missing else []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def load_weights(model: GPT, folder: Path) -> None:
    """Read a checkpoint's weights into `model`, on any device.

    DamagedCheckpoint: names a file that is missing or cannot be read. ValueError: lists parameters that are missing,
    unknown or of another shape.
    """
    path = folder / WEIGHTS
    advice = "build the model from the config.json beside it"
    try:
        missing, unknown = safetensors.torch.load_model(model, str(path), strict=False, device="cpu")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except safetensors.SafetensorError as error:
        raise DamagedCheckpoint(f"{path} cannot be read; was it cut short? ({_one_line(error)})") from error
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {_one_line(error)}; {advice}") from error
    if missing or unknown:
        raise ValueError(
            f"{path} does not fit the model: missing {sorted(missing)}, unknown {sorted(unknown)}; {advice}"
        )


def weights_folder(folder: Path) -> Path:
    """The checkpoint that `folder` is, or the newest one of the run that it is.

    FileNotFoundError: there is no complete checkpoint.
    """
    if (folder / WEIGHTS).exists():
        return folder
    complete = checkpoints(folder)
    if not complete:
        raise FileNotFoundError(
            f"no checkpoint in {folder}; name a run folder trained with save_final or checkpoint_interval, "
            "or one of its checkpoints/step_* folders"
        )
    return complete[-1]


def load_model(folder: Path | str) -> GPT:
    """The trained model, on the CPU in eval mode. `folder` is a checkpoint, or a run folder (its newest checkpoint).

    FileNotFoundError: there is no complete checkpoint. DamagedCheckpoint: names a file that cannot be read.
    """
    folder = weights_folder(Path(folder))
    model = GPT(read_config(folder).model)
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
