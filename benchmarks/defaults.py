"""Do the default initial scales and step sizes train from 6 to 72 layers and from d = 64 to d = 1280, untuned?

    python benchmarks/defaults.py [--out runs/defaults] [--only 24x64 ...]

Trains every scheme, and alternatives that were rejected, at several shapes and learning rates on the stdlib corpus
(bytes) with the package's own trainer. Writes ``benchmarks/results/defaults/{defaults.csv,table.md}``. Finished runs
are reused. Learning rates are multiples of 1/d, as everywhere in the package. The whole grid takes about an hour on two
quiet cores.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from spheret.comparison.runner import Runner, default_jobs
from spheret.comparison.runs import RunSpec
from spheret.data import Dataset, prepare
from spheret.training import RunResult, TrainConfig
from spheret.training.settings import RunSettings

RESULTS = Path(__file__).parent / "results" / "defaults"

DEFAULTS = ("pre-ln", "post-ln", "geonorm", "proj", "cay", "spheret:p=0.5")
REJECTED = (
    "proj:alpha=1",
    "post-ln:branch=1,residual=0.2",
    "pre-ln:gain=0.57,embedding-gain=0.57",
    "pre-ln:gain=1,embedding-gain=1",
    "pre-ln:branch=0.14,residual=1",
    "nanogpt-init pre-ln",
    "nanogpt-init proj",
)
# Embeddings with a standard deviation of 1/sqrt(d) instead of 8/d. At d = 64 the two are the same.
WIDE_EMBEDDING = {128: "proj:embedding-gain=1.414", 512: "proj:embedding-gain=2.828"}
NARROW = ("pre-ln", "post-ln", "geonorm", "proj", "spheret:p=0.5")


@dataclass(frozen=True)
class Shape:
    """A model size, its budget, and the peak learning rates in units of 1/d."""

    n_layer: int
    n_embd: int
    block_size: int
    batch_size: int
    steps: int
    eval_windows: int  # other windows, another text: losses can be compared within a shape, not between shapes
    rates: tuple[float, ...]
    schemes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.n_layer}x{self.n_embd}"


SHAPES = (
    Shape(6, 64, 64, 8, 250, 128, (0.12, 0.3), DEFAULTS + REJECTED),
    Shape(24, 64, 64, 8, 250, 128, (0.12, 0.3), DEFAULTS + REJECTED),
    Shape(72, 64, 64, 8, 250, 128, (0.12, 0.3), NARROW),
    Shape(12, 128, 128, 8, 200, 64, (0.5,), (*NARROW, WIDE_EMBEDDING[128])),
    Shape(6, 512, 64, 8, 100, 64, (0.5,), (*NARROW, WIDE_EMBEDDING[512])),
    Shape(6, 1280, 64, 4, 40, 64, (0.4,), ("pre-ln", "post-ln", "geonorm", "proj")),
)


@dataclass(frozen=True)
class Options:
    """Which part of the grid to run."""

    out: Path = Path("runs/defaults")
    """Folder of the run folders."""
    only: tuple[str, ...] = ()
    """Shapes such as 24x64. If not given: all."""


def specs(shape: Shape, dataset: Dataset, out: Path) -> Iterator[RunSpec]:
    """Every run of one shape, on one seed."""
    for rate in shape.rates:
        for name in shape.schemes:
            init, _, scheme = name.rpartition(" ")
            settings = RunSettings(
                n_layer=shape.n_layer,
                n_embd=shape.n_embd,
                n_head=max(1, shape.n_embd // 32),
                block_size=shape.block_size,
                batch_size=shape.batch_size,
                steps=shape.steps,
                init="nanogpt" if init else "auto",
                eval_interval=0,
                checkpoint_interval=0,
                eval_windows=shape.eval_windows,
            )
            lr = rate / shape.n_embd
            config = settings.train_config(
                scheme,
                lr=lr,
                seed=1,
                vocab_size=dataset.tokenizer.vocab_size,
                base=TrainConfig(save_final=False),
            )
            folder = out / shape.name / f"{name.replace(' ', '_').replace(':', '_')}-{rate:g}"
            yield RunSpec(name, rate, 1, "seed", config, folder)


def main(options: Options) -> None:
    shapes = [s for s in SHAPES if not options.only or s.name in options.only]
    dataset = prepare(RunSettings().data_config)
    ended: list[tuple[RunSpec, RunResult | None]] = []

    def on_end(spec: RunSpec, result: RunResult | None, *, reused: bool) -> None:
        ended.append((spec, result))
        loss = "crashed" if result is None or result.val_loss is None else f"{result.val_loss:.3f}"
        print(f"{spec.folder.parent.name:8s} {spec.scheme:24s} {spec.lr:g}/d  {loss}", flush=True)

    runner = Runner(dataset.path, default_jobs("cpu"), on_end)
    for shape in shapes:
        for spec in specs(shape, dataset, options.out):
            runner.add(spec)
    runner.run()
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_csv(ended)
    write_table(ended, shapes)


def write_csv(ended: list[tuple[RunSpec, RunResult | None]]) -> None:
    """One row per run."""
    with (RESULTS / "defaults.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["shape", "scheme", "lr_times_d", "lr", "steps", "tokens", "outcome", "collapsed", "val_loss", "val_se"]
        )
        for spec, r in ended:
            outcome = ("crashed", "", "", "") if r is None else (r.outcome, r.collapsed, r.val_loss, r.val_se)
            tokens = spec.config.total_steps * spec.config.tokens_per_step
            writer.writerow(
                [
                    spec.folder.parent.name,
                    spec.scheme,
                    spec.lr,
                    spec.config.lr,
                    spec.config.total_steps,
                    tokens,
                    *outcome,
                ]
            )


def write_table(ended: list[tuple[RunSpec, RunResult | None]], shapes: list[Shape]) -> None:
    """Validation loss by scheme (rows) and shape with learning rate (columns)."""
    columns = [(s.name, rate) for s in shapes for rate in s.rates]
    cells = {(spec.scheme, spec.folder.parent.name, spec.lr): result for spec, result in ended}
    lines = ["| scheme | " + " | ".join(f"{name}, lr {rate:g}/d" for name, rate in columns) + " |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for scheme in (*DEFAULTS, *REJECTED, *WIDE_EMBEDDING.values()):
        lines.append(f"| {scheme} | " + " | ".join(_cell(cells.get((scheme, *column))) for column in columns) + " |")
    text = (
        "Validation loss, nats per byte; **c**: collapsed to the unigram plateau. "
        "Rebuilt by `python benchmarks/defaults.py`.\n\n"
    )
    (RESULTS / "table.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def _cell(result: RunResult | None) -> str:
    if result is None or result.val_loss is None:
        return "-" if result is None else result.outcome
    return f"{result.val_loss:.3f}" + (" **c**" if result.collapsed else "")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
