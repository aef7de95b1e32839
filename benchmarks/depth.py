"""Which scheme is best at 12, 24 and 48 layers, each at its own best learning rate: benchmarks/results/depth/table.md.

python benchmarks/depth.py [12 24]   # trains two runs at a time, an hour on two cores; resumes where it stopped
python benchmarks/depth.py --table   # only the table, from the committed results
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from spheret.reporting import markdown, pairs_markdown
from spheret.training.run_folder import read_json

RESULTS = Path(__file__).parent / "results" / "depth"
SCHEMES = ("pre-ln", "pre-ln:branch=inv-sqrt", "peri-ln", "post-ln", "keel", "geonorm", "spheret")
DEPTHS = (12, 24, 48)
RATES = ("0.0015625", "0.003125", "0.00625", "0.0125", "0.025", "0.05")  # 0.1/d to 3.2/d
# So small that two cores train all 231 runs within the hour. This shows only the start of training.
SHAPE = ("--n-embd", "64", "--n-head", "2", "--block-size", "64", "--batch-size", "4", "--steps", "200")
SHAPE += ("--eval-interval", "50", "--eval-windows", "64", "--seeds", "5", "--all-pairs")


def train(n_layer: int, out: Path) -> None:
    command = [sys.executable, "-m", "spheret", "compare", "--n-layer", str(n_layer), *SHAPE]
    subprocess.run([*command, "--schemes", *SCHEMES, "--lrs", *RATES, "--out", str(out)], check=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for suffix in ("json", "csv"):
        shutil.copy(out / f"results.{suffix}", RESULTS / f"{n_layer}.{suffix}")


def mark(run: dict[str, Any]) -> str:
    """The loss of a finished run, the outcome of any other."""
    if run["outcome"] != "finished":
        return run["outcome"]
    return f"{run['val_loss']:.3f}" + (" c" if run["collapsed"] else "")


def tuning_row(entry: dict[str, Any], rates: list[float]) -> str:
    tuning = {run["lr"]: mark(run) for run in entry["tuning"]}
    best = f"{entry['lr']:g}" + ("*" if entry["lr_at_edge"] else "") if entry["lr"] is not None else "none"
    return f"| `{entry['scheme']}` | " + " | ".join([*(tuning.get(rate, "") for rate in rates), best]) + " |"


def table() -> str:
    lines = [
        "Validation loss in nats per byte after 200 steps of 256 tokens at width 64. For each depth: one tuning run at",
        "every learning rate (`c`: collapsed to the unigram plateau; `*`: the best rate is the grid's first or last),",
        "five other seeds at the best rate, and every pair of schemes. Rebuilt by `python benchmarks/depth.py`.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        results = read_json(path)
        rates = results["settings"]["lrs"]
        columns = ["scheme", *(f"{rate:g}" for rate in rates), "best"]
        lines += ["", f"## {path.stem} layers", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        lines += [tuning_row(entry, rates) for entry in results["schemes"]]
        lines += ["", markdown(results), "", pairs_markdown(results)]
    return "\n".join([*lines, ""])


def main() -> None:
    if "--table" not in sys.argv:
        for n_layer in [int(word) for word in sys.argv[1:]] or DEPTHS:
            train(n_layer, Path("runs") / f"depth-{n_layer}")
    (RESULTS / "table.md").write_text(table(), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
