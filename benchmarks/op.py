"""One connection alone at many widths and numbers of rows: benchmarks/results/op/{ROWSxDIM}.json and table.md.

python benchmarks/op.py                 # all shapes, about ten minutes on two quiet cores
python benchmarks/op.py 4096x768        # this shape, then the table
python benchmarks/op.py cold-4096x768   # this shape with empty caches before every call
python benchmarks/op.py all             # 4096x768 with every other connection: all-4096x768.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from spheret.benchmarking.op import ADD, OpBench, bench_op
from spheret.training.run_folder import read_json, write_json, write_text

RESULTS = Path(__file__).parent / "results" / "op"
SHAPES = ("64x128", "1024x128", "4096x128", "65536x128", "64x384", "4096x384", "64x768", "1024x768", "4096x768")
SHAPES += ("16384x768", "65536x768", "64x1024", "4096x1024", "64x4096", "4096x4096")
SHAPES += ("cold-4096x128", "cold-4096x768", "cold-4096x1024")
SPHERES = ("spheret:p=0.5", "proj", "cay", "spheret:p=3", "geonorm", "spheret:p=learn-per-layer")
BASELINES = ("pre-ln", "pre-ln (compiled)", "pre-ln:norm=rmsnorm (compiled)")
ALL, COLD = "all", "cold-"
HEADER = "| rows x d | add ms | Pre-LN ms | compiled ms | spheres ms | to Pre-LN | to compiled | to add | over all p |"


def measure(name: str) -> None:
    shape = name.removeprefix(COLD)
    rows, dim = (4096, 768) if shape == ALL else map(int, shape.split("x"))
    schemes = OpBench.schemes if shape == ALL else BASELINES + SPHERES
    # A multiple of the number of variants (the schemes, add and copy), so that every variant follows every other
    # equally often. 4096x768, the shape for which goals are set, gets the most rounds.
    each = 16 if (rows, dim) == (4096, 768) else 4 if rows * dim <= 4096 * 1024 else 2
    rounds = each * (len(schemes) + 2)
    torch.compiler.reset()
    setup = OpBench(schemes=schemes, rows=rows, dim=dim, rounds=rounds, cold=name.startswith(COLD))
    write_json(RESULTS / f"{name.replace(ALL, f'{ALL}-{rows}x{dim}')}.json", bench_op(setup))


def row(path: Path) -> tuple[bool, int, int, str]:
    result = read_json(path)
    ms = {v["variant"]: 1e3 * v["median_s"] for v in result["variants"]}
    spheres = sorted(ms[name] for name in SPHERES)
    sphere = spheres[len(spheres) // 2]
    pre, compiled = ms["pre-ln"], ms["pre-ln (compiled)"]
    rows, dim = result["settings"]["rows"], result["settings"]["dim"]
    ratios = (sphere / pre, sphere / compiled, sphere / ms[ADD], spheres[-1] / spheres[0])
    cells = (ms[ADD], pre, compiled, sphere, *ratios)
    cold = result["settings"]["cold"]
    label = f"{rows:,} x {dim:,}" + (", cold" if cold else "")
    return cold, dim, rows, f"| {label} | " + " | ".join(f"{c:.2f}" for c in cells) + " |"


def table() -> str:
    rows = sorted(row(path) for path in RESULTS.glob("*x*.json") if not path.stem.startswith((ALL, COLD + ALL)))
    return "\n".join(
        [
            "Forward and backward of one connection (next stream, next branch input, two gradients back) on the CPU,",
            "float32. Medians. `spheres` is the upper median of six exponents, the last column the slowest over",
            "the fastest of them. `cold`: with empty caches before every call, as in training; otherwise they hold",
            "what the variant before left. Rebuilt by `python benchmarks/op.py`.",
            "",
            HEADER,
            "| ---: " * 9 + "|",
            *(text for *_, text in rows),
            "",
        ]
    )


def main() -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for shape in sys.argv[1:] or (*SHAPES, ALL):
        print(f"{shape} ...", flush=True)
        measure(shape)
    write_text(RESULTS / "table.md", table())
    print(table())


if __name__ == "__main__":
    main()
