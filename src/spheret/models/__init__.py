"""Models that receive their residual connections from a scheme."""

from spheret.models.config import GPTConfig
from spheret.models.gpt import GPT, fold_factors

__all__ = ["GPT", "GPTConfig", "fold_factors"]
