r"""p-SpheretNorm: rotate the hidden state towards the tangent part of the update (arXiv 2608.02668).

    w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|,   theta = p arctan(beta/p)
    h' = cos(theta) h + sin(theta) |h| w/|w|

p = 1 is Proj-SpheretNorm (metric projection), p = 2 Cay-SpheretNorm (Cayley transform), p = inf GeoNorm. ``|h|`` is
kept exactly; it is set once, behind the embedding, by a ScaleNorm with one learnable radius. lambda_l = 1/sqrt(l), l
the block, counted from 1. Beyond p = 2 a large step can rotate past the antipode.

The paper leaves open where alpha starts, how it is parametrised, the initial weight scale and the final norm; the
defaults here are chosen on measurements (docs/log.md, benchmarks/results/defaults); ``preset=paper`` selects the
closest reading of the paper's text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, InitRule, Scheme, Stream, tied_embedding_std
from spheret.connections.scalars import LearnedExponent, StepSize, check_start
from spheret.connections.stream import SphereStream
from spheret.geometry import compute_dtype, cos_and_sinc, norm, rows
from spheret.kernels import rotate, scale_norm

Decay = Literal["inv-sqrt", "inv", "none"]
LEARN, LEARN_PER_LAYER = "learn", "learn-per-layer"
# The closest reading of the paper's text: alpha = softplus(a) starting at 1, no norm before the head (reference notes
# Q4-Q9).
PAPER = {"alpha": 1.0, "alpha_form": "softplus", "final_norm": "none"}


def decay_factor(decay: str, index: int) -> float:
    """lambda_l for the 1-based index l: ``inv-sqrt`` 1/sqrt(l), ``inv`` 1/l, ``none`` 1."""
    factors = {"inv-sqrt": index**-0.5, "inv": 1 / index, "none": 1.0}
    if decay not in factors:
        raise ValueError(f"decay {decay!r}: choose one of {', '.join(factors)}")
    return factors[decay]


def default_alpha(n_layer: int) -> float:
    """Where alpha starts: ``2 / sqrt(L)``, at most 1.

    With lambda_l = 1/sqrt(l) the steps of all 2L sublayers then sum to about 8 at every depth. That sum decides:
    early in training every update aligns with the mean state, a sublayer multiplies the rest of a token's signal by
    ``1 - s c``, and a start of 1 (sum ``4 sqrt(L)``) collapses from 24 layers on, as a start of 1/2 does at 72.
    """
    return min(1.0, 2 / math.sqrt(n_layer))


class SpheretNorm(Connection):
    """Drop-in residual connection ``conn(h, f) -> h'`` that keeps the norm of ``h``.

    Args:
        p: exponent in (0, inf].
        layer_idx: index of the block, from 0; the equations' l is layer_idx + 1.
        alpha: initial step size.
        learn_p: learn the exponent, starting at ``p``.
        decay: ``inv-sqrt`` (the paper's), ``inv`` or ``none``.
        alpha_form: ``raw`` or ``softplus``.
        project: take the tangent part of the update; False adds the update as it is and projects the sum back onto
            the sphere.
        update_norm: ``rms`` divides the update by its root mean square first, ``none`` leaves it.
        exponent: one learned exponent that connections share.
        radius: a module that returns the radius to re-project onto; None keeps the norm of ``h``.
    """

    def __init__(
        self,
        p: float = 1.0,
        *,
        layer_idx: int = 0,
        alpha: float = 1.0,
        learn_p: bool = False,
        decay: str = "inv-sqrt",
        alpha_form: str = "raw",
        project: bool = True,
        update_norm: str = "none",
        exponent: LearnedExponent | None = None,
        radius: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if layer_idx < 0:
            raise ValueError(f"layer_idx = {layer_idx}: blocks are counted from 0")
        if not p > 0:
            raise ValueError(f"p = {p}: the exponent must lie in (0, inf]")
        if learn_p and math.isinf(p):
            raise ValueError("p = inf cannot be learned: start at a finite p, for example p=2, learn_p=True")
        if update_norm not in ("none", "rms"):
            raise ValueError(f"update_norm {update_norm!r}: choose none or rms")
        self.p, self.project, self.update_norm = float(p), project, update_norm
        self.step = StepSize(alpha, decay_factor(decay, layer_idx + 1), alpha_form)
        self.exponent = LearnedExponent(self.p) if learn_p else None
        # Shared modules belong to the stream: held in a tuple, they are not registered a second time here.
        self._shared = (exponent, radius)

    def reset_parameters(self) -> None:
        self.step.reset_parameters()
        if self.exponent is not None:
            self.exponent.reset_parameters()

    def current_p(self) -> float | Tensor:
        """The exponent in use, a float or a tensor of shape (1,)."""
        module = self._learned()
        return self.p if module is None else module()

    def _learned(self) -> LearnedExponent | None:
        return self._shared[0] or self.exponent

    def current_radius(self) -> Tensor | None:
        """The radius to re-project onto, of shape (1,), or None where the norm of ``h`` is kept."""
        return None if self._shared[1] is None else self._shared[1]()

    def update(self, f: Tensor) -> Tensor:
        """The sublayer's output as it enters the retraction."""
        if self.update_norm == "none":
            return f
        return nn.functional.rms_norm(f.to(compute_dtype(f)), (f.shape[-1],), eps=1e-12).to(f.dtype)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        f, radius = self.update(f), self.current_radius()
        if not self.project:
            return add_and_project(h, f, alpha=self.step(), p=self.current_p(), radius=radius)
        return self._rotate(h, f, radius, None)[0]

    def _rotate(
        self, h: Tensor, f: Tensor, radius: Tensor | None, branch_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        learned = self._learned()
        return rotate(
            h,
            f,
            self.step.alpha(),
            self.p if learned is None else learned.log_p,
            radius,
            lambda_l=self.step.lambda_l,
            log_p=learned is not None,
            branch_dtype=branch_dtype,
        )

    def combine_and_split(self, h: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        if not self.project:
            return super().combine_and_split(h, f)
        return self._rotate(h, self.update(f), self.current_radius(), sublayer_dtype(h))

    def extra_repr(self) -> str:
        return f"p={self.p:g}, project={self.project}, update_norm={self.update_norm}"


class ProjSpheretNorm(SpheretNorm):
    """p = 1: the metric (gnomonic) projection."""

    def __init__(self, *, layer_idx: int = 0, **options: float | bool | str) -> None:
        super().__init__(1.0, layer_idx=layer_idx, **options)  # type: ignore[arg-type]


class CaySpheretNorm(SpheretNorm):
    """p = 2: the Cayley (stereographic) retraction."""

    def __init__(self, *, layer_idx: int = 0, **options: float | bool | str) -> None:
        super().__init__(2.0, layer_idx=layer_idx, **options)  # type: ignore[arg-type]


def sublayer_dtype(h: Tensor) -> torch.dtype:
    """The dtype to which the linear layers of a sublayer would cast ``h``."""
    device = h.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype


def add_and_project(h: Tensor, f: Tensor, *, alpha: Tensor, p: float | Tensor, radius: Tensor | None) -> Tensor:
    """``r normalise(C h + S alpha f)`` with the whole of ``f``, radial part included; at p = 1 this is ``r normalise(h
    + alpha f)``."""
    dtype = compute_dtype(h, f)
    x, y = h.to(dtype), f.to(dtype)
    cos, sinc = cos_and_sinc(rows(x, y, alpha).beta, p)
    moved = cos * x + sinc * alpha * y
    return scale_norm(moved, norm(x) if radius is None else radius).to(h.dtype)


@dataclass(frozen=True, kw_only=True)
class SpheretScheme(Scheme):
    """Options of ``spheret:...``.

    Attributes:
        p: the exponent, a number in (0, inf]; learn (one for the model) or learn-per-layer (one for every connection).
        p_start: where a learned exponent starts.
        alpha: where the step size starts; by default 2/sqrt(L), at most 1.
        alpha_form: raw learns alpha itself, softplus learns a with alpha = softplus(a), always positive.
        decay: lambda_l, the factor on the step at depth l: inv-sqrt is 1/sqrt(l), inv 1/l, none 1.
        count: whether l counts blocks or sublayers.
        project: false adds the whole update, its radial part included, and projects the sum back onto the sphere.
        update_norm: rms divides the update by its root mean square first.
        reproject: every connection also brings the state back to the learned radius.
        learn_radius: whether the radius is learned; it starts at sqrt(d).
        final_norm: layernorm before the head, or none.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
    """

    name: ClassVar[str] = "spheret"
    equation: ClassVar[str] = """w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|,   theta = p arctan(beta/p)
h' = cos(theta) h + sin(theta) |h| w/|w|"""
    placement: ClassVar[str] = "ScaleNorm behind the embedding, LayerNorm (or none) before the head; |h| never changes"
    cost: ClassVar[str] = "9 units, 3 forward and 6 backward, in the compiled loops; 121 units in plain PyTorch"
    source: ClassVar[str] = "arXiv 2608.02668"
    keeps_norm: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"default": {}, "paper": PAPER}
    may_be_infinite: ClassVar[frozenset[str]] = frozenset({"p"})

    p: float | Literal["learn", "learn-per-layer"] = 1.0
    p_start: float = 1.0
    alpha: float | None = None
    alpha_form: Literal["raw", "softplus"] = "raw"
    decay: Decay = "inv-sqrt"
    count: Literal["block", "sublayer"] = "block"
    project: bool = True
    update_norm: Literal["none", "rms"] = "none"
    reproject: bool = False
    learn_radius: bool = True
    final_norm: Literal["layernorm", "none"] = "layernorm"
    gain: float = 1.0
    embedding_gain: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.p, str) and self.p not in (LEARN, LEARN_PER_LAYER):
            raise ValueError(f"p = {self.p!r}: give a number in (0, inf], {LEARN} or {LEARN_PER_LAYER}")
        if isinstance(self.p, float | int) and not self.p > 0:
            raise ValueError(f"p = {self.p}: the exponent must lie in (0, inf]")
        if not isinstance(self.p, str) and self.p_start != 1:
            raise ValueError(
                f"p_start = {self.p_start:g} says where a learned exponent starts, but p = {self.p:g} is fixed: "
                f"write p={LEARN} or p={LEARN_PER_LAYER}, or leave p_start away"
            )
        check_start(self.p_start)

    @property
    def summary(self) -> str:
        """What this exponent means; all members of the family differ in it alone."""
        if isinstance(self.p, str):
            where = "one p for the model" if self.p == LEARN else "a p for every connection"
            return f"p-SpheretNorm with {where}, learned, starting at {self.p_start:g}: theta = p arctan(beta/p)"
        known = {
            1.0: "Proj-SpheretNorm, the metric projection: p = 1, theta = arctan(beta) (arXiv 2608.02668)",
            2.0: "Cay-SpheretNorm, the Cayley transform: p = 2, theta = 2 arctan(beta/2) (arXiv 2608.02668)",
            math.inf: "GeoNorm, the exponential map: p = inf, theta = beta (arXiv 2601.22095)",
        }
        return known.get(self.p, f"p-SpheretNorm: p = {self.p:g}, theta = p arctan(beta/p) (arXiv 2608.02668)")

    def stream(self, dim: int, n_layer: int) -> SphereStream:
        exponent = LearnedExponent(self.p_start) if self.p == LEARN else None
        return SphereStream(
            dim,
            learn_radius=self.learn_radius,
            final_norm=self.final_norm,
            exponent=exponent,
            learns_exponents=isinstance(self.p, str),
        )

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> SpheretNorm:
        shared = stream if isinstance(stream, SphereStream) else None
        if self.reproject and shared is None:
            raise ValueError(
                "reproject=true: the radius to project onto belongs to the stream; build it once, stream = "
                "spheret.connections.parse_scheme(...).stream(dim, n_layer), use stream.enter behind the embedding, "
                "and give stream=stream to every connection; or give SpheretNorm a radius"
            )
        own_p = self.p == LEARN_PER_LAYER or (self.p == LEARN and shared is None)
        index = layer_idx if self.count == "block" else SUBLAYERS_PER_LAYER * layer_idx + sublayer
        return SpheretNorm(
            self.p_start if isinstance(self.p, str) else float(self.p),
            layer_idx=index,
            alpha=default_alpha(n_layer) if self.alpha is None else self.alpha,
            learn_p=own_p,
            decay=self.decay,
            alpha_form=self.alpha_form,
            project=self.project,
            update_norm=self.update_norm,
            exponent=shared.exponent if shared is not None and self.p == LEARN else None,
            radius=shared.radius if shared is not None and self.reproject else None,
        )

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(embedding_std=tied_embedding_std(dim, self.embedding_gain), gain=self.gain)
