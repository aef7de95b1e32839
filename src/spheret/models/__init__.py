"""Models that receive their residual connection from outside."""

from spheret.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
