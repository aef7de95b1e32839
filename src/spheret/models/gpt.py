"""GPT in nanoGPT's architecture, with residual connections that it receives from its scheme.

By default: learned positions, packed attention, GELU MLP, tied head, no biases. The configuration or the scheme can
change each of these. Every residual goes through a connection, ``h = connection(h,
sublayer(connection.branch_input(h)))``. Nothing in this file depends on which scheme that is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections import Connection, parse_scheme
from spheret.connections.learned import ScaledVector
from spheret.geometry import compute_dtype
from spheret.models.attention import CausalSelfAttention
from spheret.models.config import GPTConfig
from spheret.models.mlp import SwiGLU, build_mlp
from spheret.models.weights import WeightScales, initialise, undrawn


class Block(nn.Module):
    """Attention and MLP, each with its connection.

    All blocks of a model run the same code, so blocks that are compiled one at a time share one graph. The sublayers
    are uninitialised until :func:`spheret.models.weights.initialise` draws them, once for the whole model.
    """

    def __init__(self, config: GPTConfig, attn_connection: Connection, mlp_connection: Connection) -> None:
        super().__init__()
        options = config.options()
        self.attn = undrawn(
            CausalSelfAttention,
            config.n_embd,
            config.n_head,
            dropout=config.dropout,
            bias=config.bias,
            options=options,
            rope_base=config.rope_base,
        )
        self.attn_connection = attn_connection
        self.mlp = undrawn(build_mlp, config.n_embd, options, dropout=config.dropout, bias=config.bias)
        self.mlp_connection = mlp_connection

    def sublayers(self) -> tuple[tuple[str, nn.Module, Connection], ...]:
        """Name, module and connection of each sublayer, in order."""
        return ("attn", self.attn, self.attn_connection), ("mlp", self.mlp, self.mlp_connection)

    def forward(self, h: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """(stream, branch) before the block -> (stream, branch) after it, each (B, T, d).

        The two hold the same values: connections read ``stream``, sublayers read ``branch``. See
        :meth:`Connection.forward`.
        """
        h, branch = self.attn_connection(h, self.attn(self.attn_connection.branch_input(branch)), split=True)
        f = self.mlp(self.mlp_connection.branch_input(branch))
        stream, branch = self.mlp_connection(h, f, split=True)
        return stream, branch


class GPT(nn.Module):
    """``logits, loss = model(idx, targets)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.scheme = parse_scheme(config.scheme)
        self.wte = undrawn(nn.Embedding, config.vocab_size, config.n_embd)
        options = config.options()
        learned = options.positions == "learned"
        self.wpe = undrawn(nn.Embedding, config.block_size, config.n_embd) if learned else None
        self.drop = nn.Dropout(config.dropout)
        self.stream = self.scheme.stream(config.n_embd, config.n_layer)
        self.blocks = nn.ModuleList(
            Block(config, self._connection(i, 0), self._connection(i, 1)) for i in range(config.n_layer)
        )
        untied = options.head == "untied"
        self.lm_head = undrawn(nn.Linear, config.n_embd, config.vocab_size, bias=False) if untied else None
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
            targets: (B, T) int64; positions with target -1 have no loss.

        Returns:
            logits (B, T, vocab_size) and the mean cross entropy in nats per target, or None without targets. Where
            every target is -1 the loss is 0, as an empty sum, and so are its gradients.

        Raises:
            ValueError: T is longer than the model's context.
        """
        entry = h = branch = self.embed(idx)
        for block in self.blocks:
            h, branch = block(h, branch)
        logits = self.logits(h, entry)
        if targets is None:
            return logits, None
        # bfloat16 logits are cast to float32 first: their cross entropy would be off in the third digit.
        rows = logits.view(-1, logits.shape[-1])
        flat = targets.reshape(-1)
        # PyTorch's own mean over no targets is 0/0.
        total = F.cross_entropy(rows.to(compute_dtype(rows)), flat, ignore_index=-1, reduction="sum")
        return logits, total / (flat != -1).sum().clamp_min(1)

    def embed(self, idx: Tensor) -> Tensor:
        """Token ids (B, T) -> the residual stream (B, T, n_embd) before the first block."""
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

    def logits(self, h: Tensor, entry: Tensor) -> Tensor:
        """The residual stream (..., n_embd) after the last block, and before the first -> logits (..., vocab_size)."""
        weight = self.wte.weight if self.lm_head is None else self.lm_head.weight
        if self.logit_scale is not None:
            # The scale multiplies the rows of the head, which is cheaper than multiplying the logits of every token.
            weight = (self.logit_scale().unsqueeze(-1) * weight).to(weight.dtype)
        return F.linear(self.stream.exit(h, entry), weight)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer, also after ``to_empty`` from the meta device.

        Only here are random numbers drawn, so the same seed gives the same model by either way.
        """
        config = self.config
        scales = WeightScales(config.init, self.scheme.init_rule(config.n_embd, config.n_layer), config.n_layer)
        for embedding in (self.wte, self.wpe, self.lm_head):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=scales.embedding)
        initialise(self.blocks, scales)
        if self.logit_scale is not None:
            self.logit_scale.reset_parameters()
        self.stream.reset_parameters()
        # Last: the scheme's weight constraint applies to the drawn weights of the whole model.
        self.stream.after_init(self)

    def stream_axes(self) -> dict[str, int]:
        """Axis of the residual stream in each weight; see ``connections.weights``."""
        ends = {"wte": self.wte, "wpe": self.wpe, "lm_head": self.lm_head}
        return {f"{name}.weight": 1 for name, module in ends.items() if module is not None}

    def after_step(self) -> None:
        """Apply the scheme's weight constraint; call after every optimizer step.

        Raises:
            ValueError: the constant factors are folded into the weights, which therefore do not fit the constraint.
        """
        if self.config.folded:
            raise ValueError("folded = True: a model with folded factors is for inference; train the one it came from")
        self.stream.after_step(self)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Number of parameters; ``embeddings=False`` omits position embeddings, as nanoGPT counts."""
        total = sum(p.numel() for p in self.parameters())
        return total if embeddings or self.wpe is None else total - self.wpe.weight.numel()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module of ``model`` in evaluation mode inside the ``with`` block; each in its own mode again after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # a module may do more than set its flag
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def fold_factors(model: GPT) -> GPT:
    """A copy of ``model`` for inference: the same logits, with the constant factors multiplied into the weights.

    ``config.folded`` is True in the copy. The copy cannot be trained, since its weights do not fit the scheme's
    constraint: its ``after_step`` raises.
    """
    folded = copy.deepcopy(model)
    for module in folded.modules():
        if isinstance(module, CausalSelfAttention | SwiGLU):
            module.fold()
    folded.config = replace(model.config, folded=True)
    return folded
