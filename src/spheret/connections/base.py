"""The connection protocol: the interface of a residual scheme to models, trainers, sharding, export and generation.

A *connection* forms one residual. It is the only place where a hidden state and a sublayer output are combined. A
*stream* handles the two ends of the network, once per model: ``enter`` maps the embedding to the residual stream,
``exit`` maps the stream to the input of the head. A *scheme* is the frozen description of both, built from a name such
as ``spheret:p=0.5``. Models and trainers use these three classes and never name a scheme.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from spheret.connections.options import InitRule, ModelOptions, TrainingDefaults
from spheret.connections.weights import ParameterRole
from spheret.geometry import norm

SUBLAYERS_PER_LAYER = 2
P = ParamSpec("P")
R = TypeVar("R")


def counts_from_zero(build: Callable[P, R]) -> Callable[P, R]:
    """Make ``build`` reject the old argument ``layer=`` with a TypeError that names ``layer_idx``.

    The old argument counted from 1. With Python's own "unexpected keyword" error, a caller would likely pass the same
    number under the new name and be off by one.
    """

    @functools.wraps(build)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if "layer" in kwargs:
            raise TypeError(
                f"layer = {kwargs['layer']}: layer= counted from 1 was replaced by layer_idx, counted from 0"
            )
        return build(*args, **kwargs)

    return checked


class Connection(nn.Module, ABC):
    """One residual connection, ``conn(h, f) -> h'``; ``h`` and ``f`` are (..., d)."""

    def branch_input(self, h: Tensor) -> Tensor:
        """What the sublayer reads, (..., d): the stream itself, unless the scheme normalises first."""
        return h

    def forward(self, h: Tensor, f: Tensor, split: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The next hidden state h', (..., d) in the dtype of ``h``.

        Args:
            h: hidden state, (..., d).
            f: sublayer output, (..., d).
            split: return ``(stream, branch)`` instead: h' for the residual stream, and the same values for the
                ``branch_input`` of the next sublayer, in the dtype in which sublayers compute.
        """
        # A fused connection overrides this and makes two tensors of h': their gradients then arrive apart, and its
        # backward pass adds them on its way over the rows.
        stream = self.combine(h, f).to(h.dtype)
        return (stream, stream) if split else stream

    @abstractmethod
    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        """The next hidden state, (..., d), in any dtype. A scheme defines it; callers call the module, so that hooks
        fire and the dtype is that of ``h``."""

    def reset_parameters(self) -> None:
        """Set every parameter and buffer of this module and its submodules to its initial value."""
        _reset_children(self)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Roles of the parameters that this module owns directly. They are never decayed."""
        return {name: ParameterRole(decay=False) for name, _ in self.named_parameters(recurse=False)}

    def scalars(self) -> dict[str, float]:
        """The numbers that this connection has learned or was given, for diagnostics; every connection of a scheme
        returns the same keys."""
        return {}

    @torch.no_grad()
    def stats(self, h: Tensor, f: Tensor, out: Tensor) -> dict[str, Tensor]:
        """Row statistics for diagnostics, each (...).

        ``hidden_norm`` is in units of sqrt(d), ``angle_deg`` is the angle between ``h`` and ``h'`` in degrees,
        ``update_ratio`` is |f| / |h| and ``update_cosine`` the cosine of ``f`` with ``h``.
        """
        h, f, out = h.float(), f.float(), out.float()
        nh, nf, no = (norm(t).squeeze(-1) for t in (h, f, out))
        root = math.sqrt(h.shape[-1])
        cosine = (h * out).sum(-1) / (nh * no).clamp_min(1e-30)
        return {
            "hidden_norm": no / root,
            "update_ratio": nf / nh.clamp_min(1e-30),
            "update_cosine": (h * f).sum(-1) / (nh * nf).clamp_min(1e-30),
            "angle_deg": torch.rad2deg(torch.acos(cosine.clamp(-1, 1))),
            "skip_gain": self.skip_gain(h, f, out),
        }

    def skip_gain(self, h: Tensor, f: Tensor, out: Tensor) -> Tensor:
        """The coefficient A in ``h' = A h + B f``, row by row: how much of a token's own signal passes the connection.

        A is 0 or less where a token's own signal is lost.
        """
        # Least squares over the three vectors, by Cramer's rule: it needs no knowledge of the scheme.
        hh, ff, hf = (h * h).sum(-1), (f * f).sum(-1), (h * f).sum(-1)
        ho, fo = (h * out).sum(-1), (f * out).sum(-1)
        determinant = (hh * ff - hf * hf).clamp_min(1e-30)
        return (ho * ff - fo * hf) / determinant


class Stream(nn.Module):
    """The two ends of the residual stream. This base class returns its input unchanged."""

    def enter(self, h: Tensor) -> Tensor:
        """Map the embedding (..., d) to the residual stream (..., d)."""
        return h

    def exit(self, h: Tensor, entry: Tensor | None = None) -> Tensor:
        """Map the residual stream (..., d) to the input of the head (..., d).

        ``entry`` is what ``enter`` returned, which some schemes compare the stream with.
        """
        return h

    def reset_parameters(self) -> None:
        """Set every parameter and buffer of this module and its submodules to its initial value."""
        _reset_children(self)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Roles of the parameters that this module owns directly. They are never decayed."""
        return {name: ParameterRole(decay=False) for name, _ in self.named_parameters(recurse=False)}

    def after_step(self, model: nn.Module) -> None:
        """Apply the scheme's constraint to the weights of ``model``; called after every optimizer step."""

    def after_init(self, model: nn.Module) -> None:
        """Apply the scheme's constraint to the initial weights of ``model``; by default the same as ``after_step``."""
        self.after_step(model)


def _reset_children(module: nn.Module) -> None:
    # A module with its own reset_parameters resets its children too; containers have none, so recurse into them.
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            _reset_children(child)


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A residual scheme with its options. ``parse_scheme`` builds it from a name."""

    name: ClassVar[str]
    # `spheret schemes` prints equation, placement, cost and source next to the summary.
    equation: ClassVar[str]
    placement: ClassVar[str]  # what is normalised, and where
    # Numbers read and written per entry of h (`spheret schemes` explains the unit), counted by hand from the formula.
    # Each part in parentheses is one operation that reads its inputs and writes its result; the parts add up.
    cost: ClassVar[str]
    source: ClassVar[str]
    keeps_norm: ClassVar[bool] = False  # whether the scheme promises |h'| = |h| for every h of its stream
    # The options that ``preset=name`` sets. An option written next to the preset overrides it.
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()  # options that may be infinite

    def __post_init__(self) -> None:
        # "inf" parses as a float, so without this check `gain=inf` would surface only as NaN losses.
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value) and f.name not in self.may_be_infinite:
                raise ValueError(f"{f.name} = {value}: {self.name} takes a finite number")

    @property
    def summary(self) -> str:
        """One line for a list of schemes: the first sentence of the docstring of the scheme's file."""
        # A full stop ends the sentence only before a capital: "et al. 2017" and "arXiv 2601.19895" contain stops too.
        documentation = inspect.getdoc(sys.modules[type(self).__module__]) or self.name
        opening = " ".join(documentation.split("\n\n")[0].split())
        return re.split(r"\.\s+(?=[A-Z])", opening)[0].rstrip(".").replace("``", "")

    @property
    def caution(self) -> str:
        """What a user must know before training with these options, as a sentence; '' if there is nothing.

        `spheret train`, `compare` and `schemes` print it.
        """
        return ""

    @abstractmethod
    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        """The connection of sublayer ``sublayer`` (0 or 1) in block ``layer_idx`` (from 0) of ``n_layer`` blocks."""

    @abstractmethod
    def stream(self, dim: int, n_layer: int) -> Stream:
        """The stream of a model of this width and depth."""

    @abstractmethod
    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        """The initial weight scales of a model of this width and depth."""

    def model_options(self, dim: int, head_dim: int) -> ModelOptions:
        """The scheme's requirements on the rest of a model of width ``dim``, with heads of width ``head_dim``.

        The default is GPT-2's architecture.
        """
        return ModelOptions()

    def training(self, n_layer: int) -> TrainingDefaults:
        """The training settings that a run with a model of this depth uses by default."""
        return TrainingDefaults()
