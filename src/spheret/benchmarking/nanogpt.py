"""The yardstick of the speed benchmark: a plain GPT in nanoGPT's architecture, with nanoGPT's optimizer.

Written from the description of GPT-2 (Radford et al. 2019) and of nanoGPT (github.com/karpathy/nanoGPT): Pre-LN blocks
written out as ``x = x + f(norm(x))``, gains without bias, learned positions, packed attention, a GELU MLP, a head tied
to the embedding. None of spheret's modules takes part in the computation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections import ParameterRole
from spheret.models import GPTConfig

STD = 0.02


class LayerNorm(nn.Module):
    """LayerNorm with a gain and no bias, (..., d) -> (..., d)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Lets spheret's optimizer train this model, so that the benchmark can tell model from optimizer."""
        return {"weight": ParameterRole(decay=False)}


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention, (B, T, d) -> (B, T, d)."""

    def __init__(self, dim: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(dim, 3 * dim, bias=False)
        self.c_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.size()
        q, k, v = self.c_attn(x).split(dim, dim=2)
        heads = (batch, length, self.n_head, dim // self.n_head)
        q, k, v = q.view(heads).transpose(1, 2), k.view(heads).transpose(1, 2), v.view(heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, dim))
        return out


class MLP(nn.Module):
    """(..., d) -> (..., d) through 4 d."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, 4 * dim, bias=False)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.gelu(self.c_fc(x)))
        return out


class Block(nn.Module):
    """One Pre-LN transformer block."""

    def __init__(self, dim: int, n_head: int) -> None:
        super().__init__()
        self.ln_1, self.attn = LayerNorm(dim), CausalSelfAttention(dim, n_head)
        self.ln_2, self.mlp = LayerNorm(dim), MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class NanoGPT(nn.Module):
    """``logits, loss = model(idx, targets)``. Only the shape in ``config`` counts: no dropout, biases or scheme."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim = config.n_embd
        self.wte, self.wpe = nn.Embedding(config.vocab_size, dim), nn.Embedding(config.block_size, dim)
        self.h = nn.ModuleList(Block(dim, config.n_head) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(dim)
        self.lm_head = nn.Linear(dim, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # GPT-2 scales the last projection of every sublayer by the number of residuals, two per block.
                last = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=STD / math.sqrt(2 * config.n_layer) if last else STD)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, T, vocab) and mean loss in nats for ids and targets (B, T) int64; targets of -1 do not count."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def configure_adamw(model: nn.Module, *, lr: float, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW as nanoGPT has it: matrices decay, vectors do not; fused on CUDA, PyTorch's own choice elsewhere."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = {"fused": True} if all(p.is_cuda for p in parameters) else {}
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), **fused)
