r"""p-SpheretNorm: rotate the hidden state towards the tangent part of the update (arXiv 2608.02668).

    w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|
    theta = p arctan(beta/p),   h' = cos(theta) h + sin(theta) |h| w/|w|

p = 1 is Proj-SpheretNorm (metric projection), p = 2 Cay-SpheretNorm (Cayley transform), p = inf GeoNorm. ``|h|`` does
not change: a ScaleNorm with one learned radius sets it once, after the embedding. The paper's lambda_l is 1/sqrt(l),
where l counts the blocks from 1; the default is 1. For p > 2 a large step can rotate past the antipode.

The paper does not specify the start of alpha, its parametrisation, the initial weight scale or the final norm. The
defaults here were chosen by measurement (docs/log-training.md), so that one learning rate, a number over the width,
serves every depth: alpha starts at 1/L, at most 1/24, in every sublayer (no decay) and learns slowly, and the head
reads how far the state has moved away from the token's embedding. ``preset=paper`` is the closest reading of the
paper's text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, Scheme, Stream, counts_from_zero
from spheret.connections.learned import LearnedExponent, StepSize, check_start
from spheret.connections.options import InitRule, TrainingDefaults, tied_embedding_std
from spheret.connections.sphere_stream import FinalNorm, HeadInput, SphereStream
from spheret.geometry import LOG_P_RANGE, compute_dtype, cos_and_sinc, norm, rows
from spheret.kernels import rotate, scale_norm

AlphaForm = Literal["raw", "softplus"]
Count = Literal["block", "sublayer"]
Decay = Literal["inv-sqrt", "inv", "none"]
UpdateNorm = Literal["none", "rms"]
AUTO, LEARN, LEARN_PER_LAYER = "auto", "learn", "learn-per-layer"
ALPHA_LR = 0.05
"""Factor on the learning rate of alpha. At the full rate, one step moves an alpha of 1/L by a tenth and more."""
SHALLOW = 24
"""Models with fewer blocks have the step sizes and exponents of this number of blocks."""
# The closest reading of the paper's text: alpha = softplus(a) starting at 1, no norm before the head.
PAPER = {
    "alpha": 1.0,
    "alpha_form": "softplus",
    "alpha_lr": 1.0,
    "decay": "inv-sqrt",
    "head_input": "state",
    "final_norm": "none",
}


def decay_factor(decay: str, index: int) -> float:
    """lambda_l for the index l, counted from 1: ``inv-sqrt`` is 1/sqrt(l), ``inv`` 1/l, ``none`` 1.

    Raises:
        ValueError: an unknown ``decay``.
    """
    factors = {"inv-sqrt": index**-0.5, "inv": 1 / index, "none": 1.0}
    if decay not in factors:
        raise ValueError(f"decay {decay!r}: choose one of {', '.join(factors)}")
    return factors[decay]


def default_alpha(n_layer: int) -> float:
    """The default start of alpha: ``1 / L``, at most 1/24.

    From 24 blocks on, the step sizes of all 2L sublayers sum to 2. This sum decides at which learning rates a deep
    model trains. Early in training all updates align with the mean hidden state, and each sublayer multiplies the rest
    of a token's signal by ``1 - s c``, where s is its step size and c the cosine of update and mean hidden state. A sum
    of 8 is as good at a quarter of the best learning rate, and collapses at the best. With fewer blocks, larger steps
    gain 0.01 nats at the best learning rate and lose up to 0.3 at four times that rate.
    """
    return 1 / max(n_layer, SHALLOW)


def default_exponent(n_layer: int) -> float:
    """The exponent of ``p=auto``: ``4 / L``, at most 1/6, which caps the angle of every sublayer at ``2 pi / L``.

    The cap is four times the default step size, so it does not touch ordinary updates (an update as long as the hidden
    state turns it by 0.98 alpha), and the network as a whole can turn no token by more than 4 pi. p is at
    least the smallest exponent that can be learned.
    """
    return max(4 / max(n_layer, SHALLOW), math.exp(LOG_P_RANGE[0]))


class SpheretNorm(Connection):
    """Drop-in residual connection ``conn(h, f) -> h'`` that keeps the norm of ``h``.

    The defaults are those of the scheme ``spheret`` at the same depth.

    Args:
        p: exponent in (0, inf]; None: 4/n_layer, at most 1/6.
        layer_idx: index of the block, from 0; the equations' l is layer_idx + 1.
        n_layer: number of blocks in the model; required if ``p`` or ``alpha`` is None.
        sublayer: 0 or 1; used only if ``count`` is ``sublayer``.
        alpha: initial step size; None: 1/n_layer, at most 1/24.
        learn_p: learn the exponent, starting at ``p``.
        decay: how lambda_l falls with l: ``none``, ``inv-sqrt`` (as in the paper) or ``inv``.
        count: whether l counts blocks (``block``) or sublayers (``sublayer``).
        alpha_form: ``raw`` learns alpha itself, ``softplus`` learns a with alpha = softplus(a).
        alpha_lr: factor on the learning rate of alpha.
        project: rotate towards the tangent part of the update. False adds the whole update and projects the sum back
            onto the sphere.
        update_norm: ``rms`` divides the update by its root mean square first, ``none`` does not.
        exponent: a learned exponent that several connections share.
        radius: a module that returns the radius to re-project onto; None keeps the norm of ``h``.

    Raises:
        ValueError: a value out of range, or no ``n_layer`` where ``p`` or ``alpha`` follows from it.
        TypeError: the old ``layer``, which counted from 1.
    """

    @counts_from_zero
    def __init__(
        self,
        p: float | None = None,
        *,
        layer_idx: int = 0,
        n_layer: int | None = None,
        sublayer: int = 0,
        alpha: float | None = None,
        learn_p: bool = False,
        decay: Decay = "none",
        count: Count = "block",
        alpha_form: AlphaForm = "raw",
        alpha_lr: float = ALPHA_LR,
        project: bool = True,
        update_norm: UpdateNorm = "none",
        exponent: LearnedExponent | None = None,
        radius: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if layer_idx < 0 or (n_layer is not None and layer_idx >= n_layer):
            raise ValueError(f"layer_idx = {layer_idx}: blocks are counted from 0{_last(n_layer)}")
        if n_layer is None and None in (p, alpha):
            raise ValueError(
                "n_layer is missing: p is 4/n_layer and alpha starts at 1/n_layer; give the number of blocks, or both"
            )
        if p is None:
            p = default_exponent(cast(int, n_layer))
        if not p > 0:
            raise ValueError(f"p = {p}: the exponent must lie in (0, inf]")
        if learn_p and math.isinf(p):
            raise ValueError("p = inf cannot be learned: start at a finite p, for example p=2, learn_p=True")
        if update_norm not in ("none", "rms"):
            raise ValueError(f"update_norm {update_norm!r}: choose none or rms")
        if count not in ("block", "sublayer"):
            raise ValueError(f"count {count!r}: choose block or sublayer")
        index = layer_idx if count == "block" else SUBLAYERS_PER_LAYER * layer_idx + sublayer
        lambda_l = decay_factor(decay, index + 1)
        if alpha is None:
            alpha = default_alpha(cast(int, n_layer))
        self.p, self.layer_idx, self.project, self.update_norm = float(p), layer_idx, project, update_norm
        self.step = StepSize(alpha, lambda_l, alpha_form, alpha_lr)
        self.exponent = LearnedExponent(self.p) if learn_p else None
        # Shared modules belong to the stream. nn.Module registers modules, but not tuples of them, so the tuple keeps
        # their parameters from appearing a second time here.
        self._shared = (exponent, radius)

    def current_p(self) -> float | Tensor:
        """The exponent in use, a float or a tensor of shape (1,)."""
        module = self._learned()
        return self.p if module is None else module()

    def _learned(self) -> LearnedExponent | None:
        return self._shared[0] or self.exponent

    def current_radius(self) -> Tensor | None:
        """The radius to re-project onto, shape (1,), or None to keep the norm of ``h``."""
        return None if self._shared[1] is None else self._shared[1]()

    def update(self, f: Tensor) -> Tensor:
        """The update (..., d) that the retraction uses: ``f``, divided by its root mean square if ``update_norm`` is
        rms."""
        if self.update_norm == "none":
            return f
        return nn.functional.rms_norm(f.to(compute_dtype(f)), (f.shape[-1],), eps=1e-12).to(f.dtype)

    @torch.no_grad()
    def scalars(self) -> dict[str, float]:
        """``alpha`` without lambda_l, the ``step_size`` alpha lambda_l, and the exponent ``p``."""
        return {"alpha": float(self.step.alpha()), "step_size": float(self.step()), "p": float(self.current_p())}

    @torch.no_grad()
    def stats(self, h: Tensor, f: Tensor, out: Tensor) -> dict[str, Tensor]:
        """As for every connection, and ``saturation``: the angle as a share of the largest that p allows,
        ``theta / (p pi/2)``. At 1 a larger update turns the hidden state no further; at p = inf it is 0."""
        measured = super().stats(h, f, out)
        dtype = compute_dtype(h, f)
        beta = rows(h.to(dtype), self.update(f).to(dtype), self.step()).beta
        # theta = p arctan(beta/p), so p cancels. Not from angle_deg, which cannot tell theta from 360 degrees - theta.
        return measured | {"saturation": (torch.atan(beta / self.current_p()) / (math.pi / 2)).squeeze(-1)}

    def forward(self, h: Tensor, f: Tensor, split: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        if not self.project:
            return super().forward(h, f, split)
        learned = self._learned()
        # The kernel multiplies by lambda_l and takes the exponential of log_p: as separate operations on one number
        # each, they would add their launches to every connection.
        stream, branch = rotate(
            h,
            self.update(f),
            self.step.alpha(),
            self.p if learned is None else learned.log_p,
            self.current_radius(),
            lambda_l=self.step.lambda_l,
            log_p=learned is not None,
            branch_dtype=sublayer_dtype(h) if split else None,
        )
        return (stream, branch) if split else stream

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        if not self.project:
            return add_and_project(
                h, self.update(f), alpha=self.step(), p=self.current_p(), radius=self.current_radius()
            )
        return cast(Tensor, self.forward(h, f))

    def extra_repr(self) -> str:
        """p and whether it is learned, the start of alpha, and the block."""
        learned = "start, shared" if self._shared[0] is not None else "start, learned"
        p = f"p={self.p:g}" + (f" ({learned})" if self._shared[0] or self.exponent else "")
        changed = "" if self.project else ", project=False"
        changed += "" if self.update_norm == "none" else f", update_norm={self.update_norm}"
        return f"{p}, alpha={self.step.start:.4g} (start), layer_idx={self.layer_idx}{changed}"


def _last(n_layer: int | None) -> str:
    return "" if n_layer is None else f" to n_layer - 1 = {n_layer - 1}"


def sublayer_dtype(h: Tensor) -> torch.dtype:
    """The dtype to which the linear layers of a sublayer would cast ``h``."""
    device = h.device.type
    # Autocast leaves float64 alone. Some devices have none, the meta device for one, and PyTorch raises if asked.
    if h.dtype == torch.float64 or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return h.dtype
    return torch.get_autocast_dtype(device)


def add_and_project(h: Tensor, f: Tensor, *, alpha: Tensor, p: float | Tensor, radius: Tensor | None) -> Tensor:
    """``r normalise(C h + S alpha f)`` with the whole of ``f``, radial part included; (..., d) in the compute dtype.

    At p = 1 this is ``r normalise(h + alpha f)``.
    """
    dtype = compute_dtype(h, f)
    x, y = h.to(dtype), f.to(dtype)
    cos, sinc = cos_and_sinc(rows(x, y, alpha).beta, p)
    moved = cos * x + sinc * alpha * y
    # The norm of h in float64: rounded to float32 it comes out low more often than high just below a power of two,
    # where sqrt(d) may be, and a thousand connections add that up.
    return scale_norm(moved, norm(x.double()) if radius is None else radius).to(dtype)


class ProjSpheretNorm(SpheretNorm):
    """p = 1: the metric (gnomonic) projection. Arguments as for :class:`SpheretNorm`; defaults of ``proj``."""

    @counts_from_zero
    def __init__(
        self,
        *,
        layer_idx: int = 0,
        n_layer: int | None = None,
        sublayer: int = 0,
        alpha: float | None = None,
        learn_p: bool = False,
        decay: Decay = "none",
        count: Count = "block",
        alpha_form: AlphaForm = "raw",
        alpha_lr: float = ALPHA_LR,
        project: bool = True,
        update_norm: UpdateNorm = "none",
        radius: nn.Module | None = None,
    ) -> None:
        super().__init__(
            1.0,
            layer_idx=layer_idx,
            n_layer=n_layer,
            sublayer=sublayer,
            alpha=alpha,
            learn_p=learn_p,
            decay=decay,
            count=count,
            alpha_form=alpha_form,
            alpha_lr=alpha_lr,
            project=project,
            update_norm=update_norm,
            radius=radius,
        )


class CaySpheretNorm(SpheretNorm):
    """p = 2: the Cayley (stereographic) retraction. Arguments as for :class:`SpheretNorm`; defaults of ``cay``."""

    @counts_from_zero
    def __init__(
        self,
        *,
        layer_idx: int = 0,
        n_layer: int | None = None,
        sublayer: int = 0,
        alpha: float | None = None,
        learn_p: bool = False,
        decay: Decay = "none",
        count: Count = "block",
        alpha_form: AlphaForm = "raw",
        alpha_lr: float = ALPHA_LR,
        project: bool = True,
        update_norm: UpdateNorm = "none",
        radius: nn.Module | None = None,
    ) -> None:
        super().__init__(
            2.0,
            layer_idx=layer_idx,
            n_layer=n_layer,
            sublayer=sublayer,
            alpha=alpha,
            learn_p=learn_p,
            decay=decay,
            count=count,
            alpha_form=alpha_form,
            alpha_lr=alpha_lr,
            project=project,
            update_norm=update_norm,
            radius=radius,
        )


@dataclass(frozen=True, kw_only=True)
class SpheretScheme(Scheme):
    """Options of ``spheret:...``.

    Attributes:
        p: the exponent: auto (4/L, at most 1/6), a number in (0, inf], learn (one for the model) or learn-per-layer
            (one for every connection).
        p_start: initial value of a learned exponent; by default that of p=auto.
        alpha: initial step size; by default 1/L, at most 1/24.
        first_alpha: initial step size in the first block; by default as in the others.
        alpha_form: raw learns alpha itself, softplus learns a with alpha = softplus(a), which is positive.
        alpha_lr: factor on the learning rate of alpha.
        decay: lambda_l, the factor on the step size at depth l: none is 1, inv-sqrt 1/sqrt(l) (the paper's), inv 1/l.
        count: whether l counts blocks or sublayers.
        project: false adds the whole update, including its radial part, and projects the sum back onto the sphere.
        update_norm: rms divides the update by its root mean square first.
        reproject: every connection also re-projects the hidden state onto the learned radius.
        learn_radius: whether the radius is learned; it starts at sqrt(d).
        final_norm: layernorm before the head, or none.
        head_input: what the head reads: the state, or its displacement, the part orthogonal to the token's embedding.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
    """

    name: ClassVar[str] = "spheret"
    equation: ClassVar[str] = """w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|,   theta = p arctan(beta/p)
h' = cos(theta) h + sin(theta) |h| w/|w|"""
    placement: ClassVar[str] = "ScaleNorm after the embedding, LayerNorm (or none) before the head; |h| never changes"
    cost: ClassVar[str] = (
        "9 units: 3 forward (read h and f, write h'), 6 backward (read h, f and the two gradients of h', write two "
        "gradients), one kernel each; without a compiled kernel, every step of the formula is a separate operation"
    )
    source: ClassVar[str] = "arXiv 2608.02668"
    keeps_norm: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": PAPER | {"p": 1.0},  # the exponent of their best results
    }
    may_be_infinite: ClassVar[frozenset[str]] = frozenset({"p"})

    p: float | Literal["auto", "learn", "learn-per-layer"] = "auto"
    p_start: float | None = None
    alpha: float | None = None
    first_alpha: float | None = None
    alpha_form: AlphaForm = "raw"
    alpha_lr: float = ALPHA_LR
    decay: Decay = "none"
    count: Count = "block"
    project: bool = True
    update_norm: UpdateNorm = "none"
    reproject: bool = False
    learn_radius: bool = True
    final_norm: FinalNorm = "layernorm"
    head_input: HeadInput = "displacement"
    gain: float = 1.0
    embedding_gain: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.p, str) and self.p not in (AUTO, LEARN, LEARN_PER_LAYER):
            raise ValueError(f"p = {self.p!r}: give a number in (0, inf], {AUTO}, {LEARN} or {LEARN_PER_LAYER}")
        if isinstance(self.p, float | int) and not self.p > 0:
            raise ValueError(f"p = {self.p}: the exponent must lie in (0, inf]")
        if self.p_start is not None:
            if self.p not in (LEARN, LEARN_PER_LAYER):
                fixed = self.p if isinstance(self.p, str) else f"{self.p:g}"
                raise ValueError(
                    f"p_start = {self.p_start:g} sets where a learned exponent starts, but p = {fixed} is fixed: "
                    f"write p={LEARN} or p={LEARN_PER_LAYER}, or omit p_start"
                )
            check_start(self.p_start)

    @property
    def summary(self) -> str:
        """One line about this exponent, since the members of the family differ in nothing else."""
        if self.p == AUTO:
            return (
                "p-SpheretNorm with p = 4/L, at most 1/6: no sublayer of L blocks turns the state by more than 2 pi/L"
            )
        if isinstance(self.p, str):
            where = "one p for the model" if self.p == LEARN else "a p for every connection"
            start = "4/L, at most 1/6" if self.p_start is None else f"{self.p_start:g}"
            return f"p-SpheretNorm with {where}, learned, starting at {start}: theta = p arctan(beta/p)"
        known = {
            1.0: "Proj-SpheretNorm, the metric projection: p = 1, theta = arctan(beta) (arXiv 2608.02668)",
            2.0: "Cay-SpheretNorm, the Cayley transform: p = 2, theta = 2 arctan(beta/2) (arXiv 2608.02668)",
            math.inf: "GeoNorm, the exponential map: p = inf, theta = beta (arXiv 2601.22095)",
        }
        return known.get(self.p, f"p-SpheretNorm: p = {self.p:g}, theta = p arctan(beta/p) (arXiv 2608.02668)")

    @property
    def caution(self) -> str:
        """That a step can pass the antipode, and from which size on: theta reaches pi at beta = p tan(pi/p)."""
        if self.p == AUTO:
            return ""
        if isinstance(self.p, str):
            return "A learned p can grow above 2. A large step can then rotate the hidden state past its antipode."
        if self.p <= 2:
            return ""
        limit = math.pi if math.isinf(self.p) else self.p * math.tan(math.pi / self.p)
        return f"Because p > 2, a large step (beta > {limit:.3g}) rotates the hidden state past its antipode."

    def stream(self, dim: int, n_layer: int) -> SphereStream:
        exponent = LearnedExponent(self.start_of_p(n_layer)) if self.p == LEARN else None
        return SphereStream(
            dim,
            learn_radius=self.learn_radius,
            final_norm=self.final_norm,
            exponent=exponent,
            learns_exponents=self.p in (LEARN, LEARN_PER_LAYER),
            head_input=self.head_input,
        )

    def start_of_p(self, n_layer: int) -> float:
        """The exponent at the start of training, and always if it is not learned."""
        if not isinstance(self.p, str):
            return float(self.p)
        return default_exponent(n_layer) if self.p_start is None else self.p_start

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> SpheretNorm:
        shared = stream if isinstance(stream, SphereStream) else None
        if self.reproject and shared is None:
            raise ValueError(
                "reproject=true: the radius to project onto belongs to the stream; build it once, stream = "
                "spheret.build_stream(scheme, dim=dim, n_layer=n_layer), use stream.enter after the embedding, "
                "and give stream=stream to every connection; or give SpheretNorm a radius"
            )
        # A connection built without a stream has no shared exponent, so p=learn falls back to its own.
        own_p = self.p == LEARN_PER_LAYER or (self.p == LEARN and shared is None)
        return SpheretNorm(
            self.start_of_p(n_layer),
            layer_idx=layer_idx,
            n_layer=n_layer,
            sublayer=sublayer,
            alpha=self.first_alpha if layer_idx == 0 and self.first_alpha is not None else self.alpha,
            learn_p=own_p,
            decay=self.decay,
            count=self.count,
            alpha_form=self.alpha_form,
            alpha_lr=self.alpha_lr,
            project=self.project,
            update_norm=self.update_norm,
            exponent=shared.exponent if shared is not None and self.p == LEARN else None,
            radius=shared.radius if shared is not None and self.reproject else None,
        )

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(embedding_std=tied_embedding_std(dim, self.embedding_gain), gain=self.gain)

    def training(self, n_layer: int) -> TrainingDefaults:
        # Larger steps, as those of preset=paper, and a head that reads the state want lower learning rates.
        steady = self.alpha is None and self.decay == "none" and self.head_input == "displacement"
        return TrainingDefaults(lr_factor=2.0 if steady else 1.0, qkv_lr=0.4, mlp_out_lr=0.4)
