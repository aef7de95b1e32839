"""The sphere's connections: their options, exponents, constructors and errors."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import batch, build, connections

from spheret.connections import (
    CaySpheretNorm,
    GeoNorm,
    ProjSpheretNorm,
    SpheretNorm,
    build_connection,
    parameter_roles,
    parse_scheme,
)
from spheret.connections.learned import LearnedExponent
from spheret.geometry import LOG_P_RANGE
from spheret.kernels import retract
from spheret.models import GPT
from spheret.training.optimizer import build_adamw, set_learning_rate


def train(model: GPT, steps: int, lr: float) -> None:
    """A few steps on one batch, as the trainer makes them."""
    x, y = batch(seed=1)
    optimizer = build_adamw(model, lr=lr)
    for _ in range(steps):
        set_learning_rate(optimizer, lr)
        model(x, y)[1].backward()
        optimizer.step()
        model.after_step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize(("n_layer", "p"), [(1, 1 / 6), (24, 1 / 6), (48, 1 / 12), (400, math.exp(-3))])
def test_the_default_exponent_caps_the_turn_of_the_whole_network(n_layer: int, p: float) -> None:
    connection = build_connection("spheret", dim=16, n_layer=n_layer)
    assert connection.p == pytest.approx(p)
    assert connection.step().item() == pytest.approx(1 / max(n_layer, 24))
    h, f = torch.randn(64, 16), 1e6 * torch.randn(64, 16)
    angle = torch.deg2rad(connection.stats(h, f, connection(h, f))["angle_deg"])
    assert (angle <= p * math.pi / 2 * 1.001).all()


def test_decay_counts_blocks() -> None:
    decay = [float(c.step.lambda_l) for c in connections(build("proj:alpha=0.7,decay=inv-sqrt"))]
    assert decay == pytest.approx([1, 1, 2**-0.5, 2**-0.5, 3**-0.5, 3**-0.5])


def test_decay_counts_sublayers() -> None:
    decay = [float(c.step.lambda_l) for c in connections(build("proj:decay=inv-sqrt,count=sublayer"))]
    assert decay == pytest.approx([i**-0.5 for i in range(1, 7)])


@pytest.mark.parametrize(("decay", "expected"), [("inv", [1, 1 / 2, 1 / 3]), ("none", [1, 1, 1])])
def test_other_decays(decay: str, expected: list[float]) -> None:
    found = [float(c.step.lambda_l) for c in connections(build(f"proj:decay={decay}"))[::2]]
    assert found == pytest.approx(expected)


def test_lambda_l_is_not_rounded_in_a_bfloat16_model() -> None:
    found = [float(c.step.lambda_l) for c in connections(build("proj:decay=inv-sqrt").to(torch.bfloat16))[::2]]
    assert found == pytest.approx([1, 2**-0.5, 3**-0.5], rel=1e-6)


@pytest.mark.parametrize("scheme", ["proj:alpha-lr=1", "proj:alpha-lr=1,alpha-form=softplus", "geonorm:alpha-lr=1"])
def test_a_hundred_small_steps_move_alpha_in_a_bfloat16_model(scheme: str) -> None:
    """A bfloat16 number near 1 has neighbours 0.004 and 0.008 away: steps of 1e-3 would all be rounded off."""
    model = build(scheme, n_layer=1).to(torch.bfloat16)
    before = [c.step.weight.detach().clone() for c in connections(model)]
    train(model, 100, lr=1e-3)
    for old, connection in zip(before, connections(model), strict=True):
        assert connection.step.weight.dtype == torch.float32
        assert (connection.step.weight - old).abs().item() > 5e-3


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
    """Adam's first step is the learning rate itself, whatever the gradient, unless that is lost in Adam's epsilon.

    Where an exponent goes in later steps is a matter of the draw: it may come back.
    """
    for seed in range(3):
        model = build(f"spheret:p={kind},p-start=1,alpha=2", seed=seed)
        train(model, 1, lr=3e-3)
        for name, log_p in exponents(model).items():
            assert abs(log_p.item()) == pytest.approx(LearnedExponent.LR_SCALE * 3e-3, rel=0.01), name


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


def test_update_norm_makes_the_step_independent_of_the_size_of_the_update() -> None:
    torch.manual_seed(0)
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    connection = SpheretNorm(1.0, alpha=1.0, update_norm="rms")
    torch.testing.assert_close(connection(h, 100 * f), connection(h, f))
    unit = f / f.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(connection(h, f), SpheretNorm(1.0, alpha=1.0)(h, unit))


def test_without_projection_p_1_is_the_normalised_sum() -> None:
    """In the limit of a tangent update both readings are the same map."""
    torch.manual_seed(0)
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    connection = SpheretNorm(1.0, project=False, alpha=0.5)
    moved = h + 0.5 * f
    expected = moved * (h.norm(dim=-1) / moved.norm(dim=-1)).unsqueeze(-1)
    torch.testing.assert_close(connection(h, f), expected)
    tangent = f - (h * f).sum(-1, keepdim=True) / h.pow(2).sum(-1, keepdim=True) * h
    torch.testing.assert_close(connection(h, tangent), SpheretNorm(1.0, alpha=0.5)(h, tangent))
    assert (connection(h, f) - SpheretNorm(1.0, alpha=0.5)(h, f)).abs().max() > 1e-2


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_without_projection_the_norm_is_kept_at_every_scale(scale: float) -> None:
    torch.manual_seed(0)
    h, f = (scale * torch.randn(4, 16) for _ in range(2))
    out = SpheretNorm(1.0, alpha=1.0, project=False)(h, f).double()
    torch.testing.assert_close(out.norm(dim=-1), h.double().norm(dim=-1), rtol=1e-5, atol=0)


def test_without_projection_a_zero_state_has_finite_gradients() -> None:
    h, f = torch.zeros(2, 16, requires_grad=True), torch.randn(2, 16, requires_grad=True)
    out = SpheretNorm(1.0, alpha=1.0, project=False)(h, f)
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
    model = build("proj:final-norm=none,head-input=state")
    assert not [name for name, _ in model.named_parameters() if "final_norm" in name]
    h = torch.randn(2, 32)
    assert torch.equal(model.stream.exit(h), h)


@pytest.mark.parametrize("p", [2.5, 3.0, 4.0, 16.0, math.inf])
def test_the_caution_names_the_step_that_reaches_the_antipode(p: float) -> None:
    (found,) = re.findall(r"beta > ([\d.]+)", parse_scheme(f"spheret:p={p:g}").caution)
    h = torch.tensor([1.0, 0.0], dtype=torch.float64)
    sides = [
        float(retract(h, torch.tensor([0.0, share * float(found)], dtype=torch.float64), alpha=1.0, p=p)[1])
        for share in (0.99, 1.01)
    ]
    assert sides[0] > 0 > sides[1]


def test_named_classes_are_their_exponents() -> None:
    torch.manual_seed(0)
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    for connection, p in (
        (ProjSpheretNorm(layer_idx=2, alpha=1.0), 1.0),
        (CaySpheretNorm(layer_idx=2, alpha=1.0), 2.0),
        (GeoNorm(layer_idx=2, alpha=1.0), math.inf),
    ):
        assert connection.p == p
        torch.testing.assert_close(connection(h, f), retract(h, f, alpha=1.0, p=p))


DEFAULTS = {"proj": ProjSpheretNorm, "cay": CaySpheretNorm, "geonorm": GeoNorm, "spheret": SpheretNorm}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"alpha": 0.5},
    {"decay": "inv"},
    {"count": "sublayer", "sublayer": 1},
    {"alpha_form": "softplus"},
    {"project": False},
    {"update_norm": "rms"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scheme", DEFAULTS)
def test_classes_have_the_defaults_of_their_scheme_at_every_depth(scheme: str, options: dict[str, Any]) -> None:
    named = {key: value for key, value in options.items() if key != "sublayer"}
    text = ",".join(f"{key}={str(value).lower()}" for key, value in named.items())
    name = f"{scheme}{(',' if ':' in scheme else ':') + text if text else ''}"
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    for n_layer, layer_idx in ((1, 0), (4, 1), (12, 2), (48, 47)):
        ours = DEFAULTS[scheme](layer_idx=layer_idx, n_layer=n_layer, **options)
        place = {"layer_idx": layer_idx, "n_layer": n_layer, "sublayer": options.get("sublayer", 0)}
        built = build_connection(name, dim=16, **place)
        assert isinstance(built, SpheretNorm) and repr(built).partition("(")[2] == repr(ours).partition("(")[2]
        assert torch.equal(ours(h, f), built(h, f))
        assert ours.state_dict().keys() == built.state_dict().keys()


@pytest.mark.parametrize(("named", "p"), [(ProjSpheretNorm, 1.0), (CaySpheretNorm, 2.0), (SpheretNorm, 0.7)])
def test_classes_learn_p_as_their_scheme_does(named: type[SpheretNorm], p: float) -> None:
    first = {"p": p} if named is SpheretNorm else {}
    ours = named(layer_idx=2, n_layer=12, learn_p=True, **first)
    built = build_connection(f"spheret:p=learn-per-layer,p-start={p}", dim=16, layer_idx=2, n_layer=12)
    h, f = torch.randn(4, 16), torch.randn(4, 16)
    assert torch.equal(ours(h, f), built(h, f))


def test_signatures_name_every_option_of_the_family() -> None:
    family = set(inspect.signature(SpheretNorm).parameters) - {"p", "exponent"}
    for named in (ProjSpheretNorm, CaySpheretNorm, GeoNorm):
        parameters = inspect.signature(named).parameters
        assert set(parameters) == family
        for name, parameter in parameters.items():
            assert parameter.default == inspect.signature(SpheretNorm).parameters[name].default, name


@pytest.mark.parametrize(
    ("connection", "words"),
    [
        (ProjSpheretNorm(layer_idx=2, n_layer=12), "p=1, alpha=0.04167 (start), layer_idx=2"),
        (SpheretNorm(1.5, n_layer=2, learn_p=True), "p=1.5 (start, learned), alpha=0.04167 (start), layer_idx=0"),
        (GeoNorm(layer_idx=1, alpha=0.25, project=False), "p=inf, alpha=0.25 (start), layer_idx=1, project=False"),
    ],
)
def test_repr_tells_p_alpha_and_layer(connection: SpheretNorm, words: str) -> None:
    assert words in repr(connection)


def test_repr_tells_a_shared_exponent() -> None:
    assert "p=1.5 (start, shared)" in repr(build("spheret:p=learn,p-start=1.5").blocks[0].mlp_connection)


@pytest.mark.parametrize("named", [SpheretNorm, ProjSpheretNorm, CaySpheretNorm, GeoNorm])
def test_layers_counted_from_one_are_refused(named: type[SpheretNorm]) -> None:
    with pytest.raises(TypeError, match="layer = 3: layer= counted from 1 was replaced by layer_idx, counted from 0"):
        named(layer=3, n_layer=12)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpheretNorm(0.0, n_layer=2), r"p = 0\.0: .*\(0, inf\]"),
        (lambda: SpheretNorm(-1, n_layer=2), r"p = -1"),
        (lambda: SpheretNorm(math.nan, n_layer=2), "p = nan"),
        (lambda: SpheretNorm(math.inf, learn_p=True, n_layer=2), "cannot be learned"),
        (lambda: SpheretNorm(1e4, learn_p=True, n_layer=2), "10000"),
        (lambda: SpheretNorm(1.0, layer_idx=-1), "layer_idx = -1: .*from 0"),
        (lambda: SpheretNorm(layer_idx=3, n_layer=3), r"layer_idx = 3: .*from 0 to n_layer - 1 = 2"),
        (lambda: SpheretNorm(), "n_layer is missing: p is 4/n_layer and alpha starts at 1/n_layer"),
        (lambda: SpheretNorm(alpha=1.0), "n_layer is missing"),
        (lambda: GeoNorm(layer_idx=2), "n_layer is missing"),
        (lambda: SpheretNorm(n_layer=2, count="layer"), "'layer': choose block or sublayer"),
        (lambda: SpheretNorm(n_layer=2, decay="sqrt"), "'sqrt': choose one of inv-sqrt, inv, none"),
        (lambda: SpheretNorm(n_layer=2, alpha_form="exp"), "'exp': choose raw or softplus"),
        (lambda: SpheretNorm(1.0, alpha=0.0, alpha_form="softplus"), r"alpha = 0\.0"),
        (lambda: SpheretNorm(1.0, alpha=math.inf), "alpha = inf"),
        (lambda: SpheretNorm(n_layer=2, update_norm="l2"), "'l2': choose none or rms"),
        (lambda: ProjSpheretNorm(layer_idx=-1), "layer_idx = -1"),
        (lambda: CaySpheretNorm(n_layer=2, decay="x"), "'x'"),
        (lambda: GeoNorm(layer_idx=-1), "layer_idx = -1"),
        (lambda: GeoNorm(n_layer=2, learn_p=True), "cannot be learned"),
    ],
)
def test_constructor_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_head_reads_the_part_of_the_state_that_is_orthogonal_to_the_embedding() -> None:
    model = build("proj:head-input=displacement,final-norm=none")
    h, entry = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    read = model.stream.exit(h, entry)
    along = (h * entry).sum(-1, keepdim=True) / entry.square().sum(-1, keepdim=True) * entry
    torch.testing.assert_close(read, h - along, rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match=r"the head reads the state instead .* stream.exit\(h, entry\)"):
        assert torch.equal(model.stream.exit(h), h)


def test_a_head_that_reads_the_displacement_does_not_repeat_the_token() -> None:
    """A tied head gives a state that has not moved away from its embedding a large logit for its own token."""
    idx, _ = batch()
    with torch.no_grad():
        own = {
            read: build(f"proj:head-input={read}")(idx)[0].gather(-1, idx.unsqueeze(-1)).mean()
            for read in ("state", "displacement")
        }
    assert own["state"] > 1 and abs(own["displacement"]) < 0.2 * own["state"]


def test_the_first_block_may_start_with_another_step() -> None:
    model = build("proj:alpha=0.1,first-alpha=1,decay=none")
    assert [c.step().item() for c in connections(model)] == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.1])


def test_alpha_has_a_learning_rate_of_its_own() -> None:
    roles = parameter_roles(build("proj:alpha-lr=0.05"))
    assert {role.lr_scale for name, role in roles.items() if name.endswith("step.weight")} == {0.05}
    with pytest.raises(ValueError, match=r"alpha_lr = -1\.0: a factor on a learning rate"):
        build("proj:alpha-lr=-1")
