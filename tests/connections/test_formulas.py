"""Every scheme against its formula, written out here once more in plain tensor operations on the model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from builders import build
from torch import Tensor

from spheret.models import GPT

LAYERS, HEADS, DIM, CONTEXT, VOCAB = 3, 2, 8, 6, 11
SHAPE = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": DIM, "block_size": CONTEXT, "vocab_size": VOCAB}
# lambda_l = 1/sqrt(l), a Python float in every model.
LAMBDA = {layer: 1 / math.sqrt(layer) for layer in range(1, LAYERS + 1)}
Weights = dict[str, Tensor]
Norm = Callable[[Tensor, Tensor], Tensor]
Residual = Callable[[Weights, str, int, Tensor, Callable[[Tensor], Tensor]], Tensor]


def layer_norm(x: Tensor, gain: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def dyt(x: Tensor, w: Weights, name: str) -> Tensor:
    e = (2 * w[f"{name}.alpha.weight"] * x).exp()
    return w[f"{name}.gamma"] * (e - 1) / (e + 1) + w.get(f"{name}.beta", 0)


def attention(x: Tensor, w: Weights, block: str) -> Tensor:
    q, k, v = (x @ w[f"{block}.attn.c_attn.weight"].T).chunk(3, dim=-1)
    heads = []
    for i in range(HEADS):
        part = slice(i * DIM // HEADS, (i + 1) * DIM // HEADS)
        scores = q[..., part] @ k[..., part].transpose(-1, -2) / math.sqrt(DIM // HEADS)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[..., part])
    return torch.cat(heads, -1) @ w[f"{block}.attn.c_proj.weight"].T


def mlp(x: Tensor, w: Weights, block: str) -> Tensor:
    u = x @ w[f"{block}.mlp.c_fc.weight"].T
    return (u * (1 + torch.erf(u / math.sqrt(2))) / 2) @ w[f"{block}.mlp.c_proj.weight"].T


def pre_ln(share: float) -> Residual:
    def residual(w: Weights, connection: str, layer: int, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return h + share * branch(layer_norm(h, w[f"{connection}.norm.weight"]))

    return residual


def post_ln(share: float) -> Residual:
    def residual(w: Weights, connection: str, layer: int, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return layer_norm(h + share * branch(h), w[f"{connection}.norm.weight"])

    return residual


def peri_ln(norm: Norm) -> Residual:
    def residual(w: Weights, connection: str, layer: int, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        f = branch(norm(h, w[f"{connection}.input_norm.weight"]))
        return h + norm(f, w[f"{connection}.output_norm.weight"])

    return residual


def pre_dyt(w: Weights, connection: str, layer: int, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    return h + branch(dyt(h, w, f"{connection}.dyt"))


def keel(norm: Norm, alpha: float, whole_first_block: bool = False) -> Residual:
    def residual(w: Weights, connection: str, layer: int, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        f = branch(norm(h, w[f"{connection}.inner.weight"]))
        if connection == "blocks.0.attn_connection" or (layer == 1 and whole_first_block):
            return h + f
        factor = 1 if connection == "blocks.0.mlp_connection" else alpha
        return norm(factor * h + f, w[f"{connection}.outer.norm.weight"])

    return residual


def rotation(angle: Callable[[Tensor], Tensor], *, decays: bool = False) -> Residual:
    def residual(w: Weights, connection: str, layer: int, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        step = w[f"{connection}.step.weight"] * (LAMBDA[layer] if decays else 1)
        radius, f = h.pow(2).sum(-1, keepdim=True).sqrt(), branch(h)
        tangent = step * (f - (h * f).sum(-1, keepdim=True) / radius**2 * h)
        length = tangent.pow(2).sum(-1, keepdim=True).sqrt()
        theta = angle(length / radius)
        return theta.cos() * h + theta.sin() * radius * tangent / length

    return residual


def on_the_sphere(w: Weights, x: Tensor) -> Tensor:
    return w["stream.radius.gain"] * x / x.pow(2).sum(-1, keepdim=True).sqrt()


def leaving_the_sphere(w: Weights, h: Tensor, entry: Tensor) -> Tensor:
    displacement = h - (h * entry).sum(-1, keepdim=True) / entry.pow(2).sum(-1, keepdim=True) * entry
    return layer_norm(displacement, w["stream.final_norm.weight"])


RESIDUALS: dict[str, Residual] = {
    "pre-ln": pre_ln(1),
    "pre-ln:branch=0.5": pre_ln(0.5),
    "pre-ln:branch=inv-sqrt": pre_ln(1 / math.sqrt(2 * LAYERS)),
    "post-ln": post_ln(1 / math.sqrt(2 * LAYERS)),
    "post-ln:branch=1": post_ln(1),
    "peri-ln": peri_ln(layer_norm),
    "peri-ln:norm=rmsnorm,embedding-norm=false": peri_ln(rms_norm),
    "pre-dyt": pre_dyt,
    "pre-dyt:preset=paper": pre_dyt,
    "keel": keel(layer_norm, alpha=6),
    "keel:preset=paper": keel(rms_norm, alpha=6),
    "keel:alpha=3,first-block=pre-ln": keel(layer_norm, alpha=3, whole_first_block=True),
    "geonorm": rotation(lambda beta: beta),
    "proj": rotation(lambda beta: torch.atan(beta)),
    "cay": rotation(lambda beta: 2 * torch.atan(beta / 2)),
    "spheret:p=0.5": rotation(lambda beta: 0.5 * torch.atan(beta / 0.5)),
    "spheret:p=0.7": rotation(lambda beta: 0.7 * torch.atan(beta / 0.7)),
    "spheret": rotation(lambda beta: torch.atan(6 * beta) / 6),
    "proj:decay=inv-sqrt,head-input=state": rotation(lambda beta: torch.atan(beta), decays=True),
}


# What stands after the embedding and before the head; other schemes enter by ScaleNorm and leave by LayerNorm.
ENTRIES: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "pre-ln": lambda w, x: x,
    "post-ln": lambda w, x: layer_norm(x, w["stream.entry_norm.weight"]),
    "peri-ln": lambda w, x: layer_norm(x, w["stream.entry_norm.weight"]),
    "peri-ln:norm=rmsnorm,embedding-norm=false": lambda w, x: x,
    "pre-dyt": lambda w, x: w["stream.scale.weight"] * x,
    "pre-dyt:preset=paper": lambda w, x: x,
    "keel": lambda w, x: x,
}
EXITS: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "pre-ln": lambda w, h: layer_norm(h, w["stream.final_norm.weight"]),
    "post-ln": lambda w, h: h,
    "peri-ln": lambda w, h: layer_norm(h, w["stream.final_norm.weight"]),
    "peri-ln:norm=rmsnorm,embedding-norm=false": lambda w, h: rms_norm(h, w["stream.final_norm.weight"]),
    "pre-dyt": lambda w, h: dyt(h, w, "stream.dyt"),
    "keel": lambda w, h: layer_norm(h, w["stream.final_norm.weight"]),
    "keel:preset=paper": lambda w, h: rms_norm(h, w["stream.final_norm.weight"]),
    "proj:decay=inv-sqrt,head-input=state": lambda w, h: layer_norm(h, w["stream.final_norm.weight"]),
}


def end(
    ends: dict[str, Callable[[Weights, Tensor], Tensor]], scheme: str
) -> Callable[[Weights, Tensor], Tensor] | None:
    return ends.get(scheme, ends.get(scheme.partition(":")[0]))


def written_out(scheme: str, w: Weights, idx: Tensor) -> Tensor:
    """Logits (B, T, vocab)."""
    h = w["wte.weight"][idx] + w["wpe.weight"][: idx.shape[1]]
    entry = h = (end(ENTRIES, scheme) or on_the_sphere)(w, h)
    for i in range(LAYERS):
        block = f"blocks.{i}"
        for name, sublayer in (("attn", attention), ("mlp", mlp)):
            branch = lambda x, f=sublayer, b=block: f(x, w, b)  # noqa: E731
            h = RESIDUALS[scheme](w, f"{block}.{name}_connection", i + 1, h, branch)
    leave = end(EXITS, scheme)
    h = leaving_the_sphere(w, h, entry) if leave is None else leave(w, h)
    return h @ w["wte.weight"].T


def model_with_uncommon_weights(scheme: str) -> GPT:
    """In float64; gains, offsets, step sizes and radius away from where they start, so that each is seen to act."""
    model = build(scheme, seed=4, **SHAPE).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter)).add_(0.1 * torch.rand_like(parameter))
    return model


@pytest.mark.parametrize("scheme", RESIDUALS)
def test_model_equals_its_formula(scheme: str) -> None:
    model = model_with_uncommon_weights(scheme)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    idx = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    expected = written_out(scheme, weights, idx)
    torch.testing.assert_close(model(idx)[0].detach(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scheme", RESIDUALS)
def test_gradients_equal_those_of_the_formula(scheme: str) -> None:
    model = model_with_uncommon_weights(scheme)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    idx = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    direction = torch.randn(2, CONTEXT, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (written_out(scheme, weights, idx) * direction).sum().backward()
    (model(idx)[0] * direction).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-7, atol=1e-9, msg=name)


def test_schemes_differ_from_each_other() -> None:
    """The rotations agree to second order in the angle; here the angles are large enough to tell them apart."""
    idx = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    # With these weights, pre-ln:branch=inv-sqrt has in its branch what pre-ln has in its last projections.
    outputs = {scheme: model_with_uncommon_weights(scheme)(idx)[0].detach() for scheme in RESIDUALS}
    torch.testing.assert_close(outputs.pop("pre-ln:branch=inv-sqrt"), outputs["pre-ln"], rtol=1e-6, atol=1e-6)
    for i, a in enumerate(outputs.values()):
        for b in list(outputs.values())[:i]:
            assert (a - b).abs().max() > 1e-3
