"""The settings of a comparison, and its runs."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from spheret import __version__
from spheret.connections import canonical_name, parse_scheme
from spheret.recipes.base import COMPARED, COMPARED_SCHEMES
from spheret.training import TrainConfig, config_to_dict
from spheret.training.device import resolve_device, resolve_dtype
from spheret.training.run_folder import MAY_CHANGE
from spheret.training.settings import RunSettings, default_lr, flags, scheme_lr

RESULTS_NAME = "results.json"
TUNING_SEED = 0
LR_SHARES = (0.4, 0.8, 1.6, 3.2)
"""Default learning rates times the width d: `LR_SHARE`, half of it, twice and four times."""
Purpose = Literal["tuning", "seed"]


class ByWidth(tuple[float, ...]):
    """Default learning rates, which each scheme multiplies by its own factor. A user's rates hold for every scheme."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunSettings):
    """Schemes x learning rates x seeds on one corpus under one budget. The defaults take minutes on two CPU cores.

    Each scheme is judged at its own best learning rate, chosen on a seed that is not reported.
    """

    schemes: tuple[str, ...] = COMPARED_SCHEMES
    """Residual schemes (see `spheret schemes`). The first is the baseline of every difference."""
    sweep: str | None = None
    """Add schemes that differ in one option, [SCHEME:]OPTION=V1,V2,...: p=0.1,1,inf (of spheret), keel:alpha=4,8."""
    lrs: tuple[float, ...] = ()
    """Peak learning rates to try for each scheme. If not given: 0.4/d, 0.8/d, 1.6/d and 3.2/d, times its own factor."""
    seeds: int = 3
    """Reported runs per scheme, at its best learning rate. Fewer than 2 give no verdict."""
    out: Path = Path("runs/compare")
    """Folder of the report and the runs. The same command again runs what is missing."""
    jobs: int = 0
    """Runs at a time. 0: one per CPU core, or one on a GPU. Each run gets an equal share of the cores."""
    all_pairs: bool = False
    """Also compare every scheme with every other, not only with the baseline."""
    n_layer: int = COMPARED.n_layer
    """Number of blocks, each an attention and an MLP sublayer."""
    n_head: int = COMPARED.n_head
    """Number of attention heads."""
    n_embd: int = COMPARED.n_embd
    """Width d of the hidden state."""
    block_size: int = COMPARED.block_size
    """Context length, tokens."""
    batch_size: int = COMPARED.batch_size
    """Sequences per optimizer step."""
    steps: int = COMPARED.steps
    """Optimizer steps of a run."""
    checkpoint_interval: int = 0
    """Steps between checkpoints. 0: none. A comparison keeps no weights, so here that is the default."""

    def __post_init__(self) -> None:
        names = [canonical_name(s) for s in self.schemes]
        if not names:
            raise ValueError("no schemes given: name at least one after --schemes, for example pre-ln proj")
        if repeated := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"scheme {repeated[0]} is given twice (other spellings included): name it once")
        if not self.lrs or isinstance(self.lrs, ByWidth):
            object.__setattr__(self, "lrs", ByWidth(default_lr(self.n_embd, share) for share in LR_SHARES))
        if len(set(self.lrs)) < len(self.lrs):
            raise ValueError(f"lrs = {self.lrs}: a learning rate is given twice; name it once")
        if str(self.out) == "":
            raise ValueError("out = '' names no folder: give the folder of the report, or . for the current one")
        object.__setattr__(self, "out", Path(self.out))
        if self.seeds < 1:
            raise ValueError(f"seeds = {self.seeds}: at least 1 run per scheme is needed, 3 or more for a verdict")
        if self.jobs < 0:
            raise ValueError(f"jobs = {self.jobs}: give 0 (automatic) or the number of runs at a time")
        names = self.names  # checks the sweep
        for lr in self.lrs:  # a run's configuration checks itself: let it fail here, before anything starts
            self.train_config(names[0], lr=lr, seed=0, vocab_size=1)

    @property
    def names(self) -> list[str]:
        """Canonical scheme names, in the order given; then those that the sweep adds."""
        swept = parse_sweep(self.sweep).names if self.sweep else ()
        return list(dict.fromkeys([*map(canonical_name, self.schemes), *swept]))

    def rates(self, scheme: str) -> tuple[float, ...]:
        """Learning rates to try for a scheme: the given ones, else the scheme's own."""
        if not isinstance(self.lrs, ByWidth):
            return self.lrs
        return tuple(scheme_lr(scheme, n_embd=self.n_embd, n_layer=self.n_layer, share=share) for share in LR_SHARES)

    @property
    def total_runs(self) -> int:
        """Tuning runs (if there are several learning rates) and reported runs of all schemes."""
        return len(self.names) * (self.seeds + (len(self.lrs) if len(self.lrs) > 1 else 0))

    def command(self) -> str:
        """The command line that repeats this comparison; options at their defaults are omitted."""
        never = ("lrs",) if isinstance(self.lrs, ByWidth) else ()
        words = flags(self, always=("schemes", "lrs", "seeds", "steps"), never=never)
        return shlex.join(["spheret", "compare", *words])


@dataclass(frozen=True)
class Sweep:
    """One option of a scheme at several values; `names` are the canonical names of the schemes that result."""

    scheme: str
    option: str
    values: tuple[str, ...]
    names: tuple[str, ...]


def parse_sweep(text: str) -> Sweep:
    """Read ``[SCHEME:]OPTION=V1,V2,...``; without a scheme, the option is one of ``spheret``.

    The scheme may have options of its own, as in ``spheret:decay=none,p=0.1,1,inf``: the last option is the one that
    varies. Values that give the same scheme count once.

    ValueError: another form, an unknown scheme, option or value, or fewer than two different values.
    """
    head, _, values = text.strip().rpartition("=")
    start = head if ":" in head else f"spheret:{head}"
    scheme, option = re.split(r"[:,](?=[^:,]*$)", start)
    if not option.strip():
        raise ValueError(
            f"sweep = {text!r}: write [SCHEME:]OPTION=V1,V2,..., for example p=0.1,1,inf or keel:alpha=4,8"
        )
    found: dict[str, str] = {}
    for value in values.split(","):
        found.setdefault(canonical_name(f"{start}={value.strip()}"), value.strip())
    if len(found) < 2:
        raise ValueError(f"sweep = {text!r}: give two different values or more, for example {head}=0.5,1,2")
    return Sweep(scheme, option.strip(), tuple(found.values()), tuple(found))


@dataclass(frozen=True)
class RunSpec:
    """One run of a comparison."""

    scheme: str
    lr: float
    seed: int
    purpose: Purpose
    config: TrainConfig
    folder: Path

    @property
    def label(self) -> str:
        """The run's name in messages."""
        return f"{self.scheme} lr {self.lr:g} " + ("tuning" if self.purpose == "tuning" else f"seed {self.seed}")


def tuning_runs(config: CompareConfig, scheme: str, vocab_size: int, fingerprint: str) -> Iterator[RunSpec]:
    """One run per learning rate, on the tuning seed; none if there is one rate, and so nothing to choose."""
    for lr in config.rates(scheme) if len(config.lrs) > 1 else ():
        yield _spec(config, scheme, lr, TUNING_SEED, "tuning", vocab_size, fingerprint)


def seed_runs(config: CompareConfig, scheme: str, lr: float, vocab_size: int, fingerprint: str) -> Iterator[RunSpec]:
    """The reported runs, at one learning rate, with seeds from 1."""
    for seed in range(1, config.seeds + 1):
        yield _spec(config, scheme, lr, seed, "seed", vocab_size, fingerprint)


def _spec(
    config: CompareConfig, scheme: str, lr: float, seed: int, purpose: Purpose, vocab_size: int, fingerprint: str
) -> RunSpec:
    run = config.train_config(scheme, lr=lr, seed=seed, vocab_size=vocab_size, base=TrainConfig(save_final=False))
    name = f"{_slug(scheme)}-lr{lr:g}-seed{seed}-{digest(run, fingerprint)}"
    return RunSpec(scheme, lr, seed, purpose, run, config.out / "runs" / name)


def _slug(scheme: str) -> str:
    # A file name has at most 255 bytes. Two long names with the same start differ in the digest.
    return re.sub(r"[^A-Za-z0-9.]+", "-", scheme).strip("-")[:80]


def digest(run: TrainConfig, fingerprint: str) -> str:
    """Short hash of everything that decides a run's result, so that a folder of this name holds this run and no other.

    It covers the scheme with all its options, and the version of this package, because defaults may change.
    """
    values: dict[str, Any] = {k: v for k, v in config_to_dict(run).items() if k not in MAY_CHANGE}
    del values["init_from"]  # no run of a comparison starts from other weights
    values["data"], values["scheme"] = fingerprint, repr(parse_scheme(run.model.scheme))
    values["spheret"] = __version__
    if run.dtype == "auto" and resolve_dtype("auto", resolve_device(run.device)) == torch.bfloat16:
        values["dtype"] = "bfloat16"  # `auto` is float32 on a CPU, which is another run: a table must not mix the two
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
