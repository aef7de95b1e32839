"""Recipes: functions that return the frozen configuration of a published run, or of one of our own.

config = recipe("gpt2-small-12l", scheme="proj").train_config()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spheret.recipes import angpt, gpt2, ngpt
from spheret.recipes.base import Recipe, cpu_demo

__all__ = ["RECIPES", "Recipe", "find_recipe", "list_recipes", "recipe"]

# To add a recipe: a function that takes the scheme, with a default, and one line here.
RECIPES: dict[str, Callable[..., Recipe]] = {
    "cpu-demo": cpu_demo,
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


def find_recipe(name: str) -> Callable[..., Recipe]:
    """The function of this name. ValueError, which lists the known names, for an unknown one."""
    if name not in RECIPES:
        raise ValueError(f"recipe = {name!r} is not known: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def recipe(name: str, *, scheme: str | None = None) -> Recipe:
    """The recipe of this name, with ``scheme`` or its own. ValueError: an unknown recipe or scheme."""
    build = find_recipe(name)
    return build() if scheme is None else build(scheme)
