"""Measures what each connection of a model does to the hidden state on given tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from spheret.connections import Connection
from spheret.models.gpt import GPT, Block, evaluation_mode


@torch.no_grad()
def probe(model: GPT, idx: Tensor) -> dict[str, list[Any]]:
    """Run ``model`` on ``idx`` (B, T) int64, without dropout, and measure every connection, in order of depth.

    Every module keeps its mode (training or evaluation).

    Returns:
        Lists with one entry per connection, as stored in diagnostics.json:

        ``layer``: number of the block from 1, the l of the equations (``layer_idx + 1``).
        ``sublayer``: ``attn`` or ``mlp``.
        ``hidden_norm``: |h'| / sqrt(d), mean over tokens.
        ``angle_deg``: angle between h and h' in degrees, mean over tokens.
        ``update_ratio``: |f| / |h|, mean over tokens.
        ``update_cosine``: cosine of f with h, mean over tokens.
        ``skip_gain``: coefficient of h in h', median over tokens; at 0 or below, a token's own signal is lost.
        ``alpha``, ``step_size``, ``p``: of a sphere connection, its step size without and with lambda_l, and exponent.
        ``saturation``: of a sphere connection, theta / (p pi/2), mean over tokens; at 1 the cap p pi/2 is reached.
        ``token_cosine``: mean cosine between the hidden states of different tokens; at 1 all tokens look alike.
    """
    rows: dict[str, list[Any]] = {}

    def record(layer_idx: int, sublayer: str, connection: Connection, h: Tensor, f: Tensor, out: Tensor) -> None:
        stats = connection.stats(h, f, out)
        entry: dict[str, Any] = {"layer": layer_idx + 1, "sublayer": sublayer}
        # Median for skip_gain: its least-squares fit gives wild values for tokens whose f is nearly parallel to h.
        entry |= connection.scalars()
        entry |= {k: float(v.median() if k == "skip_gain" else v.mean()) for k, v in stats.items()}
        entry["token_cosine"] = _mean_cosine(out)
        for key, value in entry.items():
            rows.setdefault(key, []).append(value)

    with evaluation_mode(model):
        h = model.embed(idx)
        for layer_idx, block in enumerate(model.blocks):
            for sublayer, branch, connection in cast(Block, block).sublayers():
                f = branch(connection.branch_input(h))
                out = connection(h, f)
                record(layer_idx, sublayer, connection, h, f, out)
                h = out
    return rows


def _mean_cosine(h: Tensor) -> float:
    """Mean cosine between the hidden states of different tokens of a sequence, averaged over sequences."""
    unit = torch.nn.functional.normalize(h.float(), dim=-1)
    tokens = unit.shape[1]
    if tokens < 2:
        return float("nan")
    # |sum of unit vectors|^2 is the sum of the cosines of all pairs, including each token with itself. This avoids the
    # (T, T) matrix of cosines.
    total = unit.sum(1).square().sum(-1)
    return float(((total - tokens) / (tokens * (tokens - 1))).mean())
