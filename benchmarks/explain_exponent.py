"""What the exponent p does, seen from inside the model: benchmarks/results/explain_exponent/{figure.png,table.md}.

A byte-level GPT of 12x64 is trained for 100 steps at the default learning rate, without decay, for every p, with small
steps (the default alpha, 1/24) and with large ones (alpha = 1). Then four things are measured on validation text:

- the angle by which a sublayer turns the state, beside the largest that p allows, p 90 degrees;
- how near that comes to the cap, theta / (p 90 degrees);
- how far one more optimizer step turns the state after the last block, for the same text;
- what the model does to the difference between tokens: sqrt(1 - cosine) between the states of two tokens after the last
  block, over the same before the first one.

    python benchmarks/explain_exponent.py            # about three minutes on two cores
    python benchmarks/explain_exponent.py --figure   # only figure and table, from the committed measurements
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from spheret.data import prepare
from spheret.diagnostics import probe
from spheret.evaluation import Validation
from spheret.models import GPT
from spheret.reporting.style import PALETTE, WIDTH, legend_below, log_scale, render, styled
from spheret.training import TrainConfig, load_model, train
from spheret.training.run_folder import read_json, write_bytes, write_json, write_text
from spheret.training.settings import RunSettings

RESULTS = Path(__file__).parent / "results" / "explain_exponent"
RUNS = Path("runs/explain-exponent")
EXPONENTS = ("0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "inf")
STEPS = {"alpha = 1/24 (default)": "", "alpha = 1": ",alpha=1"}
TRAINED, N_EMBD = 100, 64


def measure(scheme: str, windows: Tensor, vocab_size: int) -> dict[str, Any]:
    """Train, take one more step, and measure before and after it."""
    states = []
    for steps in (TRAINED, TRAINED + 1):
        settings = RunSettings(
            n_layer=12, n_embd=N_EMBD, n_head=2, block_size=64, batch_size=8, steps=steps, warmup_steps=10,
            schedule="constant", eval_interval=0, checkpoint_interval=TRAINED, keep_checkpoints=0, eval_windows=32,
        )  # fmt: skip
        config = settings.train_config(scheme, lr=1.6 / N_EMBD, seed=1, vocab_size=vocab_size, base=TrainConfig())
        result = train(config, RUNS / scheme.replace(":", "-"), resume=steps > TRAINED)
        model = load_model(result.folder)
        states.append((model, ends(model, windows), result.val_loss))
    (model, (entry, last), loss), (_, (_, moved), _) = states
    found = probe(model, windows)
    return {
        "scheme": scheme,
        "val_loss": loss,
        "angle_deg": found["angle_deg"],
        "saturation": found["saturation"],
        "turn_per_step_deg": float(angles(last, moved).mean()),
        "gain_of_differences": spread(last) / spread(entry),
    }


@torch.no_grad()
def ends(model: GPT, idx: Tensor) -> tuple[Tensor, Tensor]:
    """The states before the first block and after the last one, (B, T, d)."""
    entry = h = model.embed(idx)
    branch = h
    for block in model.blocks:
        h, branch = block(h, branch)
    return entry, h


def angles(a: Tensor, b: Tensor) -> Tensor:
    """Degrees between the vectors of two tensors (..., d)."""
    return cosine_similarity(a, b, dim=-1).clamp(-1, 1).arccos().rad2deg()


def spread(h: Tensor) -> float:
    """sqrt(1 - cosine), mean over all pairs of different positions of a window."""
    unit = normalize(h, dim=-1)
    cosines = unit @ unit.transpose(1, 2)
    pairs = ~torch.eye(cosines.shape[-1], dtype=torch.bool)
    return float((1 - cosines[:, pairs]).clamp_min(0).sqrt().mean())


def figure(rows: dict[str, list[dict[str, Any]]]) -> bytes:
    """Four panels over p."""
    from matplotlib.figure import Figure

    panels = (
        ("angle of a sublayer (degrees)", lambda row: fmean(row["angle_deg"])),
        ("share of the largest angle", lambda row: fmean(row["saturation"])),
        ("turn per optimizer step (degrees)", lambda row: row["turn_per_step_deg"]),
        ("gain of differences between tokens", lambda row: row["gain_of_differences"]),
    )
    places = range(len(EXPONENTS))
    caps = [90 * float(p) for p in EXPONENTS]
    with styled():
        drawn = Figure(figsize=(2 * WIDTH, 5.2), layout="constrained")
        handles = []
        for axes, (label, value) in zip(drawn.subplots(2, 2).flat, panels, strict=True):
            for (name, measured), color, marker in zip(rows.items(), PALETTE, "os", strict=False):
                (line,) = axes.plot(places, [value(row) for row in measured], color=color, marker=marker, ms=4)
                handles.append((line, name))
            if axes is drawn.axes[0]:
                top = max(value(row) for measured in rows.values() for row in measured)
                shown = [(x, cap) for x, cap in zip(places, caps, strict=True) if cap < 4 * top]
                (line,) = axes.plot(*zip(*shown, strict=True), color="#4d4d4d", linestyle=":")
                handles.append((line, "largest angle, p 90 degrees"))
            if "degrees" in label:
                log_scale(axes)
            axes.set_xticks(places, EXPONENTS)
            axes.set_title(label, loc="left", fontsize=9, color="#444444")
            axes.set_xlabel("p")
        legend_below(drawn, handles[:3])
        return render(drawn, key="figure", title="", caption="", alt="").png(160)


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"12x64, {TRAINED} steps of 512 bytes at 1.6/d, one seed. Angles in degrees; the mean over all sublayers.",
        "Rebuilt by `python benchmarks/explain_exponent.py`.",
    ]
    for name, measured in rows.items():
        lines += ["", f"## {name}", "", "| p | cap | angle | share of the cap | turn per step | gain | val loss |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for p, row in zip(EXPONENTS, measured, strict=True):
            cap = "none" if math.isinf(float(p)) else f"{90 * float(p):.1f}"
            lines.append(
                f"| {p} | {cap} | {fmean(row['angle_deg']):.2f} | {fmean(row['saturation']):.2f} "
                f"| {row['turn_per_step_deg']:.2f} | {row['gain_of_differences']:.2f} | {row['val_loss']:.3f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    if "--figure" not in sys.argv:
        dataset = prepare(RunSettings().data_config)
        windows = torch.from_numpy(Validation.build(dataset, n_windows=16, block_size=64, batch_size=16).x)
        size = dataset.tokenizer.vocab_size
        shutil.rmtree(RUNS, ignore_errors=True)  # of a run of this script that was interrupted
        measured = {
            name: [measure(f"spheret:p={p}{alpha}", windows, size) for p in EXPONENTS] for name, alpha in STEPS.items()
        }
        shutil.rmtree(RUNS)
        RESULTS.mkdir(parents=True, exist_ok=True)
        write_json(RESULTS / "measured.json", measured)
    rows = read_json(RESULTS / "measured.json")
    write_bytes(RESULTS / "figure.png", figure(rows))
    write_text(RESULTS / "table.md", table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
