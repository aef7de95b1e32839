"""`spheret plan`: the recipes, and what one of them costs before it is run."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import tyro
from rich.console import Console

from spheret.cli.console import output, say, say_hanging
from spheret.cli.errors import flags_checked
from spheret.cli.plan_tables import gpu_table, list_table, memory_table, size_table
from spheret.costs.cost import RunCost, run_cost
from spheret.costs.gpus import GPUS, check_mfu, find_gpu
from spheret.recipes import Recipe, find_recipe, list_recipes, recipe

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """List the recipes, or say what one costs: parameters, FLOPs, memory, and hours on GPUs. Nothing is trained.

    Example: spheret plan gpt2-small-12l --scheme pre-ln proj --gpu H100

    The recipe's numbers and where each of them comes from are printed as well, and the command that trains it.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="")] = ""
    """Recipe to plan; without it, all are listed."""
    scheme: tuple[str, ...] = ()
    """Methods to plan it for: schemes, or all for every method that the recipe is meant for; none given: its first."""
    gpu: tuple[str, ...] = tuple(GPUS)
    """GPUs to tell hours and share of memory for."""
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
        """The recipe for each method asked for. ValueError: an unknown recipe or scheme."""
        if not self.name:
            return []
        own = recipe(self.name)
        schemes = own.schemes if self.scheme == (ALL,) else self.scheme or (own.scheme,)
        return [recipe(self.name, scheme=scheme) for scheme in schemes]


def run(command: PlanCommand) -> int:
    """Print the list, or the costs; returns the exit code."""
    console = output()
    if not command.name:
        console.print(list_table({name: recipe(name) for name in list_recipes()}))
        say(console, "\n`spheret plan RECIPE` says what one costs, `spheret train --recipe RECIPE` trains it.")
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
    """Title, numbers of the run, and where each of them comes from."""
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
        "methods": ", ".join(planned.schemes),
    }
    for key, text in facts.items():
        say_hanging(console, f"  {key:9}  ", text)
    for paragraph in _provenance(name):
        say(console)
        say_hanging(console, "", paragraph, "dim")
    say(console)


def _provenance(name: str) -> list[str]:
    """What is read, guessed and ours: the docstrings of the recipe and of its file, paragraph by paragraph."""
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
        f"Counted on one device in eager mode, products in {'bfloat16' if first.bfloat16 else 'float32'}, weights in "
        "float32. torch.compile keeps less. Recomputed: only the input of every block is kept, which `spheret train` "
        "does not do.",
        "dim",
    )
    say(console)
    console.print(gpu_table(costs, [find_gpu(name) for name in command.gpu], command.mfu))
    say_hanging(
        console,
        "",
        f"Hours on one GPU at {command.mfu:.0%} of its peak speed (--mfu), evaluations left out; memory: the peak of a "
        "step as a share of the GPU's.",
        "dim",
    )


def _words(name: str, planned: Recipe) -> list[str]:
    scheme = [] if planned.scheme == recipe(name).scheme else ["--scheme", planned.scheme]
    data = [] if planned.settings.data == ("stdlib",) else ["--data", "FOLDER"]
    return ["spheret", "train", "--recipe", name, *scheme, *data, "--out", f"runs/{name}"]
