"""Models that receive their residual connections from a scheme."""

from spheret.models.config import GPTConfig
from spheret.models.gpt import GPT, evaluation_mode, fold_factors

__all__ = ["GPT", "GPTConfig", "evaluation_mode", "fold_factors"]
