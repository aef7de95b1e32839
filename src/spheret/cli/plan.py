"""`spheret plan`: lists the recipes, or shows what one costs before it is run."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from spheret.cli.console import flags_checked, output, say, say_hanging
from spheret.costs.cost import GPU, GPUS, RunCost, check_mfu, find_gpu, run_cost
from spheret.recipes import Recipe, find_recipe, list_recipes, recipe

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """List the recipes, or show what one costs: parameters, FLOPs, memory, and hours on GPUs. Nothing is trained.

    Example: spheret plan gpt2-small-12l --schemes pre-ln proj --gpu H100

    This also prints where each number of the recipe comes from, and the command that trains it.
    """

    # tyro shows an optional positional argument like a required one, so add the brackets by hand.
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]", help_behavior_hint="")] = ""
    """Recipe to plan, also accepted as --recipe NAME. Without it, all recipes are listed."""
    schemes: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """Schemes to plan for; all: every scheme that the recipe is meant for. If not given: the recipe's own."""
    gpu: tuple[str, ...] = tuple(GPUS)
    """GPUs for which to print hours and share of memory."""
    mfu: float = 0.4
    """Share of its peak speed that a GPU is assumed to reach (model FLOPs utilisation)."""

    def __post_init__(self) -> None:
        with flags_checked():
            check_mfu(self.mfu)
            for gpu in self.gpu:
                find_gpu(gpu)
            for one in self.recipes():
                one.train_config()

    def recipes(self) -> list[Recipe]:
        """The recipe with each of the given schemes. ValueError: an unknown recipe or scheme."""
        if not self.name:
            return []
        own = recipe(self.name)
        schemes = own.schemes if self.schemes == (ALL,) else self.schemes or (own.scheme,)
        return [recipe(self.name, scheme=scheme) for scheme in schemes]


def run(command: PlanCommand) -> int:
    """Print the list, or the costs; returns the exit code."""
    console = output()
    if not command.name:
        console.print(list_table({name: recipe(name) for name in list_recipes()}))
        say(console, "\n`spheret plan RECIPE` shows what one costs. `spheret train RECIPE` trains it.")
        return 0
    planned = command.recipes()
    _say_recipe(console, command.name, planned[0])
    costs: dict[str, RunCost] = {}
    with console.status("counting ...") as status:
        for one in planned:
            status.update(f"counting {one.scheme} ...")
            costs[one.scheme] = run_cost(one.train_config())
    _say_costs(console, costs, command)
    say(console, "\nTrain it with")
    say(console, f"  {shlex.join(_words(command.name, planned[0]))}", to_copy=True)
    return 0


def _say_recipe(console: Console, name: str, planned: Recipe) -> None:
    """Print the title, the numbers of the run, and where each of them comes from."""
    config, s = planned.train_config(), planned.settings
    say(console, f"{name}: {planned.title}\n")
    tokens = config.total_steps * config.tokens_per_step
    micro = -(-s.batch_size // s.grad_accum)
    cut = f" in {s.grad_accum} micro-batches of {micro}" if s.grad_accum > 1 else ""
    facts = {
        "model": f"{s.n_layer} blocks of width {s.n_embd}, {s.n_head} heads, context {s.block_size:,}, "
        f"vocabulary {config.model.vocab_size:,}",
        "data": f"{', '.join(s.data)}, tokenizer {s.tokenizer}",
        "budget": f"{tokens:,} tokens = {config.total_steps:,} steps of {s.batch_size} x {s.block_size:,}{cut}",
        "optimizer": f"AdamW, learning rate {config.lr:g} ({config.schedule} to {config.lr * config.min_lr_ratio:g}), "
        f"{config.total_warmup_steps:,} steps of warm-up, weight decay {config.weight_decay:g} ({planned.scheme})",
        "schemes": ", ".join(planned.schemes),
    }
    for key, text in facts.items():
        say_hanging(console, f"  {key:9}  ", text)
    for paragraph in _provenance(name):
        say(console)
        say_hanging(console, "", paragraph, "dim")
    say(console)


def _provenance(name: str) -> list[str]:
    """Where the numbers come from: the paragraphs of the docstrings of the recipe and of its file."""
    function: Callable[..., Any] = find_recipe(name)
    function = function.func if isinstance(function, partial) else function
    texts = inspect.getdoc(function) or "", (inspect.getdoc(sys.modules[function.__module__]) or "").replace("``", "")
    return [" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n")]


def _say_costs(console: Console, costs: dict[str, RunCost], command: PlanCommand) -> None:
    first = next(iter(costs.values()))
    console.print(size_table(costs))
    say(console)
    console.print(memory_table(costs))
    say_hanging(
        console,
        "",
        "Counted on one device in eager mode, with weights in float32 and matrix products in "
        f"{'bfloat16' if first.bfloat16 else 'float32'}. torch.compile keeps less. "
        "Recomputed: a step that keeps only the input of every block, which `spheret train` does not do.",
        "dim",
    )
    say(console)
    console.print(gpu_table(costs, [find_gpu(name) for name in command.gpu], command.mfu))
    say_hanging(
        console,
        "",
        f"Hours on one GPU at {command.mfu:.0%} of its peak speed (--mfu), without evaluations. Memory used: the peak "
        "of a step as a share of the GPU's memory.",
        "dim",
    )


def _words(name: str, planned: Recipe) -> list[str]:
    scheme = [] if planned.scheme == recipe(name).scheme else ["--scheme", planned.scheme]
    data = [] if planned.settings.data == ("stdlib",) else ["--data", "FOLDER"]
    return ["spheret", "train", "--recipe", name, *scheme, *data, "--out", f"runs/{name}"]


# --- tables: GB are 10^9 bytes ---


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
    """Bytes of a step, as the trainer runs it and with recomputed blocks."""
    header = ("scheme", "activations", "peak", "recomputed: activations", "peak", "extra FLOPs")
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
    """Hours and share of memory for every GPU and scheme."""
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
    """One decimal from 10 hours on, two significant digits below."""
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
