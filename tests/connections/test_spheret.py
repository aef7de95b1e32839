"""The sphere's connections: their scalars, options and constructor errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spheret.connections import CaySpheretNorm, GeoNorm, ProjSpheretNorm, SpheretNorm
from spheret.connections.learned import LearnedExponent, StepSize
from spheret.geometry import LOG_P_RANGE
from spheret.kernels import retract
from spheret.models import GPT, GPTConfig
from spheret.training.optimizer import build_adamw, set_learning_rate


def build(scheme: str, **changes: int) -> GPT:
    torch.manual_seed(0)
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 61} | changes
    return GPT(GPTConfig(scheme=scheme, **shape))


def connections(model: GPT) -> list[SpheretNorm]:
    """In the order in which the stream passes them."""
    return [connection for block in model.blocks for _, _, connection in block.sublayers()]


def train(model: GPT, steps: int, lr: float) -> None:
    """A few steps on one batch, as the trainer makes them."""
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(1))
    optimizer = build_adamw(model, lr=lr)
    for _ in range(steps):
        set_learning_rate(optimizer, lr)
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        optimizer.step()
        model.after_step()
        optimizer.zero_grad(set_to_none=True)


# --- step size ---


def test_decay_counts_blocks() -> None:
    decay = [float(c.step.lambda_l) for c in connections(build("proj:alpha=0.7"))]
    assert decay == pytest.approx([1, 1, 2**-0.5, 2**-0.5, 3**-0.5, 3**-0.5])


def test_decay_counts_sublayers() -> None:
    decay = [float(c.step.lambda_l) for c in connections(build("proj:count=sublayer"))]
    assert decay == pytest.approx([i**-0.5 for i in range(1, 7)])


@pytest.mark.parametrize(("decay", "expected"), [("inv", [1, 1 / 2, 1 / 3]), ("none", [1, 1, 1])])
def test_other_decays(decay: str, expected: list[float]) -> None:
    found = [float(c.step.lambda_l) for c in connections(build(f"proj:decay={decay}"))[::2]]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("form", ["raw", "softplus"])
@pytest.mark.parametrize("start", [0.01, 0.5, 1.0, 30.0])
def test_step_starts_at_alpha_times_lambda_in_both_forms(form: str, start: float) -> None:
    step = StepSize(start, 0.5, form)
    assert step().item() == pytest.approx(0.5 * start, rel=1e-5)
    assert step.alpha().item() == pytest.approx(start, rel=1e-5)


def test_softplus_form_learns_the_argument_and_stays_positive() -> None:
    step = StepSize(1.0, 1.0, "softplus")
    assert step.weight.item() == pytest.approx(math.log(math.e - 1))
    with torch.no_grad():
        step.weight.fill_(-5.0)
    assert step().item() == pytest.approx(math.log1p(math.exp(-5)))
    raw = StepSize(0.0, 1.0)
    assert raw().item() == 0
    with torch.no_grad():
        raw.weight.fill_(-5.0)
    assert raw().item() == -5


@pytest.mark.parametrize("scheme", ["proj", "proj:alpha-form=softplus", "geonorm"])
def test_a_hundred_small_steps_move_alpha_in_a_bfloat16_model(scheme: str) -> None:
    """A bfloat16 number near 1 has neighbours 0.004 and 0.008 away: steps of 1e-3 would all be rounded off."""
    model = build(scheme, n_layer=1).to(torch.bfloat16)
    before = [c.step.weight.detach().clone() for c in connections(model)]
    train(model, 100, lr=1e-3)
    for old, connection in zip(before, connections(model), strict=True):
        assert connection.step.weight.dtype == torch.float32
        assert (connection.step.weight - old).abs().item() > 5e-3


# --- exponent ---


def exponents(model: GPT) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.endswith("log_p")}


def test_learned_exponent_is_one_for_the_model() -> None:
    model = build("spheret:p=learn,p-start=1.5")
    assert list(exponents(model)) == ["stream.exponent.log_p"]
    assert [c.current_p().item() for c in connections(model)] == pytest.approx([1.5] * 6)
    with torch.no_grad():
        model.stream.exponent.log_p.fill_(math.log(0.5))
    assert [c.current_p().item() for c in connections(model)] == pytest.approx([0.5] * 6)


def test_learned_exponent_per_layer_is_one_for_each_connection() -> None:
    model = build("spheret:p=learn-per-layer,p-start=1.5")
    assert len(exponents(model)) == 2 * 3
    with torch.no_grad():
        connections(model)[3].exponent.log_p.fill_(0.0)
    assert [c.current_p().item() for c in connections(model)] == pytest.approx([1.5, 1.5, 1.5, 1.0, 1.5, 1.5])


@pytest.mark.parametrize("kind", ["learn", "learn-per-layer"])
def test_exponent_moves_where_angles_are_large(kind: str) -> None:
    model = build(f"spheret:p={kind},alpha=2")
    train(model, 10, lr=3e-3)
    moved = torch.stack([p.detach().exp() - 1 for p in exponents(model).values()]).abs()
    assert moved.min() > 1e-3 and moved.mean() > 0.05


def test_exponent_is_found_from_data() -> None:
    """Targets made with p = 3 are fitted by p = 3."""
    torch.manual_seed(0)
    h, f = torch.randn(256, 16), 3 * torch.randn(256, 16)
    target = retract(h, f, alpha=1.0, p=3.0)
    connection = SpheretNorm(1.0, learn_p=True, alpha=1.0)
    connection.step.requires_grad_(False)
    optimizer = torch.optim.Adam([connection.exponent.log_p], lr=0.05)
    for _ in range(150):
        loss = (connection(h, f) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert connection.current_p().item() == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize(("far", "bound"), [(50.0, LOG_P_RANGE[1]), (-50.0, LOG_P_RANGE[0])])
def test_exponent_stays_in_its_range_and_can_come_back(far: float, bound: float) -> None:
    exponent = LearnedExponent()
    with torch.no_grad():
        exponent.log_p.fill_(far)
    p = exponent()
    assert p.item() == pytest.approx(math.exp(bound), rel=1e-4)
    p.sum().backward()
    assert exponent.log_p.grad.item() > 0


def test_exponent_stays_in_its_range_under_huge_steps() -> None:
    model = build("spheret:p=learn,alpha=2", n_layer=1)
    train(model, 5, lr=3.0)
    lowest, highest = (math.exp(bound) for bound in LOG_P_RANGE)
    assert model.stream.exponent.log_p.item() in LOG_P_RANGE  # the steps were huge
    assert lowest * 0.999 <= model.stream.exponent().item() <= highest * 1.001


@pytest.mark.parametrize("kind", ["learn", "learn-per-layer"])
def test_exponent_that_left_its_range_starts_back_from_its_end(kind: str) -> None:
    model = build(f"spheret:p={kind}")
    with torch.no_grad():
        for log_p in exponents(model).values():
            log_p.fill_(40.0)
    model.after_step()
    assert all(log_p.item() == LOG_P_RANGE[1] for log_p in exponents(model).values())


# --- other options ---


def test_update_norm_makes_the_step_independent_of_the_size_of_the_update() -> None:
    torch.manual_seed(0)
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    connection = SpheretNorm(alpha=1.0, update_norm="rms")
    torch.testing.assert_close(connection(h, 100 * f), connection(h, f))
    unit = f / f.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(connection(h, f), SpheretNorm(alpha=1.0)(h, unit))


def test_without_projection_p_1_is_the_normalised_sum() -> None:
    """In the limit of a tangent update both readings are the same map."""
    torch.manual_seed(0)
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    connection = SpheretNorm(project=False, alpha=0.5)
    moved = h + 0.5 * f
    expected = moved * (h.norm(dim=-1) / moved.norm(dim=-1)).unsqueeze(-1)
    torch.testing.assert_close(connection(h, f), expected)
    tangent = f - (h * f).sum(-1, keepdim=True) / h.pow(2).sum(-1, keepdim=True) * h
    torch.testing.assert_close(connection(h, tangent), SpheretNorm(alpha=0.5)(h, tangent))
    assert (connection(h, f) - SpheretNorm(alpha=0.5)(h, f)).abs().max() > 1e-2


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_without_projection_the_norm_is_kept_at_every_scale(scale: float) -> None:
    torch.manual_seed(0)
    h, f = (scale * torch.randn(4, 16) for _ in range(2))
    out = SpheretNorm(alpha=1.0, project=False)(h, f).double()
    torch.testing.assert_close(out.norm(dim=-1), h.double().norm(dim=-1), rtol=1e-5, atol=0)


def test_without_projection_a_zero_state_has_finite_gradients() -> None:
    h, f = torch.zeros(2, 16, requires_grad=True), torch.randn(2, 16, requires_grad=True)
    out = SpheretNorm(alpha=1.0, project=False)(h, f)
    out.sum().backward()
    assert not out.any() and h.grad.isfinite().all() and f.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"update_norm": "rms"}, {"project": False}, {"learn_p": True}])
def test_gradients_in_float64(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    connection = SpheretNorm(1.5, layer_idx=1, alpha=1.0, **options).double()
    h, f = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(connection, (h, f))


@pytest.mark.parametrize("scheme", ["proj", "geonorm", "spheret:p=0.5"])
def test_reprojection_keeps_the_radius_of_a_bfloat16_stream(scheme: str) -> None:
    errors = {}
    for option in ("true", "false"):
        model = build(f"{scheme}{',' if ':' in scheme else ':'}reproject={option}", n_embd=256)
        connection = connections(model)[1]
        generator = torch.Generator().manual_seed(2)
        h = model.stream.enter(torch.randn(64, 256, generator=generator)).bfloat16()
        with torch.no_grad():
            for _ in range(1000):
                h = connection(h, torch.randn(64, 256, generator=generator).bfloat16())
        errors[option] = (h.float().norm(dim=-1) / 16 - 1).abs()
    assert errors["true"].mean() < 5e-4 and errors["true"].max() < 1e-3  # what rounding the last row alone does
    assert errors["true"].mean() < errors["false"].mean() / 5


def test_radius_is_learned_unless_told_otherwise() -> None:
    assert build("proj").stream.radius.gain.requires_grad
    fixed = build("proj:learn-radius=false")
    assert not fixed.stream.radius.gain.requires_grad
    before = fixed.stream.radius.gain.clone()
    train(fixed, 3, lr=0.01)
    assert torch.equal(fixed.stream.radius.gain, before)


def test_final_norm_can_be_left_out() -> None:
    model = build("proj:final-norm=none")
    assert not [name for name, _ in model.named_parameters() if "final_norm" in name]
    h = torch.randn(2, 32)
    assert torch.equal(model.stream.exit(h), h)


# --- constructors ---


def test_named_classes_are_their_exponents() -> None:
    torch.manual_seed(0)
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    for connection, p in (
        (ProjSpheretNorm(layer_idx=2, alpha=1.0), 1.0),
        (CaySpheretNorm(layer_idx=2, alpha=1.0), 2.0),
        (GeoNorm(layer_idx=2, alpha=1.0), math.inf),
    ):
        assert connection.p == p
        torch.testing.assert_close(connection(h, f), retract(h, f, alpha=3**-0.5, p=p))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpheretNorm(0.0), r"p = 0\.0: .*\(0, inf\]"),
        (lambda: SpheretNorm(-1), r"p = -1"),
        (lambda: SpheretNorm(math.nan), "p = nan"),
        (lambda: SpheretNorm(math.inf, learn_p=True), "cannot be learned"),
        (lambda: SpheretNorm(1e4, learn_p=True, n_layer=2), "10000"),
        (lambda: SpheretNorm(layer_idx=-1), "layer_idx = -1: .*from 0"),
        (lambda: SpheretNorm(decay="sqrt"), "'sqrt': choose one of inv-sqrt, inv, none"),
        (lambda: SpheretNorm(n_layer=2, alpha_form="exp"), "'exp': choose raw or softplus"),
        (lambda: SpheretNorm(alpha=0.0, alpha_form="softplus"), r"alpha = 0\.0"),
        (lambda: SpheretNorm(alpha=math.inf), "alpha = inf"),
        (lambda: SpheretNorm(update_norm="l2"), "'l2': choose none or rms"),
        (lambda: ProjSpheretNorm(layer_idx=-1), "layer_idx = -1"),
        (lambda: CaySpheretNorm(decay="x"), "'x'"),
        (lambda: GeoNorm(layer_idx=-1), "layer_idx = -1"),
        (lambda: GeoNorm(learn_p=True), "cannot be learned"),
    ],
)
def test_constructor_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
