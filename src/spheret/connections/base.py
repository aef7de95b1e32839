"""The connection protocol: what a block, a trainer, sharding, export and generation see of a residual scheme.

A *connection* forms one residual: ``combine(h, f)`` is the only place where a hidden state and a sublayer output
meet. A *stream* stands at the two ends of the network, once per model: ``enter`` takes the embedding to the residual
stream, ``exit`` takes the stream to the head. A *scheme* is the frozen description of both, built from a name such as
``spheret:p=0.5``; models and trainers talk to these three and never name a scheme.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from spheret.connections.options import ModelOptions, TrainingDefaults
from spheret.geometry import norm

SUBLAYERS_PER_LAYER = 2


class ParameterRole(NamedTuple):
    """What an optimizer must know of a parameter: whether it is decayed, and the factor on its learning rate."""

    decay: bool
    lr_scale: float = 1.0


@dataclass(frozen=True)
class InitRule:
    """Initial scale of a model's weights, as its scheme wants it.

    Attributes:
        embedding_std: standard deviation of token and position embeddings.
        gain: hidden weights are N(0, (gain / sqrt(fan_in))^2), so a sublayer's response does not depend on the width.
        residual_gain: further factor on the last projection of every sublayer.
    """

    embedding_std: float
    gain: float = 1.0
    residual_gain: float = 1.0

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < math.inf:
                raise ValueError(f"{f.name} = {getattr(self, f.name)}: an initial scale is a finite number, 0 or more")


def tied_embedding_std(dim: int, gain: float = 1.0) -> float:
    """Initial standard deviation of embeddings that are also the head: ``8 gain / d``, at most ``gain / sqrt(d)``.

    For streams that are normalised on entry. At initialisation such a stream still holds much of its token's
    embedding, so a tied head answers each token with itself, by a logit of about ``std * d`` times that overlap. With
    1/sqrt(d) it grows as sqrt(d): at d = 512 the loss starts at 7.9 instead of 5.5, and the states of all tokens fall
    together before anything is learned. Learning rates that follow 1/d stay the same share of such weights at every
    width; 2/d moves too fast for them and collapses as well.
    """
    return gain * min(8 / dim, dim**-0.5)


class Connection(nn.Module, ABC):
    """One residual connection, ``conn(h, f) -> h'``; ``h`` and ``f`` are (..., d)."""

    def branch_input(self, h: Tensor) -> Tensor:
        """What the sublayer reads: the stream itself unless the scheme normalises first."""
        return h

    @abstractmethod
    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        """The next hidden state."""

    def forward(self, h: Tensor, f: Tensor) -> Tensor:
        return self.combine(h, f)

    def combine_and_split(self, h: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """``combine`` for its two readers: the residual stream, and the ``branch_input`` of the next sublayer.

        The same numbers. A fused connection makes two tensors of them, the second in the dtype in which sublayers
        compute, so that the two gradients arrive apart and are added in the pass over the rows that it makes anyway.
        """
        stream = self.combine(h, f)
        return stream, stream

    def reset_parameters(self) -> None:
        """Set every parameter and buffer of this connection, submodules included, to its initial value."""

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Roles of the parameters that this module holds directly: scalars of a connection are never decayed."""
        return {name: ParameterRole(decay=False) for name, _ in self.named_parameters(recurse=False)}

    @torch.no_grad()
    def stats(self, h: Tensor, f: Tensor, out: Tensor) -> dict[str, Tensor]:
        """Row statistics for diagnostics, each (...): norms in units of sqrt(d), the angle between ``h`` and ``h'``
        in degrees, the relative size of the update and its cosine with ``h``."""
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
        """Coefficient of ``h`` in ``h' = A h + B f``, row by row: how much of a token's own signal passes the
        connection.

        Found by least squares from the three vectors, so that it holds for every scheme; 0 or less means that the
        token's signal dies here.
        """
        hh, ff, hf = (h * h).sum(-1), (f * f).sum(-1), (h * f).sum(-1)
        ho, fo = (h * out).sum(-1), (f * out).sum(-1)
        determinant = (hh * ff - hf * hf).clamp_min(1e-30)
        return (ho * ff - fo * hf) / determinant


class Stream(nn.Module):
    """Both ends of the residual stream. This base class passes everything through."""

    def enter(self, h: Tensor) -> Tensor:
        """From the embedding (..., d) to the residual stream."""
        return h

    def exit(self, h: Tensor) -> Tensor:
        """From the residual stream (..., d) to the input of the head."""
        return h

    def reset_parameters(self) -> None:
        """Set every parameter of the stream, submodules included, to its initial value."""

    def parameter_roles(self) -> dict[str, ParameterRole]:
        """Roles of the parameters held directly: gains and radii are never decayed."""
        return {name: ParameterRole(decay=False) for name, _ in self.named_parameters(recurse=False)}

    def after_step(self, model: nn.Module) -> None:
        """Constraint on the weights of ``model``, applied after every optimizer step."""

    def after_init(self, model: nn.Module) -> None:
        """Constraint on the initial weights of ``model``: the one that holds after every step, unless the scheme
        starts from another."""
        self.after_step(model)


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A residual scheme with its options; what the registry returns for a name."""

    name: ClassVar[str]
    # What `spheret schemes` prints beside the summary.
    equation: ClassVar[str]
    placement: ClassVar[str]  # what is normalised, and where
    cost: ClassVar[str]  # in units: see `spheret schemes`; measured in tests/connections/test_cost.py
    source: ClassVar[str]
    keeps_norm: ClassVar[bool] = False  # whether |combine(h, f)| = |h| is promised for every h of its stream
    # What ``preset=name`` stands for in a scheme's name: options, of which any that is given beside it wins.
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()  # options of which infinity is a value like any other

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value) and f.name not in self.may_be_infinite:
                raise ValueError(f"{f.name} = {value}: {self.name} takes a finite number")

    @property
    def summary(self) -> str:
        """One line for a list of schemes: the first sentence of the file that implements it, unless the options say
        more."""
        documentation = inspect.getdoc(sys.modules[type(self).__module__]) or self.name
        opening = " ".join(documentation.split("\n\n")[0].split())
        return re.split(r"\.\s+(?=[A-Z])", opening)[0].rstrip(".").replace("``", "")

    @abstractmethod
    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        """The connection behind sublayer ``sublayer`` (0 or 1) of block ``layer_idx`` (from 0) of ``n_layer``."""

    @abstractmethod
    def stream(self, dim: int, n_layer: int) -> Stream:
        """The two ends of the stream for a model of this width and depth."""

    @abstractmethod
    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        """Initial weight scales for a model of this width and depth."""

    def model_options(self, dim: int, head_dim: int) -> ModelOptions:
        """What the scheme asks of the rest of a model of this width, with heads of ``head_dim``; the default is
        GPT-2's architecture."""
        return ModelOptions()

    def training(self, n_layer: int) -> TrainingDefaults:
        """What a run with a model of this depth should use unless its user says otherwise."""
        return TrainingDefaults()


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Role of every parameter of ``model`` by its qualified name, each parameter once.

    A module answers for the parameters it holds directly through a method ``parameter_roles()``; ``Linear`` and
    ``Embedding`` weights are decayed, biases and the parameters of normalisation layers are not.

    Raises:
        ValueError: a parameter for which no module answers.
    """
    roles: dict[str, ParameterRole] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        answers = _answers(module)
        for name, parameter in own.items():
            if parameter in seen:
                continue
            seen.add(parameter)
            qualified = f"{prefix}.{name}" if prefix else name
            if name not in answers:
                raise ValueError(
                    f"no optimizer role for parameter {qualified!r}: give {type(module).__name__} a method "
                    "parameter_roles() that names it"
                )
            roles[qualified] = answers[name]
    return roles


_DECAYED = (nn.Linear, nn.Embedding)
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def _answers(module: nn.Module) -> dict[str, ParameterRole]:
    asked = getattr(module, "parameter_roles", None)
    if callable(asked):
        answers: dict[str, ParameterRole] = asked()
        return answers
    if isinstance(module, _DECAYED):
        return {"weight": ParameterRole(decay=True), "bias": ParameterRole(decay=False)}
    if isinstance(module, _NORMS):
        return {"weight": ParameterRole(decay=False), "bias": ParameterRole(decay=False)}
    return {}
