"""How far may the sublayers turn the state: step sizes, caps and what the head reads, over the learning rate.

    python benchmarks/step_budget.py [--only 24x64 ...] [--seeds N] [--out runs/step-budget]
    python benchmarks/step_budget.py --table     # only the table, from the committed results

Trains every variant at three learning rates on the stdlib corpus (bytes) with the package's own trainer, and writes
``benchmarks/results/step_budget/{step_budget.csv,table.md}``. Finished runs are reused. Learning rates are multiples of
1/d. One seed takes about 10 minutes at 24x64 and 25 at 12x128 on two quiet cores.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import tyro

from spheret.comparison.runner import Runner, default_jobs
from spheret.comparison.runs import RunSpec
from spheret.data import Dataset, prepare
from spheret.training import RunResult, TrainConfig
from spheret.training.settings import RunSettings

RESULTS = Path(__file__).parent / "results" / "step_budget"
CSV = RESULTS / "step_budget.csv"
RATES = (0.38, 0.77, 1.54)  # times 1/d
# name: scheme, with {x/L} for a number over the depth
VARIANTS = {
    "pre-ln": "pre-ln",
    "keel": "keel",
    "proj": "proj",
    "step 1/L": "proj:alpha={1/L},decay=none,alpha-lr=0.05",
    "step 1/L, first block 1": "proj:alpha={1/L},decay=none,alpha-lr=0.05,first-alpha=1",
    "step 1/L, head reads displacement": "proj:alpha={1/L},decay=none,alpha-lr=0.05,head-input=displacement",
    "step 0.5/L, head reads displacement": "proj:alpha={0.5/L},decay=none,alpha-lr=0.05,head-input=displacement",
    "cap p = 1.2/L": "spheret:p={1.2/L},alpha=1,decay=none,alpha-lr=0.1",
    "cap p = 1.2/L, head reads displacement": "spheret:p={1.2/L},alpha=1,decay=none,alpha-lr=0.1,"
    "head-input=displacement",
}


@dataclass(frozen=True)
class Shape:
    """A model size and its budget."""

    n_layer: int
    n_embd: int
    block_size: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.n_layer}x{self.n_embd}"


SHAPES = (Shape(24, 64, 64, 200), Shape(12, 128, 128, 400), Shape(48, 64, 64, 200), Shape(6, 64, 64, 200))


@dataclass(frozen=True)
class Options:
    """Which part of the grid to run."""

    only: tuple[str, ...] = ("24x64", "12x128")
    """Shapes."""
    seeds: int = 1
    """Seeds 1 to N."""
    out: Path = Path("runs/step-budget")
    """Folder of the run folders."""
    table: bool = False
    """Train nothing; rebuild the table from the committed results."""


def scheme(variant: str, n_layer: int) -> str:
    """The scheme of a variant at a depth: {1.2/L} becomes 1.2 over the depth."""
    start, brace, rest = VARIANTS[variant].partition("{")
    if not brace:
        return start
    share, _, end = rest.partition("/L}")
    return f"{start}{float(share) / n_layer:.6g}{end}"


def specs(shape: Shape, options: Options, dataset: Dataset) -> Iterator[RunSpec]:
    """Every run of one shape; the run's `scheme` is the name of its variant."""
    settings = RunSettings(
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        n_head=shape.n_embd // 32,
        block_size=shape.block_size,
        batch_size=8,
        steps=shape.steps,
        eval_interval=0,
        checkpoint_interval=0,
        eval_windows=64,
    )
    for seed in range(1, options.seeds + 1):
        for variant in VARIANTS:
            for rate in RATES:
                config = settings.train_config(
                    scheme(variant, shape.n_layer),
                    lr=rate / shape.n_embd,
                    seed=seed,
                    vocab_size=dataset.tokenizer.vocab_size,
                    base=TrainConfig(save_final=False),
                )
                name = variant.replace(" ", "_").replace("/", "-")
                folder = options.out / shape.name / f"{name}-{rate:g}-{seed}"
                yield RunSpec(variant, rate, seed, "seed", config, folder)


def run(options: Options) -> None:
    """Train what is missing, and add it to the committed results."""
    dataset = prepare(RunSettings().data_config)
    rows = {tuple(row[:4]): row for row in read_rows()}

    def on_end(spec: RunSpec, result: RunResult | None, *, reused: bool) -> None:
        shape = spec.folder.parent.name
        ended = ("crashed", "", "") if result is None else (result.outcome, result.collapsed, result.val_loss)
        row = [shape, spec.scheme, f"{spec.lr:g}", str(spec.seed), spec.config.model.scheme, *map(str, ended)]
        rows[tuple(row[:4])] = row
        print("  ".join(row), flush=True)
        RESULTS.mkdir(parents=True, exist_ok=True)
        with CSV.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["shape", "variant", "lr_times_d", "seed", "scheme", "outcome", "collapsed", "val_loss"])
            writer.writerows(rows.values())

    runner = Runner(dataset.path, default_jobs("cpu"), on_end)
    for shape in SHAPES:
        if shape.name in options.only:
            for spec in specs(shape, options, dataset):
                runner.add(spec)
    runner.run()


def read_rows() -> list[list[str]]:
    """The committed results without their header; none before the first run."""
    if not CSV.exists():
        return []
    with CSV.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def table() -> str:
    """Validation loss by variant (rows) and learning rate (columns), a section for each shape."""
    cells: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for shape, variant, rate, _, _, outcome, collapsed, loss in read_rows():
        shown = f"{float(loss):.3f}" + (" c" if collapsed == "True" else "") if outcome == "finished" else outcome
        cells[shape, variant, rate].append(shown)
    lines = [
        "Validation loss in nats per byte, by learning rate in units of 1/d: every seed, and the mean where there are",
        "several. `c`: collapsed. L is the number of blocks. Rebuilt by `python benchmarks/step_budget.py`.",
    ]
    for shape in SHAPES:
        if not any(key[0] == shape.name for key in cells):
            continue
        tokens = shape.steps * 8 * shape.block_size
        lines += ["", f"## {shape.name}, {shape.steps} steps, {tokens:,} tokens", ""]
        lines += [
            "| variant | " + " | ".join(f"{rate:g}/d" for rate in RATES) + " |",
            "| --- " * (len(RATES) + 1) + "|",
        ]
        for variant in VARIANTS:
            shown = [_cell(cells[shape.name, variant, f"{rate:g}"]) for rate in RATES]
            lines.append(f"| {variant} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, ""])


def _cell(losses: list[str]) -> str:
    finished = [float(loss.split()[0]) for loss in losses if loss[0].isdigit()]
    mean = f" ({fmean(finished):.3f})" if len(finished) > 1 else ""
    return ", ".join(losses) + mean


def main(options: Options) -> None:
    if not options.table:
        run(options)
    (RESULTS / "table.md").write_text(table(), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
