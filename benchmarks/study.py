"""Grids of training runs: variants over learning rates, seeds and model shapes, one table for each study.

    python benchmarks/study.py STUDY [--only 24x64 ...] [--variants spheret ...] [--seeds N] [--data FILE ...]
    python benchmarks/study.py STUDY --table     # only the table, from the committed results

Studies:
    default-range   how wide is the range of learning rates that trains, from 6 to 72 blocks and widths 64 to 256?
    settings        what does each setting of the sphere's default do, one changed at a time?
    exponent        which p is best after three budgets at two depths?
    exponent-range  at which learning rates does each p train, for small and for large steps?
    lr-bounds       what do bounds on the rates of queries, keys, values and last projections do, also for rivals?
    step-budget     how far may the sublayers turn the state: step sizes, caps, and what the head reads
    long            the three schemes of default-range after 2,000 steps
    documents       the same on real documents, with GPT-2 tokens: give --data openwebtext_train.parquet

Every run trains with the package's own trainer, if not said otherwise on the stdlib corpus (bytes). The results go to
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
from spheret.comparison.runs import RunSpec, digest
from spheret.comparison.statistics import mean_interval
from spheret.data import Dataset, prepare
from spheret.reporting.style import MARKERS, PALETTE, WIDTH, legend_below, render, styled
from spheret.training import RunResult, TrainConfig
from spheret.training.run_folder import write_bytes, write_text
from spheret.training.settings import RunSettings, scheme_lr

RESULTS = Path(__file__).parent / "results"
HEADER = ("shape", "variant", "lr_times_d", "seed", "scheme", "outcome", "collapsed", "val_loss")
StudyName = Literal[
    "default-range", "settings", "exponent", "exponent-range", "lr-bounds", "step-budget", "long", "documents"
]


@dataclass(frozen=True)
class Shape:
    """A model size and its budget."""

    n_layer: int
    n_embd: int
    steps: int = 200
    block_size: int = 64

    @property
    def name(self) -> str:
        """'24x64', and the steps where they are not 200: '24x64-400'."""
        return f"{self.n_layer}x{self.n_embd}" + ("" if self.steps == 200 else f"-{self.steps}")

    @property
    def tokens(self) -> int:
        return self.steps * BATCH * self.block_size


@dataclass(frozen=True)
class Variant:
    """A scheme, with {x/L} for a number over the depth, and the settings that differ from the defaults.

    Learning rates among the settings are in units of 1/d.
    """

    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def scheme_at(self, n_layer: int) -> str:
        return re.sub(r"\{([\d.]+)/L\}", lambda found: f"{float(found[1]) / n_layer:.6g}", self.scheme)


@dataclass(frozen=True)
class Study:
    """Variants by their names in the table, over learning rates (times 1/d) and shapes."""

    variants: Mapping[str, Variant]
    rates: tuple[float, ...]
    shapes: tuple[Shape, ...]


BATCH = 8
UNBOUNDED = {"qkv_lr": 0.0, "mlp_out_lr": 0.0}
UNIFORM_STEP = "alpha={1/L},decay=none,alpha-lr=0.05"
EXPONENTS = ("0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "inf")
THREE = {name: Variant(name) for name in ("spheret", "keel", "pre-ln")}
STUDIES: dict[StudyName, Study] = {
    "default-range": Study(
        THREE,
        (0.4, 0.8, 1.6, 3.2, 6.4),
        (
            *(Shape(n, 64) for n in (6, 12, 24, 48, 72)),
            *(Shape(n, 128) for n in (6, 12, 24)),
            *(Shape(n, 256) for n in (6, 12)),
            Shape(12, 128, steps=400, block_size=128),
        ),
    ),
    "settings": Study(
        {
            "default": Variant("spheret"),
            "untied head": Variant("spheret", {"head": "untied"}),
            "no warm-up": Variant("spheret", {"warmup_steps": 0}),
            "no weight decay": Variant("spheret", {"weight_decay": 0.0}),
            "weight decay 0.3": Variant("spheret", {"weight_decay": 0.3}),
            "QK norm": Variant("spheret", {"qk_norm": "rms"}),
            "nanoGPT's initial weights": Variant("spheret", {"init": "nanogpt"}),
            "one learning rate for all weights": Variant("spheret", UNBOUNDED),
            "head reads the state": Variant("spheret:head-input=state"),
            "alpha 0.5/L": Variant("spheret:alpha={0.5/L}"),
            "alpha 2/L": Variant("spheret:alpha={2/L}"),
            "alpha 1/L, 1/sqrt(l)": Variant("spheret:alpha={1/L},decay=inv-sqrt"),
            "first block: alpha 1, p = inf": Variant("spheret:p=inf,first-alpha=1"),
            "alpha not learned": Variant("spheret:alpha-lr=0"),
            "alpha at 0.2 of the rate": Variant("spheret:alpha-lr=0.2"),
            "alpha at the full rate": Variant("spheret:alpha-lr=1"),
            "updates divided by their RMS": Variant("spheret:update-norm=rms"),
            "preset=paper": Variant("spheret:preset=paper"),
            "pre-ln": Variant("pre-ln"),
            "pre-ln, branch 1/sqrt(2L)": Variant("pre-ln:branch=inv-sqrt"),
            "keel": Variant("keel"),
        },
        (0.8, 1.6, 3.2),
        (Shape(24, 64),),
    ),
    "exponent": Study(
        {f"p = {p}": Variant(f"spheret:p={p}") for p in EXPONENTS}
        | {"p = 4/L": Variant("spheret"), "p learned, one": Variant("spheret:p=learn")}
        | {"p learned, per connection": Variant("spheret:p=learn-per-layer")},
        (1.6,),
        tuple(Shape(n, 64, steps) for n in (12, 24) for steps in (100, 200, 400)),
    ),
    "exponent-range": Study(
        {f"p = {p}": Variant(f"spheret:p={p}") for p in EXPONENTS}
        | {f"p = {p}, alpha 1": Variant(f"spheret:p={p},alpha=1") for p in EXPONENTS},
        (0.4, 0.8, 1.6, 3.2, 6.4),
        (Shape(12, 64), Shape(24, 64)),
    ),
    "lr-bounds": Study(
        {
            f"{scheme}, {words}": Variant(scheme, settings)
            for scheme in ("spheret", "keel", "pre-ln")
            for words, settings in (
                ("one rate for all", UNBOUNDED),
                ("qkv at most 0.2/d", {"qkv_lr": 0.2, "mlp_out_lr": 0.0}),
                ("qkv at most 0.4/d", {"qkv_lr": 0.4, "mlp_out_lr": 0.0}),
                ("qkv and MLP out at most 0.4/d", {"qkv_lr": 0.4, "mlp_out_lr": 0.4}),
                ("default and QK norm", {"qk_norm": "rms"}),
            )
        },
        (0.4, 0.8, 1.6, 3.2),
        (Shape(24, 64),),
    ),
    "step-budget": Study(
        {
            name: Variant(scheme, UNBOUNDED)
            for name, scheme in {
                "pre-ln": "pre-ln",
                "keel": "keel",
                "proj, alpha 2/sqrt(L), 1/sqrt(l)": "proj:alpha=0.408248,decay=inv-sqrt,alpha-lr=1,head-input=state",
                "step 1/L": f"proj:{UNIFORM_STEP},head-input=state",
                "step 1/L, first block 1": f"proj:{UNIFORM_STEP},first-alpha=1,head-input=state",
                "step 1/L, head reads displacement": f"proj:{UNIFORM_STEP},head-input=displacement",
                "step 0.5/L, head reads displacement": "proj:alpha={0.5/L},decay=none,alpha-lr=0.05,"
                "head-input=displacement",
                "cap p = 1.2/L": "spheret:p={1.2/L},alpha=1,decay=none,alpha-lr=0.1,head-input=state",
                "cap p = 1.2/L, head reads displacement": "spheret:p={1.2/L},alpha=1,decay=none,alpha-lr=0.1,"
                "head-input=displacement",
            }.items()
        },
        (0.38, 0.77, 1.54),
        (Shape(24, 64),),
    ),
    "long": Study(THREE, (0.4, 0.8, 1.6, 3.2), (Shape(12, 64, steps=2000),)),
    "documents": Study(
        {name: Variant(variant.scheme, {"tokenizer": "gpt2"}) for name, variant in THREE.items()},
        (0.4, 0.8, 1.6, 3.2),
        (Shape(6, 64),),
    ),
}


@dataclass(frozen=True)
class Options:
    """Which part of a study to run."""

    study: tyro.conf.Positional[StudyName]
    only: tuple[str, ...] = ()
    """Shapes, such as 24x64. If not given: all of the study."""
    variants: tuple[str, ...] = ()
    """Variants, by their names in the table. If not given: all of the study."""
    seeds: int = 1
    """Seeds 1 to N."""
    out: Path = Path("runs/study")
    """Folder of the run folders."""
    table: bool = False
    """Train nothing; rebuild the table from the committed results."""
    data: tuple[str, ...] = RunSettings.data
    """Training text."""


def specs(study: Study, shape: Shape, options: Options, dataset: Dataset) -> Iterator[RunSpec]:
    """Every run of one shape; the run's `scheme` is the name of its variant."""
    for seed in range(1, options.seeds + 1):
        for name, variant in study.variants.items():
            if options.variants and name not in options.variants:
                continue
            own = {k: v / shape.n_embd if k.endswith("_lr") else v for k, v in variant.settings.items()}
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
                data=options.data,
                **own,
            )
            for rate in study.rates:
                config = settings.train_config(
                    variant.scheme_at(shape.n_layer),
                    lr=rate / shape.n_embd,
                    seed=seed,
                    vocab_size=dataset.tokenizer.vocab_size,
                    base=TrainConfig(save_final=False),
                )
                # Another data set, or a default that has changed, makes another run.
                folder = re.sub(r"[^\w.=-]+", "_", f"{name}-{rate:g}-{seed}-{digest(config, dataset.fingerprint)}")
                yield RunSpec(name, rate, seed, "seed", config, options.out / options.study / shape.name / folder)


def run(options: Options) -> None:
    """Train what is missing, and add it to the committed results."""
    study, path = STUDIES[options.study], results(options.study) / "runs.csv"
    rows = {tuple(row[:4]): row for row in read_rows(options.study)}

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

    tokenizer = next(iter(study.variants.values())).settings.get("tokenizer", RunSettings.tokenizer)
    dataset = prepare(RunSettings(data=options.data, tokenizer=tokenizer).data_config)
    runner = Runner(dataset.path, default_jobs("cpu"), on_end)
    for shape in study.shapes:
        if shape.name in (options.only or [shape.name for shape in study.shapes]):
            for spec in specs(study, shape, options, dataset):
                runner.add(spec)
    runner.run()


def results(name: StudyName) -> Path:
    return RESULTS / name.replace("-", "_")


def read_rows(name: StudyName) -> list[list[str]]:
    """The committed results without their header; none before the first run."""
    path = results(name) / "runs.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


@dataclass(frozen=True)
class Cell:
    """The runs of one variant at one learning rate."""

    losses: list[float]
    lost: list[str]
    """How the runs without a final loss ended."""
    collapsed: int

    @property
    def mean(self) -> float | None:
        """None if a run has no final loss."""
        return fmean(self.losses) if self.losses and not self.lost else None

    @property
    def half_width(self) -> float:
        """Half of the 95% interval of the mean; 0 for one seed."""
        high = mean_interval(self.losses).ci_high
        return 0.0 if high is None else high - fmean(self.losses)

    def __str__(self) -> str:
        if not self.losses:
            return ", ".join(self.lost)
        interval = f" ± {self.half_width:.3f}" if len(self.losses) > 1 else ""
        notes = ["c" if self.collapsed == 1 else f"{self.collapsed} c"] if self.collapsed else []
        return " ".join([f"{fmean(self.losses):.3f}{interval}", *notes, *self.lost])


def cells(name: StudyName) -> dict[tuple[str, str, float], Cell]:
    """By shape, variant and learning rate."""
    found: dict[tuple[str, str, float], list[list[str]]] = defaultdict(list)
    for row in read_rows(name):
        found[row[0], row[1], float(row[2])].append(row)
    return {
        key: Cell(
            [float(row[7]) for row in rows if row[5] == "finished"],
            [row[5] for row in rows if row[5] != "finished"],
            sum(row[6] == "True" for row in rows),
        )
        for key, rows in found.items()
    }


def table(name: StudyName) -> str:
    """Validation loss by variant (rows) and learning rate (columns), a section for each shape."""
    study, found = STUDIES[name], cells(name)
    lines = [
        "Validation loss in nats per token, by learning rate in units of 1/d: of one seed, or the mean over seeds with",
        "its 95% interval. `c`: collapsed to the unigram plateau. L is the number of blocks. Column `x 1/2 to x 4`, if",
        "the rates allow it: the largest loss from half to four times the scheme's default learning rate, above the",
        f"smallest of the row. `python benchmarks/study.py {name} --table` rebuilds the table from runs.csv;",
        "benchmarks/README.md has the command of the runs.",
    ]
    for shape in study.shapes:
        if not any(key[0] == shape.name for key in found):
            continue
        header = ["variant", *(f"{rate:g}/d" for rate in study.rates), "x 1/2 to x 4"]
        rows = [header, ["---", *["---:"] * (len(header) - 1)]]
        for label, variant in study.variants.items():
            row = {rate: found[key] for rate in study.rates if (key := (shape.name, label, rate)) in found}
            if row:
                losses = [str(row[rate]) if rate in row else "" for rate in study.rates]
                rows.append([label, *losses, _rise(row, variant.scheme_at(shape.n_layer), shape)])
        if not any(row[-1] for row in rows[2:]):
            rows = [row[:-1] for row in rows]
        lines += ["", f"## {shape.name}, {shape.steps} steps, {shape.tokens:,} tokens", ""]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, ""])


def _rise(row: Mapping[float, Cell], scheme: str, shape: Shape) -> str:
    """'+0.044', if the row has half and four times the default learning rate, and every run between them finished."""
    default = shape.n_embd * scheme_lr(scheme, n_embd=shape.n_embd, n_layer=shape.n_layer)
    inside = [row[rate].mean for rate in row if 0.45 * default < rate < 4.5 * default]
    known = [cell.mean for cell in row.values() if cell.mean is not None]
    complete = min(row) < 0.55 * default and max(row) > 3.5 * default
    if not complete or not inside or None in inside:
        return ""
    return f"{max(mean for mean in inside if mean is not None) - min(known):+.3f}"


def figure(name: StudyName) -> bytes:
    """The loss over the variants of a study at one learning rate, a line for each budget, a panel for each depth."""
    from matplotlib.figure import Figure

    study, found = STUDIES[name], cells(name)
    labels, (rate,) = list(study.variants), study.rates
    depths = sorted({shape.n_layer for shape in study.shapes if any(key[0] == shape.name for key in found)})
    with styled():
        drawn = Figure(figsize=(WIDTH, 2.6 * len(depths) + 0.5), layout="constrained")
        handles: dict[str, Any] = {}
        for n_layer, axes in zip(depths, drawn.subplots(len(depths), sharex=True, squeeze=False).flat, strict=True):
            shapes = [shape for shape in study.shapes if shape.n_layer == n_layer]
            for shape, color, marker in zip(shapes, PALETTE, MARKERS, strict=False):
                places = {i: found.get((shape.name, label, rate)) for i, label in enumerate(labels)}
                known = {i: cell for i, cell in places.items() if cell is not None and cell.losses}
                if known:
                    means, halves = zip(
                        *((fmean(cell.losses), cell.half_width) for cell in known.values()), strict=True
                    )
                    line = axes.errorbar(list(known), means, halves, color=color, marker=marker, ms=4, capsize=2)
                    handles[f"{shape.steps} steps"] = line
            axes.set_title(f"{n_layer} layers", loc="left", fontsize=9, color="#444444")
            axes.set_ylabel("validation loss")
            axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", rotation_mode="anchor")
        legend_below(drawn, [(line, label) for label, line in handles.items()])
        return render(drawn, key=name, title="", caption="", alt="").png(160)


def main(options: Options) -> None:
    if not options.table:
        run(options)
    path = results(options.study) / "table.md"
    write_text(path, table(options.study))
    if len(STUDIES[options.study].rates) == 1:
        write_bytes(path.with_name("figure.png"), figure(options.study))
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    assert set(STUDIES) == set(get_args(StudyName))
    main(tyro.cli(Options, description=__doc__))
