"""The tables of `spheret plan`. GB are 10^9 bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from spheret.costs.cost import RunCost
from spheret.costs.gpus import GPU
from spheret.recipes import Recipe


def list_table(recipes: Mapping[str, Recipe]) -> Table:
    """One line for each recipe."""
    rows = []
    for name, one in recipes.items():
        s = one.settings
        tokens = s.steps * s.batch_size * s.block_size
        rows.append((name, f"{s.n_layer} x {s.n_embd}", short(tokens), one.title))
    return _table(("recipe", "blocks x width", "tokens", "what it is"), rows, left=(0, 3))


def size_table(costs: Mapping[str, RunCost]) -> Table:
    """Parameters, arithmetic, and the bytes that do not depend on the batch."""
    header = ("scheme", "parameters", "FLOPs/token", "FLOPs", "weights", "gradients", "AdamW")
    return _table(
        header,
        [
            (
                scheme,
                f"{cost.parameters:,}",
                scientific(cost.flops_per_token),
                scientific(cost.flops),
                *(size(n) for n in (cost.memory.weights, cost.memory.gradients, cost.memory.optimizer)),
            )
            for scheme, cost in costs.items()
        ],
    )


def memory_table(costs: Mapping[str, RunCost]) -> Table:
    """Bytes of a step, as it is and with the blocks recomputed."""
    header = ("scheme", "activations", "peak", "recomputed: activations", "peak", "more FLOPs")
    return _table(
        header,
        [
            (
                scheme,
                *(size(n) for m in (cost.memory, cost.recomputed) for n in (m.activations, m.peak)),
                f"{cost.recompute_flops_per_token / cost.flops_per_token:.0%}",
            )
            for scheme, cost in costs.items()
        ],
    )


def gpu_table(costs: Mapping[str, RunCost], gpus: Iterable[GPU], mfu: float) -> Table:
    """Hours and shares of memory, GPU by GPU."""
    header = ("GPU", "memory", "TFLOP/s", "scheme", "hours", "memory used", "recomputed")
    rows = []
    for gpu in gpus:
        for scheme, cost in costs.items():
            speed = gpu.bfloat16 if cost.bfloat16 else gpu.float32
            rows.append(
                (
                    gpu.name,
                    size(gpu.memory),
                    f"{speed / 1e12:g}",
                    scheme,
                    hours(cost.hours(gpu, mfu)),
                    _share(cost.memory.peak, gpu),
                    _share(cost.recomputed.peak, gpu),
                )
            )
    return _table(header, rows, left=(0, 3))


def size(n: float) -> str:
    """1.5e9 -> 1.50 GB."""
    unit, name = next(((u, s) for u, s in ((1e9, "GB"), (1e6, "MB")) if n >= u), (1e3, "kB"))
    return f"{n / unit:.2f} {name}" if n % unit else f"{n / unit:.0f} {name}"


def short(n: float) -> str:
    """6.5536e9 -> 6.55B."""
    unit, name = next(((u, s) for u, s in ((1e9, "B"), (1e6, "M")) if n >= u), (1e3, "k"))
    return f"{n / unit:.3g}{name}"


def hours(n: float) -> str:
    """Tenths from 10 hours on, two digits below."""
    return f"{n:,.1f}" if n >= 10 else f"{n:.2g}"


def scientific(n: float) -> str:
    """5.6e18 -> 5.600e18."""
    mantissa, _, exponent = f"{n:.3e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _share(peak: int, gpu: GPU) -> str:
    share = peak / gpu.memory
    return f"{share:.0%}" if share <= 1 else f"too much: {share:.0%}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: tuple[int, ...] = (0,)) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i in left else "right")
    for row in rows:
        table.add_row(*row)
    return table
