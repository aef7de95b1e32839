"""Models that receive their residual connection from outside."""

from spheret.models.folding import fold_factors
from spheret.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig", "fold_factors"]
