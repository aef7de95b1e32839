"""GPT in nanoGPT's architecture, with the residual connection received from outside.

Learned positions, packed attention, GELU MLP, tied head, no biases unless asked for: by the configuration, or by a
scheme that is more than its connections. Every residual goes through a connection
(``h = connection.combine(h, sublayer(connection.branch_input(h)))``); which one, the model does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections import Connection, parse_scheme
from spheret.connections.options import ModelOptions
from spheret.connections.scaled_vector import ScaledVector
from spheret.geometry import compute_dtype
from spheret.models.attention import CausalSelfAttention
from spheret.models.init import WeightScales, initialise
from spheret.models.mlp import build_mlp
from spheret.models.options import CHOICES, check_choice, resolve


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        n_layer: blocks, each an attention and an MLP sublayer.
        n_head: attention heads.
        n_embd: width d of the hidden state.
        block_size: longest context, tokens.
        vocab_size: rows of the embedding and of the tied head.
        scheme: name of the residual scheme, for example ``spheret:p=1``.
        dropout: probability, everywhere nanoGPT has one.
        bias: biases in the linear layers (normalisation biases are the scheme's option).
        init: ``auto`` (width-aware, as the scheme wants it) or ``nanogpt`` (std 0.02, last projections 0.02/sqrt(2
            n_layer); the scheme's ``gain``, ``embedding_gain`` and ``residual`` then have no say).
        positions: ``learned`` embeddings, ``rope``, or ``auto``: what the scheme wants, learned for a scheme that is
            only a connection.
        mlp: ``gelu`` (d -> 4d -> d), ``swiglu`` (d -> 2 x 4d -> d, half as many parameters again) or ``auto`` (gelu).
        qk_norm: of queries and keys: ``none``, ``rms``, ``l2`` or ``auto`` (none).
        head: ``tied`` to the token embedding, ``untied`` or ``auto`` (tied).
        rope_base: base of the rotary positions' wavelengths.
        folded: the scheme's constant factors are in the weights already; see ``spheret.models.fold_factors``.
    """

    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    vocab_size: int = 50304
    scheme: str = "pre-ln"
    dropout: float = 0.0
    bias: bool = False
    init: str = "auto"
    positions: str = "auto"
    mlp: str = "auto"
    qk_norm: str = "auto"
    head: str = "auto"
    rope_base: float = 10_000.0
    folded: bool = False

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
        for name in CHOICES:
            check_choice(name, getattr(self, name))
        if not self.rope_base > 1:
            raise ValueError(f"rope_base = {self.rope_base}: it must be above 1; 10000 is common")
        self.options()

    def options(self) -> ModelOptions:
        """The model around the connections: what the scheme asks for, with what is chosen here in its place."""
        head_dim = self.n_embd // self.n_head
        wanted = parse_scheme(self.scheme).model_options(self.n_embd, head_dim)
        options = resolve(wanted, {name: getattr(self, name) for name in CHOICES}, self.scheme, self.folded)
        if options.positions == "rope" and head_dim % 2:
            raise ValueError(
                f"n_embd = {self.n_embd}, n_head = {self.n_head}: rotary positions need heads of even width, "
                f"not {head_dim}"
            )
        return options


class Block(nn.Module):
    """Two sublayers, each behind its connection."""

    def __init__(
        self, config: GPTConfig, attn_connection: Connection, mlp_connection: Connection, *, last: bool = False
    ) -> None:
        super().__init__()
        self.last = last
        options = config.options()
        self.attn = CausalSelfAttention(
            config.n_embd,
            config.n_head,
            dropout=config.dropout,
            bias=config.bias,
            options=options,
            rope_base=config.rope_base,
        )
        self.attn_connection = attn_connection
        self.mlp = build_mlp(config.n_embd, options, dropout=config.dropout, bias=config.bias)
        self.mlp_connection = mlp_connection

    def sublayers(self) -> tuple[tuple[str, nn.Module, Connection], ...]:
        """Name, branch and connection of each sublayer, in order."""
        return ("attn", self.attn, self.attn_connection), ("mlp", self.mlp, self.mlp_connection)

    def forward(self, h: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream (B, T, d), and the same numbers for the first sublayer to read; see
        :meth:`Connection.combine_and_split`."""
        h, read = self.attn_connection.combine_and_split(h, self.attn(self.attn_connection.branch_input(read)))
        f = self.mlp(self.mlp_connection.branch_input(read))
        if not self.last:
            return self.mlp_connection.combine_and_split(h, f)
        h = self.mlp_connection(h, f)  # the head is the only reader
        return h, h


class GPT(nn.Module):
    """``logits, loss = model(idx, targets)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.scheme = parse_scheme(config.scheme)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        options = config.options()
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if options.positions == "learned" else None
        self.drop = nn.Dropout(config.dropout)
        self.stream = self.scheme.stream(config.n_embd, config.n_layer)
        self.blocks = nn.ModuleList(
            Block(config, self._connection(i, 0), self._connection(i, 1), last=i == config.n_layer - 1)
            for i in range(config.n_layer)
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False) if options.head == "untied" else None
        scale = options.logit_scale
        self.logit_scale = None if scale is None else ScaledVector(config.vocab_size, scale)
        self.reset_parameters()

    def _connection(self, layer_idx: int, sublayer: int) -> Connection:
        config = self.config
        return self.scheme.connection(
            config.n_embd, layer_idx=layer_idx, n_layer=config.n_layer, sublayer=sublayer, stream=self.stream
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
        logits = self.logits(h)
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
        h = self.wte(idx)
        if self.wpe is not None:
            h = h + self.wpe(torch.arange(length, device=idx.device))
        return self.stream.enter(self.drop(h))

    def logits(self, h: Tensor) -> Tensor:
        """The residual stream (..., n_embd) behind the last block -> logits (..., vocab_size)."""
        weight = self.wte.weight if self.lm_head is None else self.lm_head.weight
        if self.logit_scale is not None:  # on the rows of the head: cheaper than on the logits of every token
            weight = (self.logit_scale().unsqueeze(-1) * weight).to(weight.dtype)
        return F.linear(self.stream.exit(h), weight)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """(Re)initialise every parameter and buffer, also after ``to_empty`` from the meta device."""
        config = self.config
        scales = WeightScales(config.init, self.scheme.init_rule(config.n_embd, config.n_layer), config.n_layer)
        for embedding in (self.wte, self.wpe, self.lm_head):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=scales.embedding)
        initialise(self.blocks, scales)
        if self.logit_scale is not None:
            self.logit_scale.reset_parameters()
        self.stream.reset_parameters()
        self.stream.after_init(self)

    def stream_axes(self) -> dict[str, int]:
        """Axis of the residual stream in each weight; see ``connections.constraints``."""
        ends = {"wte": self.wte, "wpe": self.wpe, "lm_head": self.lm_head}
        return {f"{name}.weight": 1 for name, module in ends.items() if module is not None}

    def after_step(self) -> None:
        """Apply the scheme's weight constraint; call after every optimizer step.

        Raises:
            ValueError: the factors are folded into the weights, which the constraint is not for.
        """
        if self.config.folded:
            raise ValueError("folded = True: a model with folded factors is for inference; train the one it came from")
        self.stream.after_step(self)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Number of parameters; position embeddings are left out with ``embeddings=False``, as nanoGPT counts."""
        total = sum(p.numel() for p in self.parameters())
        return total if embeddings or self.wpe is None else total - self.wpe.weight.numel()
