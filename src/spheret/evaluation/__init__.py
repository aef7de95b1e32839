"""Evaluation of trained models."""

from spheret.evaluation.perplexity import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
