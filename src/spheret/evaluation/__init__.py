"""Evaluation of trained models."""

from spheret.evaluation.perplexity import IGNORED, Evaluation, Validation, evaluate

__all__ = ["IGNORED", "Evaluation", "Validation", "evaluate"]
