"""The run folder: its files, their only reader and their only (atomic) writer, and the rules for starting and resuming.

    config.json       everything needed to repeat the run
    metrics.jsonl     one JSON object per line: step, tokens, loss, lr, grad_norm, ..., val_loss where evaluated
    diagnostics.json  statistics of the residual stream, one value per connection
    run.json          versions, machine, data and outcome; written last, so a run without it has not ended
    checkpoints/      see `spheret.training.checkpoint`

JSON here is strict: a NaN or an infinity is written, and read, as null.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self

from filelock import FileLock, Timeout

from spheret.connections import canonical_name
from spheret.training.config import TrainConfig, check_types, config_from_dict, config_to_dict

CONFIG, METRICS, RUN, DIAGNOSTICS = "config.json", "metrics.jsonl", "run.json", "diagnostics.json"
CHECKPOINTS = "checkpoints"
NUMBERS = ("tokens", "loss", "lr", "grad_norm", "tokens_per_s", "elapsed_s", "val_loss", "val_se", "val_bpb")
"""What is a number, or null, in a record of metrics.jsonl."""
LOCK = ".train.lock"
"""Held while a process trains into the folder. It stays there: removing a lock file is a race of its own."""

Outcome = Literal["finished", "diverged", "interrupted"]

SPEED_NOTE = "beside whatever else the machine did; not comparable between runs, for that use spheret bench"
"""Stands in run.json beside `tokens_per_s`. Runs of one comparison share the machine, and schemes of equal cost came
out a factor of three apart."""

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
        # Paths, each with more than one spelling. What was read is compared, by its fingerprint.
        "data.data",
        "data.tokenizer",
    ]
)
"""Fields of TrainConfig that a resumed run may change: they say where or how often, but not what is trained."""

LENGTH = ("steps", "max_train_tokens", "warmup_steps", "warmup_ratio")
"""Fields that a resumed run may change if every step that is done keeps its learning rate."""

REMEDIES = {
    CONFIG: "restore it: every checkpoint holds a copy",
    RUN: "remove it, then continue the run with --resume (resume=True)",
}
"""What to do about a damaged file."""


# --- reading and writing files ---


def write_bytes(path: Path, payload: bytes) -> None:
    """Write a file atomically: a reader sees the old file or the whole new one, never a part."""
    # The temporary file is in the same folder, because a rename is atomic only within one file system. Its name is
    # unique, because several threads or machines may write the same file.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.write_bytes(payload)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write {path} ({why}): make room there, or choose another folder") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for text: UTF-8, line ends unchanged."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` for a JSON value; NaN and infinity become null."""
    write_text(path, json.dumps(finite_or_none(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; NaN and infinity become None.

    FileNotFoundError: names the file and, for a file of a run, the command that writes it. ValueError: names the file,
    the fault and the remedy.
    """
    remedy = REMEDIES.get(path.name, "write it again or remove it")
    try:
        value = finite_or_none(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        hint = "is it the folder of a run? Train into it with `spheret train --out`"
        known = path.name in (CONFIG, RUN, DIAGNOSTICS)
        raise FileNotFoundError(f"no {path.name} in {path.parent}{'; ' + hint if known else ''}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); was it cut short? Then {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; was it overwritten? Then {remedy}")
    return value


def read_config(folder: Path) -> TrainConfig:
    """The configuration in the config.json of a run or of a checkpoint. Errors: as those of `read_json`."""
    values = read_json(folder / CONFIG)
    try:
        return config_from_dict(values)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}; correct it, or {REMEDIES[CONFIG]}") from error


def finite_or_none(value: Any) -> Any:
    """Copy of a JSON value with None for every NaN and infinity, at any depth: strict JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value


# --- metrics.jsonl ---


def read_metrics(folder: Path, *, skip_damaged: bool = False) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl in order of step; [] if there is no file.

    An incomplete last line, as a killed process leaves it, is ignored. If a step was written twice, the later record
    counts.

    ValueError: names a damaged line. With `skip_damaged` this is a warning, and the line is omitted.
    """
    path = Path(folder) / METRICS
    if not path.is_file():
        return []
    # The last element is "", or a line without its newline: cut short, or still being written.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _record(line)
            by_step[record["step"]] = record
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                continue
            message = f"{path}:{number} is not a metrics record"
            if not skip_damaged:
                raise ValueError(f"{message}; remove that line") from error
            warnings.warn(f"{message}; omitted", stacklevel=2)
    return [by_step[step] for step in sorted(by_step)]


def _record(line: str) -> dict[str, Any]:
    """ValueError: the line is not a JSON object with a step and numbers."""
    record = finite_or_none(json.loads(line))
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("no step")
    if not all(isinstance(record.get(name), (int, float, NoneType)) for name in NUMBERS):
        raise ValueError("not a number")
    return record


class MetricsLog:
    """Appends one JSON object per line to metrics.jsonl; other processes see each line when `write` returns.

    Opening the log removes the records of steps after `keep_through`: a resumed run repeats those steps.
    """

    def __init__(self, folder: Path, keep_through: int = 0) -> None:
        records = read_metrics(folder) if keep_through else []
        kept = [record for record in records if record["step"] <= keep_through]
        write_text(folder / METRICS, "".join(_line(record) for record in kept))
        # Unbuffered: progress displays follow the file, and a kill must not lose what was logged.
        self._file = (folder / METRICS).open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """OSError: the record cannot be written, for want of space for example."""
        line = _line(record).encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(
                f"cannot write {self._file.name} ({error.strerror}): make room, then continue with --resume"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_none(record), allow_nan=False) + "\n"


# --- run.json ---


@dataclass(frozen=True)
class RunResult:
    """The result of a run, as `train` returns it and run.json stores it.

    Losses are in nats per token, None where there is no finite value. `train_loss` is smoothed over about 20 steps.
    `val_step` is the step of the validation loss, which lies before `step` if the run was interrupted. `last_loss` is
    the last finite training loss and `last_loss_step` its step: where a diverged run still was sound. `unigram_loss` is
    the loss of the training set's token frequencies on the validation windows. `tokens_per_s` is the median over the
    log lines, without evaluations and checkpoints, beside whatever else the machine did meanwhile. `seconds` is
    training time, including that before a resume. `collapsed`: the run finished and stopped learning at the unigram
    plateau (see `collapse.py`).
    """

    folder: Path
    outcome: Outcome
    reason: str | None
    step: int
    tokens: int
    val_loss: float | None
    val_se: float | None
    val_bpb: float | None
    train_loss: float | None
    unigram_loss: float
    parameters: int
    tokens_per_s: float | None
    seconds: float
    spikes: int
    skipped_steps: int
    collapsed: bool = False
    last_loss: float | None = None
    last_loss_step: int | None = None
    val_step: int | None = None

    @property
    def perplexity(self) -> float | None:
        """exp(val_loss); None without a validation loss, or if it overflows."""
        return None if self.val_loss is None or self.val_loss > 700 else math.exp(self.val_loss)

    @property
    def explanation(self) -> str | None:
        """`reason`, for a diverged run together with its last finite loss."""
        if self.outcome != "diverged":
            return self.reason
        loss = last_finite_loss(self.last_loss, self.last_loss_step)
        return f"{self.reason}; {loss}" if self.reason else loss

    def to_dict(self) -> dict[str, Any]:
        """What run.json says about the run itself; versions, machine and data are added by the trainer."""
        final = (
            "step",
            "tokens",
            "val_step",
            "val_loss",
            "val_se",
            "val_bpb",
            "train_loss",
            "last_loss",
            "last_loss_step",
        )
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "final": {name: getattr(self, name) for name in final},
            "unigram_loss": self.unigram_loss,
            "collapsed": self.collapsed,
            "parameters": self.parameters,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_note": SPEED_NOTE,
            "seconds": self.seconds,
            "spikes": self.spikes,
            "skipped_steps": self.skipped_steps,
        }


def last_finite_loss(loss: float | None, step: int | None) -> str:
    """'last finite training loss 2.3145 at step 120', for messages about a diverged run."""
    return "no finite training loss" if loss is None else f"last finite training loss {loss:.4f} at step {step}"


def read_result(folder: Path) -> RunResult:
    """The result stored in run.json.

    FileNotFoundError: the run has not ended, or `folder` is not a run folder. ValueError: the file is damaged.
    """
    path = Path(folder) / RUN
    values = read_json(path)
    # Versions, machine and data are not part of the result.
    own = {name: value for name, value in values.items() if name in RunResult.__dataclass_fields__}
    try:
        result = RunResult(folder=Path(folder), **own, **values["final"])
        check_types(RunResult, vars(result))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} does not hold the result of a run ({error}): {REMEDIES[RUN]}") from error
    return result


def finished_result(folder: Path) -> RunResult | None:
    """The result of a run that finished or diverged; None for an interrupted or unfinished run."""
    if not (folder / RUN).exists():
        return None
    result = read_result(folder)
    return None if result.outcome == "interrupted" else result


# --- starting and resuming ---


class RunBusy(RuntimeError):
    """Another process is training into the same folder."""


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Make the folder and hold its lock. RunBusy: another process, or another thread, is training into it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RunBusy(
            f"another process is training into {folder}: wait for it, or choose another folder (--out)"
        ) from None
    try:
        yield
    finally:
        lock.release()


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    found = (Path(folder) / CHECKPOINTS).glob("step_*")
    return sorted((p for p in found if re.fullmatch(r"step_\d{7,}", p.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The steps that a checkpoint has behind it."""
    return int(checkpoint.name.removeprefix("step_"))


def require_run(folder: Path) -> None:
    """FileNotFoundError: there is no run in `folder` to resume."""
    if not (folder / CONFIG).exists():
        raise FileNotFoundError(f"no run in {folder} to resume: it has no {CONFIG}; start the run without resume")


def check_free(folder: Path, config: TrainConfig, resume: bool) -> None:
    """Check that `folder` may be trained into. It writes nothing.

    FileExistsError: `folder` holds a run that ended or has checkpoints, and `resume` is not set. ValueError: the run
    there has another configuration, or a damaged file.
    """
    if resume:
        check_same_config(folder, config)
        read_metrics(folder)
    elif checkpoints(folder) or finished_result(folder) is not None:
        raise FileExistsError(f"{folder} already holds a run; pass resume=True (--resume), or choose another folder")


def open_run(folder: Path, config: TrainConfig) -> None:
    """Prepare `folder` for training and write its config.json."""
    # The run is about to go on: what said how it ended is no longer true.
    for stale in (RUN, DIAGNOSTICS):
        (folder / stale).unlink(missing_ok=True)
    write_json(folder / CONFIG, config_to_dict(config))


def free_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist: nothing is ever overwritten by setting aside."""
    number, free = 2, path
    while free.exists():
        number, free = number + 1, path.with_name(f"{path.name}-{number}")
    return free


def check_same_config(folder: Path, config: TrainConfig) -> None:
    """ValueError: names what the run in `folder` has otherwise, other than the fields in MAY_CHANGE.

    Those in LENGTH may change too if the steps up to the newest checkpoint keep their learning rates.
    """
    # The stored values go through today's TrainConfig, so that fields added since then take their defaults. Both sides
    # go through JSON, so that a tuple equals a list.
    stored = read_config(folder)
    old, new = (json.loads(json.dumps(config_to_dict(value))) for value in (stored, config))
    changed = {name: values for name, values in _differences(old, new).items() if name not in MAY_CHANGE}
    if canonical_name(stored.model.scheme) == canonical_name(config.model.scheme):  # one scheme, spelled in two ways
        changed.pop("model.scheme", None)
    saved = checkpoints(folder)
    obstacle = _obstacle(stored, config, step_of(saved[-1]) if saved else 0) if changed.keys() & set(LENGTH) else ""
    if not obstacle:
        changed = {name: values for name, values in changed.items() if name not in LENGTH}
    if not changed:
        return
    named = ", ".join(f"{name}={was!r} (not {now!r})" for name, (was, now) in changed.items())
    fix = "train into another folder"
    if saved and not any(name.startswith(("model.", "data.")) for name in changed):
        fix = f"start another run from its weights, with --init-from {folder} (init_from) and another --out"
    because = f"; {obstacle}" if obstacle else ""
    raise ValueError(f"the run in {folder} has {named}{because}. Resume it as it is, or {fix}")


def _obstacle(old: TrainConfig, new: TrainConfig, done: int) -> str:
    """Why the run cannot have the length of `new`, or the empty string; `done` steps are behind it."""
    # What else differs is not the question here.
    schedule = ("lr", "schedule", "min_lr_ratio", "decay_fraction")
    new = replace(new, **{name: getattr(old, name) for name in schedule})
    if new.total_steps < done:
        return f"{done} steps are done"
    other = next((step for step in range(done) if old.lr_at(step) != new.lr_at(step)), None)
    if other is None:
        return ""
    if old.total_warmup_steps != new.total_warmup_steps:
        return f"its warm-up is over: keep warmup_steps={old.total_warmup_steps}"
    if old.schedule == "wsd":
        return f"its wsd schedule already decays, from step {other + 1} on: more steps would undo that"
    return (
        f"its {old.schedule} schedule sets every rate by the number of steps, so with more steps it would have been "
        "another run from the start. Runs to be prolonged need schedule constant or wsd"
    )


def check_same_data(folder: Path, fingerprint: str) -> None:
    """ValueError: the ended run in `folder` was trained on other data than that of this fingerprint."""
    try:
        stored = str(read_json(folder / RUN)["data"]["fingerprint"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / RUN} does not name the data of the run: {REMEDIES[RUN]}") from error
    if stored != fingerprint:
        raise ValueError(other_data(folder, stored, fingerprint))


def other_data(folder: Path, stored: str, fingerprint: str) -> str:
    """The message for a run or checkpoint that was trained on data of the fingerprint `stored`."""
    return (
        f"{folder} was trained on data with fingerprint {stored}, not {fingerprint}; "
        "resume with the same corpus and tokenizer"
    )


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The entries in which two nested configuration dicts differ: dotted names, and both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found
