"""Recipes: functions that return the frozen configuration of a published run, or of ours.

config = recipe("gpt2-small-12l", scheme="proj").train_config()

Every number of a recipe carries a marker in its function's docstring: *read* in the authors' text or code, *second
hand* from somebody else's notes, *derived*, *guessed*, or *ours*.
"""

from __future__ import annotations

from spheret.recipes.base import Recipe
from spheret.recipes.registry import RECIPES, list_recipes, recipe

__all__ = ["RECIPES", "Recipe", "list_recipes", "recipe"]
