"""Names of recipes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spheret.recipes import angpt, cpu, gpt2, ngpt
from spheret.recipes.base import Recipe

# To add a recipe: a function that takes the scheme, with a default, and one line here.
RECIPES: dict[str, Callable[..., Recipe]] = {
    "cpu-demo": cpu.cpu_demo,
    "gpt2-small-12l": gpt2.small_12l,
    "gpt2-medium-24l": gpt2.medium_24l,
    "gpt2-large-36l": gpt2.large_36l,
    "gpt2-small-12l-fineweb-edu": partial(gpt2.small_12l, corpus=gpt2.FINEWEB_EDU),
    "gpt2-medium-24l-fineweb-edu": partial(gpt2.medium_24l, corpus=gpt2.FINEWEB_EDU),
    "gpt2-large-36l-fineweb-edu": partial(gpt2.large_36l, corpus=gpt2.FINEWEB_EDU),
    "ngpt-0.5b": ngpt.half_billion,
    "ngpt-1b": ngpt.one_billion,
    **angpt.RUNGS,
}


def list_recipes() -> list[str]:
    """Names of all recipes."""
    return list(RECIPES)


def find(name: str) -> Callable[..., Recipe]:
    """The function behind a name. ValueError: an unknown name; the message lists what there is."""
    if name not in RECIPES:
        raise ValueError(f"recipe = {name!r} is not known: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def recipe(name: str, *, scheme: str | None = None) -> Recipe:
    """The recipe of this name, for the method ``scheme`` or its own. ValueError: an unknown recipe or scheme."""
    build = find(name)
    return build() if scheme is None else build(scheme)
