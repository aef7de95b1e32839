"""Opening a run's folder: what may be started over, what may be resumed, and with which changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spheret.training.checkpoint import checkpoints
from spheret.training.config import TrainConfig, config_from_dict, config_to_dict
from spheret.training.files import CONFIG, DIAGNOSTICS, RUN, read_json, write_json
from spheret.training.result import RunResult, read_result

MAY_CHANGE = frozenset(
    [
        "device",
        "compile",
        "grad_accum",
        "on_divergence",
        "eval_interval",
        "log_interval",
        "checkpoint_interval",
        "keep_checkpoints",
        "save_final",
        "data.cache",
    ]
)
"""Fields that a resumed run may set anew: they change where or how often, not what is trained."""


def open_run(out: Path, config: TrainConfig, resume: bool) -> Path | None:
    """Prepare `out` for training and write its config.json; return the checkpoint to go on from.

    None means step 0, also for a resumed run that was killed before its first checkpoint.

    FileExistsError: `out` holds a run that ended or has checkpoints, and `resume` is not set. FileNotFoundError: no
    run to resume. ValueError: the run there has another configuration.
    """
    newest = checkpoints(out)[-1] if checkpoints(out) else None
    if resume:
        if not (out / CONFIG).exists():
            raise FileNotFoundError(f"no run in {out} to resume: it has no {CONFIG}; start the run without resume")
        check_same_config(out, config)
    elif newest is not None or finished_result(out) is not None:
        raise FileExistsError(f"{out} already holds a run; pass resume=True (--resume), or choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    for stale in (RUN, DIAGNOSTICS):
        (out / stale).unlink(missing_ok=True)
    write_json(out / CONFIG, config_to_dict(config))
    return newest if resume else None


def finished_result(out: Path) -> RunResult | None:
    """The result in a folder whose run has ended by itself, else None."""
    if not (out / RUN).exists():
        return None
    result = read_result(out)
    return None if result.outcome == "interrupted" else result


def check_same_config(out: Path, config: TrainConfig) -> None:
    """ValueError: names the fields, besides those that may change, in which the run in `out` differs from `config`."""
    stored = config_to_dict(config_from_dict(read_json(out / CONFIG)))
    # Through JSON, so that tuples and lists compare alike.
    old, new = (json.loads(json.dumps(values)) for values in (stored, config_to_dict(config)))
    changed = [name for name in _differing_fields(old, new) if name not in MAY_CHANGE]
    if changed:
        raise ValueError(
            f"the run in {out} was configured with other values of {', '.join(changed)}; "
            "resume with the same ones, or train into another folder"
        )


def _differing_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the entries in which two nested configuration dicts differ."""
    names: list[str] = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += _differing_fields(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(prefix + key)
    return names
