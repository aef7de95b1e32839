"""The shape of a GPT, and the architecture options that may override those of its scheme."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np

from spheret.connections import parse_scheme
from spheret.connections.options import Factors, Head, MLPKind, ModelOptions, Positions, QKNorm

AUTO = "auto"
# The fields that may override the scheme's model options, and their values besides `auto`.
CHOICES: dict[str, tuple[str, ...]] = {
    "positions": get_args(Positions),
    "mlp": get_args(MLPKind),
    "qk_norm": get_args(QKNorm),
    "head": get_args(Head),
}


def use_python_numbers(config: Any) -> None:
    """Replace NumPy numbers in the fields of a frozen dataclass by Python's: JSON and checkpoints know no others."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, np.generic):
            object.__setattr__(config, f.name, value.item())


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        n_layer: number of blocks, each an attention and an MLP sublayer.
        n_head: number of attention heads.
        n_embd: width d of the hidden state.
        block_size: longest context, tokens.
        vocab_size: rows of the embedding and of the head.
        scheme: name of the residual scheme, for example ``spheret:p=1``.
        dropout: dropout probability, in the same places as in nanoGPT.
        bias: biases in the linear layers (biases of norms are an option of the scheme).
        init: ``auto`` (the scheme's rule, which follows the width) or ``nanogpt`` (std 0.02, last projections
            0.02/sqrt(2 n_layer); the scheme's ``gain``, ``embedding_gain`` and ``residual`` then have no effect).
        positions: ``learned`` embeddings, ``rope``, or ``auto``: the scheme's choice, which is ``learned`` where the
            scheme is only a connection.
        mlp: ``gelu`` (d -> 4d -> d), ``swiglu`` (d -> 2 x 4d -> d, half as many parameters again) or ``auto`` (gelu).
        qk_norm: norm of queries and keys: ``none``, ``rms``, ``l2`` or ``auto`` (none).
        head: ``tied`` to the token embedding, ``untied`` or ``auto`` (tied).
        rope_base: base of the rotary positions' wavelengths.
        folded: the scheme's constant factors are already in the weights; see ``spheret.models.fold_factors``.

    Raises:
        ValueError: a value out of range, an unknown scheme, or an option that the scheme fixes to another value.
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
        use_python_numbers(self)
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}: it must lie in [0, 1)")
        if self.init not in ("auto", "nanogpt"):
            raise ValueError(f"init = {self.init!r}: choose auto or nanogpt")
        for name, values in CHOICES.items():
            if getattr(self, name) not in (AUTO, *values):
                raise ValueError(f"{name} = {getattr(self, name)!r}: choose one of {AUTO}, {', '.join(values)}")
        if not self.rope_base > 1:
            raise ValueError(f"rope_base = {self.rope_base}: it must be above 1; 10000 is common")
        self.options()  # raises where the scheme and these fields do not fit together

    def options(self) -> ModelOptions:
        """The model around the connections: the scheme's options, overridden by the fields here that are not ``auto``.

        Raises:
            ValueError: an option that the scheme fixes to another value, or rotary positions in heads of odd width.
        """
        head_dim = self.n_embd // self.n_head
        wanted = parse_scheme(self.scheme).model_options(self.n_embd, head_dim)
        changes: dict[str, Any] = {name: getattr(self, name) for name in CHOICES if getattr(self, name) != AUTO}
        for name, value in changes.items():
            if name in wanted.fixed and value != getattr(wanted, name):
                raise ValueError(
                    f"{name} = {value!r} does not go with scheme {self.scheme}, which is built on "
                    f"{getattr(wanted, name)}: leave {name} at {AUTO}"
                )
        if self.folded:
            changes["factors"] = Factors()
        options = replace(wanted, **changes)
        if options.positions == "rope" and head_dim % 2:
            raise ValueError(
                f"n_embd = {self.n_embd}, n_head = {self.n_head}: rotary positions need heads of even width, "
                f"not {head_dim}"
            )
        return options
