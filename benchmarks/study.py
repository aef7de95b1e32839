"""Grids of training runs: variants over learning rates, seeds and model shapes, one table for each study.

    python benchmarks/study.py STUDY [--only 24x64 ...] [--seeds N] [--out runs/study]
    python benchmarks/study.py STUDY --table     # only the table, from the committed results

Studies:
    default-range   how wide is the range of learning rates that trains, from 6 to 72 blocks and widths 64 to 256?
    lr-factors      what do slower queries, keys, values and last projections do, for the sphere and its rivals?
    step-budget     how far may the sublayers turn the state: step sizes, caps, and what the head reads

Every run trains on the stdlib corpus (bytes) with the package's own trainer. The results go to
``benchmarks/results/<study>/{runs.csv,table.md}``. Finished runs are reused. Learning rates are multiples of 1/d.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import tyro

from spheret.comparison.runner import Runner, default_jobs
from spheret.comparison.runs import RunSpec
from spheret.data import Dataset, prepare
from spheret.training import RunResult, TrainConfig
from spheret.training.run_folder import write_text
from spheret.training.settings import RunSettings

RESULTS = Path(__file__).parent / "results"
HEADER = ("shape", "variant", "lr_times_d", "seed", "scheme", "outcome", "collapsed", "val_loss")
StudyName = Literal["default-range", "lr-factors", "step-budget"]


@dataclass(frozen=True)
class Shape:
    """A model size and its budget."""

    n_layer: int
    n_embd: int
    block_size: int = 64
    steps: int = 200

    @property
    def name(self) -> str:
        return f"{self.n_layer}x{self.n_embd}"

    @property
    def tokens(self) -> int:
        return self.steps * BATCH * self.block_size


BATCH = 8
SHAPES = (
    *(Shape(n, 64) for n in (6, 12, 24, 48, 72)),
    *(Shape(6, 128, 128, 400), Shape(12, 128, 128, 400), Shape(24, 128), Shape(48, 128)),
    *(Shape(n, 256) for n in (6, 12, 24)),
)


@dataclass(frozen=True)
class Variant:
    """A scheme, with {x/L} for a number over the depth, and the settings that differ from the study's."""

    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def scheme_at(self, n_layer: int) -> str:
        return re.sub(r"\{([\d.]+)/L\}", lambda found: f"{float(found[1]) / n_layer:.6g}", self.scheme)


@dataclass(frozen=True)
class Study:
    """Variants by their names in the table, over learning rates (times 1/d)."""

    variants: Mapping[str, Variant]
    rates: tuple[float, ...]
    only: tuple[str, ...]
    """The shapes that run unless others are asked for."""


UNIFORM = {"qkv_lr": 1.0, "mlp_out_lr": 1.0}
SLOW_QKV = {"qkv_lr": 0.25, "mlp_out_lr": 1.0}
SLOW_BOTH = {"qkv_lr": 0.25, "mlp_out_lr": 0.25}
UNIFORM_STEP = "alpha={1/L},decay=none,alpha-lr=0.05"
STUDIES: dict[StudyName, Study] = {
    "default-range": Study(
        {name: Variant(name) for name in ("spheret", "keel", "pre-ln")},
        (0.4, 0.8, 1.6, 3.2, 6.4),
        tuple(shape.name for shape in SHAPES),
    ),
    "lr-factors": Study(
        {
            f"{scheme}, {words}": Variant(scheme, settings)
            for scheme in ("spheret", "keel", "pre-ln")
            for words, settings in (
                ("one rate for all", UNIFORM),
                ("qkv 1/4", SLOW_QKV),
                ("qkv and MLP out 1/4", SLOW_BOTH),
                ("the same and QK norm", SLOW_BOTH | {"qk_norm": "rms"}),
            )
        },
        (0.4, 0.8, 1.6, 3.2),
        ("24x64",),
    ),
    "step-budget": Study(
        {
            name: Variant(scheme, UNIFORM)
            for name, scheme in {
                "pre-ln": "pre-ln",
                "keel": "keel",
                "proj, alpha 2/sqrt(L), 1/sqrt(l)": "proj:alpha=0.408248,decay=inv-sqrt,alpha-lr=1,head-input=state",
                "step 1/L": f"proj:{UNIFORM_STEP},head-input=state",
                "step 1/L, first block 1": f"proj:{UNIFORM_STEP},first-alpha=1,head-input=state",
                "step 1/L, head reads displacement": f"proj:{UNIFORM_STEP},head-input=displacement",
                "step 0.5/L, head reads displacement": f"proj:{UNIFORM_STEP.replace('1/L', '0.5/L')},head-input=displacement",
                "cap p = 1.2/L": "spheret:p={1.2/L},alpha=1,decay=none,alpha-lr=0.1,head-input=state",
                "cap p = 1.2/L, head reads displacement": "spheret:p={1.2/L},alpha=1,decay=none,alpha-lr=0.1,"
                "head-input=displacement",
            }.items()
        },
        (0.38, 0.77, 1.54),
        ("24x64",),
    ),
}


@dataclass(frozen=True)
class Options:
    """Which part of a study to run."""

    study: tyro.conf.Positional[StudyName]
    only: tuple[str, ...] = ()
    """Shapes, such as 24x64. If not given: the study's."""
    seeds: int = 1
    """Seeds 1 to N."""
    out: Path = Path("runs/study")
    """Folder of the run folders."""
    table: bool = False
    """Train nothing; rebuild the table from the committed results."""


def specs(study: Study, shape: Shape, options: Options, dataset: Dataset) -> Iterator[RunSpec]:
    """Every run of one shape; the run's `scheme` is the name of its variant."""
    for seed in range(1, options.seeds + 1):
        for name, variant in study.variants.items():
            settings = RunSettings(
                n_layer=shape.n_layer,
                n_embd=shape.n_embd,
                n_head=shape.n_embd // 32,
                block_size=shape.block_size,
                batch_size=BATCH,
                steps=shape.steps,
                eval_interval=0,
                checkpoint_interval=0,
                eval_windows=64,
                **variant.settings,
            )
            for rate in study.rates:
                config = settings.train_config(
                    variant.scheme_at(shape.n_layer),
                    lr=rate / shape.n_embd,
                    seed=seed,
                    vocab_size=dataset.tokenizer.vocab_size,
                    base=TrainConfig(save_final=False),
                )
                folder = re.sub(r"[^\w.=-]+", "_", f"{name}-{rate:g}-{seed}")
                yield RunSpec(name, rate, seed, "seed", config, options.out / options.study / shape.name / folder)


def run(options: Options) -> None:
    """Train what is missing, and add it to the committed results."""
    study, dataset = STUDIES[options.study], prepare(RunSettings().data_config)
    path = RESULTS / options.study.replace("-", "_") / "runs.csv"
    rows = {tuple(row[:4]): row for row in read_rows(path)}

    def on_end(spec: RunSpec, result: RunResult | None, *, reused: bool) -> None:
        shape = spec.folder.parent.name
        ended = ("crashed", "", "") if result is None else (result.outcome, result.collapsed, result.val_loss)
        row = [shape, spec.scheme, f"{spec.lr:g}", str(spec.seed), spec.config.model.scheme, *map(str, ended)]
        rows[tuple(row[:4])] = row
        print("  ".join(row), flush=True)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([HEADER, *rows.values()])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text.getvalue())

    runner = Runner(dataset.path, default_jobs("cpu"), on_end)
    for shape in SHAPES:
        if shape.name in (options.only or study.only):
            for spec in specs(study, shape, options, dataset):
                runner.add(spec)
    runner.run()


def read_rows(path: Path) -> list[list[str]]:
    """The committed results without their header; none before the first run."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def table(name: StudyName) -> str:
    """Validation loss by variant (rows) and learning rate (columns), a section for each shape."""
    study, cells = STUDIES[name], defaultdict[tuple[str, str, float], list[str]](list)
    for shape, variant, rate, _, _, outcome, collapsed, loss in read_rows(
        RESULTS / name.replace("-", "_") / "runs.csv"
    ):
        shown = f"{float(loss):.3f}" + (" c" if collapsed == "True" else "") if outcome == "finished" else outcome
        cells[shape, variant, float(rate)].append(shown)
    lines = [
        "Validation loss in nats per byte, by learning rate in units of 1/d: every seed, and the mean where there are",
        "several. `c`: collapsed to the unigram plateau. L is the number of blocks. `spread`: the largest loss of the",
        f"row above its smallest. Rebuilt by `python benchmarks/study.py {name}`.",
    ]
    for shape in SHAPES:
        if not any(key[0] == shape.name for key in cells):
            continue
        header = ["variant", *(f"{rate:g}/d" for rate in study.rates), "spread"]
        lines += ["", f"## {shape.name}, {shape.steps} steps, {shape.tokens:,} tokens", "", _row(header)]
        lines.append(_row(["---", *["---:"] * (len(header) - 1)]))
        for variant in study.variants:
            losses = [cells[shape.name, variant, rate] for rate in study.rates]
            means = [_mean(cell) for cell in losses]
            known = [mean for mean in means if mean is not None]
            spread = f"{max(known) - min(known):.3f}" if known and len(known) == len(means) else ""
            lines.append(_row([variant, *(_cell(cell) for cell in losses), spread]))
    return "\n".join([*lines, ""])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mean(losses: list[str]) -> float | None:
    """The mean loss over seeds; None where a run has not finished."""
    finished = [float(loss.split()[0]) for loss in losses if loss[0].isdigit()]
    return fmean(finished) if finished and len(finished) == len(losses) else None


def _cell(losses: list[str]) -> str:
    mean = _mean(losses)
    return ", ".join(losses) + (f" ({mean:.3f})" if mean is not None and len(losses) > 1 else "")


def main(options: Options) -> None:
    if not options.table:
        run(options)
    path = RESULTS / options.study.replace("-", "_") / "table.md"
    write_text(path, table(options.study))
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    assert set(STUDIES) == set(get_args(StudyName))
    main(tyro.cli(Options, description=__doc__))
