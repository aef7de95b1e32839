"""Promises that every registered scheme keeps; a new scheme is picked up from the registry."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from builders import SCHEMES, batch, build, connections
from torch._dynamo.testing import CompileCounter

import spheret
from spheret.connections import canonical_name, parameter_roles, parse_scheme

NORM_KEEPING = [s for s in SCHEMES if parse_scheme(s).keeps_norm]

pytestmark = pytest.mark.parametrize("scheme", SCHEMES)


def test_forward_and_backward(scheme: str) -> None:
    model = build(scheme)
    logits, loss = model(*batch())
    assert logits.shape == (4, 16, 61) and logits.isfinite().all()
    assert abs(loss.item() - math.log(61)) < 1.5
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_loss_falls(scheme: str) -> None:
    model = build(scheme)
    factor = parse_scheme(scheme).training(n_layer=3).lr_factor
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * factor)
    x, y = batch()
    first = model(x, y)[1].item()
    for _ in range(30):
        loss = model(x, y)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.after_step()
    assert model(x, y)[1].item() < first - 1


def test_causal(scheme: str) -> None:
    model = build(scheme).eval()
    x, _ = batch()
    changed = x.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 61
    torch.testing.assert_close(model(x)[0][:, :10], model(changed)[0][:, :10], rtol=1e-5, atol=1e-6)


def test_meta_device_initialisation(scheme: str) -> None:
    """A model built without memory and initialised later is the same model."""
    expected = build(scheme)
    with torch.device("meta"):
        model = build(scheme)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(math.nan)
    torch.manual_seed(0)
    expected.reset_parameters()
    torch.manual_seed(0)
    model.reset_parameters()
    state, wanted = (
        dict(model.named_parameters()) | dict(model.named_buffers()),
        dict(expected.named_parameters()) | dict(expected.named_buffers()),
    )
    assert state.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(state[name], wanted[name]), (
            f"reset_parameters() of the module that holds {name} leaves it as is"
        )
    assert torch.equal(model(batch()[0])[0], expected(batch()[0])[0])


def test_every_parameter_has_one_role_and_scalars_are_not_decayed(scheme: str) -> None:
    model = build(scheme)
    roles = parameter_roles(model)
    assert sorted(roles) == sorted(name for name, _ in model.named_parameters())
    matrices = {name for name, role in roles.items() if role.decay}
    assert all("connection" not in name and "stream" not in name for name in matrices)
    assert {"wte.weight", "blocks.0.attn.c_attn.weight", "blocks.2.mlp.c_proj.weight"} <= matrices


def test_parameters_can_be_sharded_and_scalars_stay_float32(scheme: str) -> None:
    model = build(scheme)
    assert all(p.dim() >= 1 for p in model.parameters())
    scalars = [name for name, p in model.named_parameters() if p.numel() == 1]
    model.to(torch.bfloat16)
    kept = dict(model.named_parameters())
    assert all(kept[name].dtype == torch.float32 for name in scalars)
    loss = model(*batch())[1]
    loss.backward()
    assert loss.isfinite()


def test_autocast_keeps_the_stream_and_stays_close(scheme: str) -> None:
    model = build(scheme)
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x, y)[1]
    loss.backward()
    assert abs(loss.item() - model(x, y)[1].item()) < 0.05
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_hooks_of_every_connection_fire_once_per_forward(scheme: str) -> None:
    """Tools for pruning, quantisation, interpretation and profiling see a module through its hooks."""
    model = build(scheme, n_layer=2)
    fired: list[torch.nn.Module] = []
    for connection in connections(model):
        connection.register_forward_hook(lambda module, inputs, output: fired.append(module))
    model(*batch())
    assert fired == connections(model)


def test_split_gives_the_same_numbers_for_both_readers(scheme: str) -> None:
    stream = spheret.build_stream(scheme, dim=24, n_layer=6)
    connection = spheret.build_connection(scheme, dim=24, layer_idx=1, n_layer=6, stream=stream)
    h, f = torch.randn(5, 24), torch.randn(5, 24)
    with torch.no_grad():
        expected = connection(h, f)
        for out in connection(h, f, split=True):
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kept, branch = connection(h, f, split=True)
    torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(branch.float(), expected, rtol=1e-2, atol=1e-2)


def test_connection_is_a_drop_in(scheme: str) -> None:
    stream = spheret.build_stream(scheme, dim=24, n_layer=6)
    connection = spheret.build_connection(scheme, dim=24, layer_idx=1, n_layer=6, stream=stream)
    for shape in ((24,), (5, 24), (2, 3, 24), (0, 24)):
        h, f = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
        before = h.detach().clone(), f.detach().clone()
        out = connection(h, f)
        assert out.shape == h.shape and out.dtype == h.dtype
        out.sum().backward()
        assert h.grad.isfinite().all() and f.grad.isfinite().all()
        assert torch.equal(h, before[0]) and torch.equal(f, before[1])  # inputs are never written
    stats = connection.stats(torch.randn(4, 24), torch.randn(4, 24), torch.randn(4, 24))
    assert all(v.shape == (4,) and v.isfinite().all() for v in stats.values())


def test_a_token_without_an_embedding_has_a_finite_gradient(scheme: str) -> None:
    """A row of zeros, as padding gives it, has no direction on a sphere."""
    embedded = torch.randn(3, 32)
    embedded[1] = 0
    embedded.requires_grad_()
    out = build(scheme).stream.enter(embedded)
    (out * torch.randn(3, 32)).sum().backward()
    assert not out[1].any()
    assert embedded.grad.abs().max() < 1e4


@pytest.mark.parametrize(("dtype", "drift"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_norm_is_kept_over_a_thousand_connections(scheme: str, dtype: torch.dtype, drift: float) -> None:
    """The radius of the stream, where the scheme promises to keep it; other schemes must merely stay finite."""
    if scheme not in NORM_KEEPING:
        pytest.skip("this scheme does not promise to keep the norm")
    torch.manual_seed(0)
    model = build(scheme, n_embd=64)
    connection = model.blocks[0].mlp_connection
    h = model.stream.enter(torch.randn(32, 64)).to(dtype)
    radius = h.float().norm(dim=-1)
    with torch.no_grad():
        for _ in range(1000):
            h = connection(h, 0.5 * torch.randn(32, 64, dtype=dtype) + 0.3 * h)
    error = (h.float().norm(dim=-1) / radius - 1).abs()
    assert error.mean() < drift and error.max() < 4 * drift


def test_state_survives_a_copy(scheme: str) -> None:
    model = build(scheme)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    x, _ = batch()
    other = build(scheme)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(x)[0], model(x)[0])
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x)[0], model(x)[0])
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0)
    assert torch.equal(other(x)[0], model(x)[0])  # the copy shares nothing with the original


def test_facts_for_the_list_of_schemes(scheme: str) -> None:
    facts = parse_scheme(scheme)
    for fact in (facts.summary, facts.equation, facts.placement, facts.cost, facts.source):
        assert fact.strip() == fact and len(fact) > 5
    total, *parts = (int(n) for n in re.match(r"(\d+) units: (\d+) forward .*?(\d+) backward", facts.cost).groups())
    assert total == sum(parts)
    for part, words in re.findall(r"(\d+) (?:forward|backward) \(([^()]*)\)", facts.cost):
        named = [int(n) for n in re.findall(r" (\d+)(?:,|$)", words)]
        assert not named or int(part) == sum(named), words
    assert "h" in facts.equation and "=" in facts.equation
    assert max(map(len, facts.equation.splitlines())) <= 84  # whole lines on a terminal of 100 columns


def test_canonical_name_round_trips(scheme: str) -> None:
    name = canonical_name(scheme)
    assert parse_scheme(name) == parse_scheme(scheme)
    assert canonical_name(name) == name


@pytest.mark.slow
def test_blocks_compiled_one_by_one_share_two_graphs(scheme: str) -> None:
    """Equal layers share one; the first may differ, or be that whose numbers the compiler takes for constants."""
    torch._dynamo.reset()
    counter = CompileCounter()
    h = torch.randn(2, 4, 32)
    for block in build(scheme).blocks:
        torch.compile(block, backend=counter, fullgraph=True)(h, h)
    assert counter.frame_count <= 2


SAME_CODE = ("geonorm", "cay", "spheret:p=0.5", "spheret:p=0.25,preset=paper")
"""They differ from proj in nothing but numbers, so generating and compiling their C++ proves nothing new."""


@pytest.mark.usefixtures("cxx_compiler")
@pytest.mark.slow
def test_compiled_equals_eager(scheme: str) -> None:
    torch._dynamo.reset()
    model = build(scheme, n_layer=1)
    x, y = batch()
    loss = model(x, y)[1]
    loss.backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    backend = "aot_eager" if scheme in SAME_CODE else "inductor"
    compiled_loss = torch.compile(model, fullgraph=True, backend=backend)(x, y)[1]
    compiled_loss.backward()
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        scale = eager[name].abs().max().item()
        torch.testing.assert_close(
            parameter.grad, eager[name], rtol=1e-3, atol=2e-5 * max(scale, 1e-3), msg=lambda m, n=name: f"{n}: {m}"
        )
