"""The schemes that are whole models against their formulas, written out here in plain tensor operations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from builders import build
from torch import Tensor

from spheret.connections import build_connection
from spheret.connections.angpt import gated_silu_factor
from spheret.models import GPT, fold_factors

LAYERS, HEADS, DIM, CONTEXT, VOCAB = 3, 2, 8, 6, 11
HEAD_DIM = DIM // HEADS
SHAPE = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": DIM, "block_size": CONTEXT, "vocab_size": VOCAB}
Weights = dict[str, Tensor]
Branch = Callable[[Tensor], Tensor]


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def unit(x: Tensor) -> Tensor:
    return x / x.pow(2).sum(-1, keepdim=True).sqrt()


def turn(x: Tensor) -> Tensor:
    """Complex numbers x_i + i x_{i + d_h/2}, multiplied by exp(i m base^(-2i/d_h))."""
    plane = torch.arange(HEAD_DIM // 2, dtype=torch.float32)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), 10_000.0 ** (-2 * plane / HEAD_DIM)).double()
    turned = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), -1)


def attention(x: Tensor, w: Weights, block: str, kind: str) -> Tensor:
    q, k, v = (x @ w[f"{block}.attn.c_attn.weight"].T).chunk(3, dim=-1)
    heads = []
    for i in range(HEADS):
        part = slice(i * HEAD_DIM, (i + 1) * HEAD_DIM)
        qi, ki, vi = q[..., part], k[..., part], v[..., part]
        if kind == "ngpt":
            scale = w[f"{block}.attn.qk_scale.weight"][part] * math.sqrt(DIM)
            qi, ki, root = scale * unit(turn(qi)), scale * unit(turn(ki)), math.sqrt(HEAD_DIM)
        else:
            nu = math.sqrt(DIM / HEAD_DIM) if kind == "angpt" else 1
            qi, ki = (rms(nu * t, w[f"{block}.attn.{n}_norm.weight"]) for t, n in ((qi, "q"), (ki, "k")))
            qi, ki, vi, root = turn(qi), turn(ki), nu * vi, 1 / math.sqrt(HEAD_DIM)
        scores = root * qi @ ki.transpose(-1, -2)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ vi)
    y = torch.cat(heads, -1) @ w[f"{block}.attn.c_proj.weight"].T
    return math.sqrt(HEAD_DIM / DIM) * y if kind == "angpt" else y


def mlp(x: Tensor, w: Weights, block: str, kind: str) -> Tensor:
    u, v = (x @ w[f"{block}.mlp.c_fc.weight"].T).chunk(2, dim=-1)
    silu = lambda t: t / (1 + torch.exp(-t))  # noqa: E731
    down = w[f"{block}.mlp.c_proj.weight"].T
    if kind in ("ngpt", "ngpt:mlp-scale=paper"):
        s_u, s_v = w[f"{block}.mlp.scale.weight"].chunk(2)
        of_u = math.sqrt(DIM) if kind == "ngpt" else 1
        return (of_u * s_u * u * silu(math.sqrt(DIM) * s_v * v)) @ down
    if kind == "angpt":
        u, v = math.sqrt(1 / 4) * u, math.sqrt(1 / 4) * v
        return math.sqrt(4) * ((gated_silu_factor(1 / 4) * u * silu(math.sqrt(DIM) * v)) @ down)
    return (u * silu(v)) @ down


def residual(scheme: str, w: Weights, connection: str, h: Tensor, branch: Branch) -> Tensor:
    if scheme == "gpt-qknorm":
        return h + branch(rms(h, w[f"{connection}.norm.weight"]))
    stored = w[f"{connection}.alpha.weight"] * math.sqrt(DIM)
    if scheme.startswith("ngpt"):
        alpha = (0.05 * stored).abs()
        return unit(h + alpha * (unit(branch(h)) - h))
    alpha = 0.01 * stored
    square = alpha**2 + (1 - alpha) ** 2
    nu = {"angpt": square.mean().rsqrt(), "angpt:nu=entry": square.rsqrt(), "angpt:nu=none": 1}[scheme]
    return nu * (h + alpha * (branch(h) - h))


def written_out(scheme: str, w: Weights, idx: Tensor) -> Tensor:
    """Logits (B, T, vocab)."""
    family = scheme.partition(":")[0]
    h = unit(w["wte.weight"][idx]) if family == "ngpt" else w["wte.weight"][idx]
    for i in range(LAYERS):
        block = f"blocks.{i}"
        attn = lambda x, b=block: attention(x, w, b, family)  # noqa: E731
        ff = lambda x, b=block: mlp(x, w, b, scheme if family == "ngpt" else family)  # noqa: E731
        h = residual(scheme, w, f"{block}.attn_connection", h, attn)
        h = residual(scheme, w, f"{block}.mlp_connection", h, ff)
    if family == "gpt-qknorm":
        return rms(h, w["stream.final_norm.weight"]) @ w["lm_head.weight"].T
    return w["logit_scale.weight"] * math.sqrt(DIM) * (h @ w["lm_head.weight"].T)


SCHEMES = ["gpt-qknorm", "ngpt", "ngpt:mlp-scale=paper", "angpt", "angpt:nu=entry", "angpt:nu=none"]


def shaken_model(scheme: str) -> GPT:
    """In float64; all vectors away from where they start, some entries of alpha beyond a change of sign."""
    model = build(scheme, seed=4, **SHAPE).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha.weight"):
                parameter.mul_(4 * torch.rand_like(parameter) - 1)
            elif parameter.dim() == 1:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    return model


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_model_equals_its_formula(scheme: str) -> None:
    model = shaken_model(scheme)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = written_out(scheme, weights, tokens())
    assert expected.std() > 0.05
    torch.testing.assert_close(model(tokens())[0].detach(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_equal_those_of_the_formula(scheme: str) -> None:
    model = shaken_model(scheme)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    direction = torch.randn(2, CONTEXT, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (written_out(scheme, weights, tokens()) * direction).sum().backward()
    (model(tokens())[0] * direction).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("scheme", ["angpt", "ngpt", "gpt-qknorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_folded_factors_leave_the_logits_as_they_are(scheme: str, bias: bool) -> None:
    model = build(scheme, bias=bias, **SHAPE | {"n_embd": 32}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    folded = fold_factors(model)
    torch.testing.assert_close(folded(tokens())[0], model(tokens())[0], rtol=0, atol=1e-5)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    reloaded = GPT(folded.config).eval()
    reloaded.load_state_dict(folded.state_dict())
    assert torch.equal(reloaded(tokens())[0], folded(tokens())[0])
    if scheme != "gpt-qknorm":
        assert not torch.equal(folded.blocks[0].mlp.c_fc.weight, model.blocks[0].mlp.c_fc.weight)
    with pytest.raises(ValueError, match=r"folded = True: .* for inference"):
        folded.after_step()


@pytest.mark.parametrize("scheme", ["ngpt", "angpt", "angpt:nu=entry", "gpt-qknorm"])
def test_connections_pass_gradcheck(scheme: str) -> None:
    torch.manual_seed(0)
    connection = build_connection(scheme, dim=5, n_layer=3).double()
    h, f = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    parameters = list(connection.parameters()) if scheme != "gpt-qknorm" else []
    assert torch.autograd.gradcheck(lambda h, f, *_: connection(h, f), (h, f, *parameters))
