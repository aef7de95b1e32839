"""What the residual stream of a model does on given tokens, connection by connection."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from spheret.connections import Connection
from spheret.models.gpt import GPT, Block


@torch.no_grad()
def probe(model: GPT, idx: Tensor) -> dict[str, list[Any]]:
    """Run ``model`` on ``idx`` (B, T) and return one entry per connection, in order of depth.

    Returns:
        ``layer`` (1-based), ``sublayer`` (``attn`` or ``mlp``), and means over tokens of ``hidden_norm``
        (|h'|/sqrt(d)), ``angle_deg`` (between h and h'),
        ``update_ratio`` (|f|/|h|), ``update_cosine`` (of f with h), ``skip_gain`` (median over tokens; 0 or less: the
        token's own signal dies) and
        ``token_cosine`` (mean cosine between the states of different tokens; 1: all tokens look alike).
    """
    rows: dict[str, list[Any]] = {}

    def record(layer: int, sublayer: str, connection: Connection, h: Tensor, f: Tensor, out: Tensor) -> None:
        stats = connection.stats(h, f, out)
        entry: dict[str, Any] = {"layer": layer, "sublayer": sublayer}
        entry |= {k: float(v.median() if k == "skip_gain" else v.mean()) for k, v in stats.items()}
        entry["token_cosine"] = _mean_cosine(out)
        for key, value in entry.items():
            rows.setdefault(key, []).append(value)

    was_training = model.training
    model.eval()
    h = model.embed(idx)
    for layer, block in enumerate(model.blocks, start=1):
        for sublayer, branch, connection in cast(Block, block).sublayers():
            f = branch(connection.branch_input(h))
            out = connection(h, f)
            record(layer, sublayer, connection, h, f, out)
            h = out
    model.train(was_training)
    return rows


def _mean_cosine(h: Tensor) -> float:
    """Mean cosine between the states of different tokens of one sequence, averaged over sequences."""
    unit = torch.nn.functional.normalize(h.float(), dim=-1)
    tokens = unit.shape[1]
    if tokens < 2:
        return float("nan")
    total = unit.sum(1).square().sum(-1)  # sum over all pairs, the diagonal included
    return float(((total - tokens) / (tokens * (tokens - 1))).mean())
