"""GPT in nanoGPT's architecture, with the residual connection received from outside.

Learned positions, packed attention, GELU MLP, tied head, no biases unless asked for. Every residual goes through a
connection (``h = connection.combine(h, sublayer(connection.branch_input(h)))``); which one, the model does not know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections import Connection, parse_scheme
from spheret.connections.base import InitRule
from spheret.geometry import compute_dtype
from spheret.models.attention import CausalSelfAttention
from spheret.models.mlp import MLP


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        n_layer: blocks, each an attention and an MLP sublayer.
        n_head: attention heads.
        n_embd: width d of the hidden state.
        block_size: longest context, tokens.
        vocab_size: rows of the embedding and of the tied head.
        connection: scheme of the residual connections, for example ``spheret:p=1``.
        dropout: probability, everywhere nanoGPT has one.
        bias: biases in the linear layers (normalisation biases are the scheme's option).
        init: ``auto`` (width-aware, as the scheme wants it) or ``nanogpt`` (std 0.02, last projections 0.02/sqrt(2
            n_layer); the scheme's ``gain``, ``embedding_gain`` and ``residual`` then have no say).
    """

    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    vocab_size: int = 50304
    connection: str = "pre-ln"
    dropout: float = 0.0
    bias: bool = False
    init: str = "auto"

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}: it must lie in [0, 1)")
        if self.init not in ("auto", "nanogpt"):
            raise ValueError(f"init = {self.init!r}: choose auto or nanogpt")
        parse_scheme(self.connection)


class Block(nn.Module):
    """Two sublayers, each behind its connection."""

    def __init__(self, config: GPTConfig, attn_connection: Connection, mlp_connection: Connection) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(config.n_embd, config.n_head, dropout=config.dropout, bias=config.bias)
        self.attn_connection = attn_connection
        self.mlp = MLP(config.n_embd, dropout=config.dropout, bias=config.bias)
        self.mlp_connection = mlp_connection

    def sublayers(self) -> tuple[tuple[str, nn.Module, Connection], ...]:
        """Name, branch and connection of each sublayer, in order."""
        return ("attn", self.attn, self.attn_connection), ("mlp", self.mlp, self.mlp_connection)

    def forward(self, h: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream (B, T, d), and the same numbers for the first sublayer to read; see
        :meth:`Connection.fork`."""
        for _, branch, connection in self.sublayers():
            h, read = connection.fork(h, branch(connection.branch_input(read)))
        return h, read


class GPT(nn.Module):
    """``logits, loss = model(idx, targets)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.scheme = parse_scheme(config.connection)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.stream = self.scheme.stream(config.n_embd, config.n_layer)
        self.blocks = nn.ModuleList(
            Block(config, self._connection(layer, 0), self._connection(layer, 1))
            for layer in range(1, config.n_layer + 1)
        )
        self.reset_parameters()

    def _connection(self, layer: int, sublayer: int) -> Connection:
        config = self.config
        return self.scheme.connection(
            config.n_embd, layer=layer, n_layers=config.n_layer, sublayer=sublayer, stream=self.stream
        )

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Next-token logits and their loss.

        Args:
            idx: (B, T) int64 token ids, T at most ``block_size``.
            targets: (B, T) int64, -1 where no loss is taken.

        Returns:
            logits (B, T, vocab_size) and the mean cross entropy in nats per target, or None without targets.

        Raises:
            ValueError: T is longer than the model's context.
        """
        h = read = self.embed(idx)
        for block in self.blocks:
            h, read = block(h, read)
        logits = F.linear(self.stream.exit(h), self.wte.weight)
        if targets is None:
            return logits, None
        rows = logits.view(-1, logits.shape[-1])
        return logits, F.cross_entropy(rows.to(compute_dtype(rows)), targets.reshape(-1), ignore_index=-1)

    def embed(self, idx: Tensor) -> Tensor:
        """Tokens (B, T) -> the residual stream (B, T, n_embd) before the first block."""
        length = idx.shape[1]
        if length > self.config.block_size:
            raise ValueError(
                f"{length} tokens do not fit block_size = {self.config.block_size}: "
                f"crop idx[:, -{self.config.block_size}:]"
            )
        positions = torch.arange(length, device=idx.device)
        return self.stream.enter(self.drop(self.wte(idx) + self.wpe(positions)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """(Re)initialise every parameter and buffer, also after ``to_empty`` from the meta device."""
        config = self.config
        if config.init == "nanogpt":
            hidden = embedding = 0.02
            residual = 0.02 / math.sqrt(2 * config.n_layer)
            stds = {"c_attn": hidden, "c_fc": hidden, "attn.c_proj": residual, "mlp.c_proj": residual}
        else:
            rule: InitRule = self.scheme.init_rule(config.n_embd, config.n_layer)
            embedding = rule.embedding_std
            narrow, wide = rule.gain / math.sqrt(config.n_embd), rule.gain / math.sqrt(4 * config.n_embd)
            stds = {
                "c_attn": narrow,
                "c_fc": narrow,
                "attn.c_proj": narrow * rule.residual_gain,
                "mlp.c_proj": wide * rule.residual_gain,
            }
        nn.init.normal_(self.wte.weight, std=embedding)
        nn.init.normal_(self.wpe.weight, std=embedding)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                std = next(value for suffix, value in stds.items() if name.endswith(suffix))
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Connection):
                module.reset_parameters()
        self.stream.reset_parameters()

    def after_step(self) -> None:
        """Apply the scheme's weight constraint; call after every optimizer step."""
        self.stream.after_step(self)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Number of parameters; position embeddings are left out with ``embeddings=False``, as nanoGPT counts."""
        total = sum(p.numel() for p in self.parameters())
        return total if embeddings else total - self.wpe.weight.numel()
