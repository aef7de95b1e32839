"""Initial weights of a GPT: their scales, and that they depend on the seed alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import build

from spheret.connections import list_schemes


def ratio_over_widths(scheme: str, **changes: Any) -> float:
    """Largest quotient of one sublayer's scales at widths 64 and 512."""
    narrow, wide = (branch_scales(scheme, dim, **changes) for dim in (64, 512))
    return max(max(a / b, b / a) for a, b in zip(narrow, wide, strict=True))


def branch_scales(scheme: str, dim: int, **changes: Any) -> list[float]:
    """Root mean square of every sublayer's output at initialisation, relative to that of its input, in order, averaged
    over seeds; 1 where the connection reads no more of an output than its direction."""
    scales = torch.zeros(4)
    for seed in range(3):
        model = build(
            scheme, seed=seed, n_layer=2, n_embd=dim, n_head=dim // 32, vocab_size=257, block_size=32, **changes
        )
        tokens = torch.randint(257, (8, 32))
        with torch.no_grad():
            h, found = model.embed(tokens), []
            for block in model.blocks:
                for _, sublayer, connection in block.sublayers():
                    x = connection.branch_input(h)
                    f = sublayer(x)
                    ratio = (f.square().mean() / x.square().mean()).sqrt()
                    direction_only = torch.allclose(connection(h, 2 * f), connection(h, f))
                    found.append(torch.ones(()) if direction_only else ratio)
                    h = connection(h, f)
        scales += torch.stack(found) / 3
    return scales.tolist()


@pytest.mark.parametrize("scheme", list_schemes())
def test_initial_response_does_not_depend_on_the_width(scheme: str) -> None:
    """Over a factor of 8 in width. The largest change is 1.36, in the attention of the second block of ``pre-ln`` (mean
    of twelve seeds, each 7% off at width 64): initial embeddings shrink with the width, and the first block's output,
    which tokens have more in common, does not."""
    assert ratio_over_widths(scheme) < 1.6


def test_nanogpt_init_does_depend_on_the_width() -> None:
    """The reason for the width-aware rule, and proof that the test above can fail."""
    assert ratio_over_widths("pre-ln", init="nanogpt") > 2.5


@pytest.mark.parametrize("scheme", ["pre-ln", "proj"])
def test_nanogpt_init_has_its_published_scales(scheme: str) -> None:
    model = build(init="nanogpt", scheme=scheme, n_layer=8, n_embd=128, vocab_size=257, block_size=64, bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "c_attn.weight", "c_fc.weight", "wte.weight", "wpe.weight")):
            expected = 0.02 / math.sqrt(2 * 8) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.1 * expected, name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name


def test_initial_weights_are_a_function_of_the_seed() -> None:
    first, same, other = build(seed=7), build(seed=7), build(seed=8)
    for (name, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.dim() == 2:
            assert not torch.equal(a, c), name


def test_reset_parameters_starts_over() -> None:
    model = build(scheme="spheret:p=learn", bias=True)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(9.0)
    torch.manual_seed(0)
    model.reset_parameters()
    fresh = build(scheme="spheret:p=learn", bias=True)
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert (p != 9.0).any(), name
        if p.dim() < 2:
            assert torch.equal(p, fresh.get_parameter(name)), name
