"""A generated comparison: run folders and results.json as training and comparing write them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spheret.comparison.reach import with_to_baseline
from spheret.comparison.statistics import summarise
from spheret.comparison.verdict import verdict
from spheret.training.run_folder import read_metrics

UNIGRAM = 3.312
START = math.log(256)
TOKENS_PER_STEP = 32 * 256
STEPS = 2000
LRS = (0.001, 0.002, 0.004, 0.008)


@dataclass(frozen=True)
class Kind:
    """How a scheme behaves: final loss, best learning rate, spread over seeds, seeds that fail, whether |h| is kept."""

    name: str
    loss: float
    lr: float = 0.004
    spread: float = 0.004
    diverged: tuple[int, ...] = ()
    interrupted: tuple[int, ...] = ()
    collapsed: tuple[int, ...] = ()
    sphere: bool = True


KINDS = (
    Kind("pre-ln", 1.4210, lr=0.002, sphere=False),
    Kind("spheret:p=1", 1.3985),
    Kind("spheret:p=0.5,alpha=1", 1.4195, spread=0.008),
    Kind("geonorm", 1.4020, diverged=(3,)),
    Kind("ngpt", 1.4550, lr=0.008),
    Kind("post-ln", 1.4300, lr=0.001, collapsed=(2,), sphere=False),
)

Maker = Callable[..., Path]


@pytest.fixture
def make_comparison(tmp_path: Path) -> Maker:
    """make_comparison(kinds=KINDS, seeds=(1, 2, 3), command=...) -> folder with results.json and runs/."""

    def make(kinds: Sequence[Kind] = KINDS, seeds: Sequence[int] = (1, 2, 3), **extra: Any) -> Path:
        return write_comparison(tmp_path / "comparison", kinds, seeds, **extra)

    return make


@pytest.fixture
def kind() -> type[Kind]:
    return Kind


def write_comparison(folder: Path, kinds: Sequence[Kind], seeds: Sequence[int], **extra: Any) -> Path:
    entries = [_entry(folder, kind, seeds, number) for number, kind in enumerate(kinds)]
    results: dict[str, Any] = {
        "format": 1,
        "command": "spheret compare --schemes " + " ".join(kind.name for kind in kinds) + f" --seeds {len(seeds)}",
        "created": "2026-08-14T09:26:53+00:00",
        "settings": {
            "steps": STEPS,
            "lrs": list(LRS),
            "seeds": list(seeds),
            "tuning_seed": 1000,
            "batch_size": 32,
            "tokens_per_run": STEPS * TOKENS_PER_STEP,
            "model": {"n_layer": 6, "n_head": 4, "n_embd": 128, "block_size": 256, "vocab_size": 256, "bias": False},
        },
        "environment": {
            "versions": {"python": "3.11.4", "torch": "2.13.0", "spheret": "0.1.0"},
            "machine": {"device": "cpu", "cores": 2},
        },
        "data": {
            "name": "stdlib",
            "fingerprint": "5f0c2e7b9d3a41c8",
            "train_tokens": 24_113_870,
            "val_tokens": 2_679_318,
            "tokenizer": "bytes",
            "unigram_loss": UNIGRAM,
        },
        "schemes": with_to_baseline(summarise(entries), _curves(folder, entries), TOKENS_PER_STEP),
    }
    results["verdict"] = verdict(results)
    results |= extra
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, allow_nan=False), encoding="utf-8")
    return folder


def _entry(folder: Path, kind: Kind, seeds: Sequence[int], number: int) -> dict[str, Any]:
    noise = random.Random(number)
    tuning = []
    for lr in LRS:
        loss = kind.loss + 0.06 * math.log(lr / kind.lr) ** 2 + noise.gauss(0, 0.002)
        failed = not kind.sphere and lr > 3 * kind.lr
        tuning.append({"lr": lr, "val_loss": None if failed else loss, "outcome": "diverged" if failed else "finished"})
    return {
        "scheme": kind.name,
        "parameters": 1_212_416 + 24 * kind.sphere,
        "flops_per_token": 7_000_000 + 1_000_000 * (kind.name == "ngpt"),
        "lr": kind.lr,
        "lr_at_edge": kind.lr in (LRS[0], LRS[-1]),
        "tuning": [t | {"run": f"runs/{number}-lr{t['lr']:g}-tuning"} for t in tuning],
        "runs": [_run(folder, kind, seed, f"runs/{number}-seed{seed}", noise) for seed in seeds],
    }


def _run(folder: Path, kind: Kind, seed: int, name: str, noise: random.Random) -> dict[str, Any]:
    shared = random.Random(seed).gauss(0, 0.01)  # the same batches: part of the luck is common to all schemes
    loss = kind.loss + shared + noise.gauss(0, kind.spread)
    outcome, reason = "finished", None
    if seed in kind.collapsed:
        loss = UNIGRAM + 0.003
    if seed in kind.diverged:
        outcome, reason = "diverged", "loss is nan at step 700"
    if seed in kind.interrupted:
        outcome, reason = "interrupted", "stopped by the user"
    final = loss if outcome == "finished" else None
    run = folder / name
    run.mkdir(parents=True)
    metrics = _metrics(loss, until=STEPS if outcome == "finished" else 700)
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics), encoding="utf-8")
    (run / "config.json").write_text(json.dumps({"model": {"scheme": kind.name}, "lr": kind.lr, "seed": seed}))
    (run / "run.json").write_text(json.dumps({"outcome": outcome, "reason": reason, "final": {"val_loss": final}}))
    if outcome == "finished":
        (run / "diagnostics.json").write_text(json.dumps(_diagnostics(kind, noise)))
    return {
        "seed": seed,
        "outcome": outcome,
        "reason": reason,
        "collapsed": seed in kind.collapsed,
        "val_loss": final,
        "val_se": None if final is None else 0.0061,
        "val_bpb": None if final is None else final / math.log(2),
        "tokens_per_s": 18_400 + noise.gauss(0, 300),
        "run": name,
    }


def _metrics(final: float, until: int) -> list[dict[str, Any]]:
    records = []
    for step in range(0, until + 1, 50):
        loss = final + (START - final) * math.exp(-step / 130) + 0.35 * math.exp(-step / 700) * (1 - step / STEPS)
        record: dict[str, Any] = {"step": step, "tokens": step * TOKENS_PER_STEP, "loss": loss, "lr": 0.001}
        if step % 100 == 0:
            record |= {"val_loss": final if step == STEPS else loss, "val_se": 0.006}
        records.append(record)
    return records


def _curves(folder: Path, entries: Sequence[dict[str, Any]]) -> dict[str, list[list[tuple[int, float]]]]:
    """The validation curves of the runs that finished."""
    runs = {e["scheme"]: [folder / r["run"] for r in e["runs"] if r["outcome"] == "finished"] for e in entries}
    return {
        scheme: [[(m["tokens"], m["val_loss"]) for m in read_metrics(run) if "val_loss" in m] for run in found]
        for scheme, found in runs.items()
    }


def _diagnostics(kind: Kind, noise: random.Random) -> dict[str, list[Any]]:
    layers = [layer for layer in range(1, 7) for _ in range(2)]
    depth = range(1, 13)
    return {
        "layer": layers,
        "sublayer": ["attn", "mlp"] * 6,
        "hidden_norm": [1.0 if kind.sphere else 0.3 + 0.35 * i + noise.gauss(0, 0.03) for i in depth],
        "angle_deg": [(22 if kind.sphere else 50) / math.sqrt(i) + noise.gauss(0, 0.5) for i in depth],
        "update_ratio": [0.5 / math.sqrt(i) for i in depth],
        "skip_gain": [0.92 if kind.sphere else 1.0 for _ in depth],
        "token_cosine": [0.15 + 0.04 * i + noise.gauss(0, 0.01) for i in depth],
    }
