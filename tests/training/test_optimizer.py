"""Parameter groups, AdamW, and the learning rate at each step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from spheret.connections import ParameterRole, list_schemes, parameter_roles
from spheret.models import GPT, GPTConfig
from spheret.training.optimizer import build_adamw, learning_rate, parameter_groups, set_learning_rate


class Gate(nn.Module):
    """Two scalars, one with a learning rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.slow = nn.Parameter(torch.ones(1))

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"alpha": ParameterRole(decay=False), "slow": ParameterRole(decay=False, lr_scale=0.25)}


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.gate = Gate()


def scheme_gpt(scheme: str) -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, scheme=scheme, bias=True))


def test_groups_follow_what_the_modules_answer() -> None:
    toy = Toy()
    groups = parameter_groups(toy, weight_decay=0.1)
    by_key = {(group["weight_decay"], group["lr_scale"]): group["params"] for group in groups}
    assert len(groups) == len(by_key)
    assert [len(by_key[key]) for key in ((0.1, 1.0), (0.0, 1.0), (0.0, 0.25))] == [1, 4, 1]
    assert by_key[0.1, 1.0][0] is toy.linear.weight
    assert by_key[0.0, 0.25][0] is toy.gate.slow


@pytest.mark.parametrize("scheme", list_schemes())
def test_every_parameter_of_every_scheme_is_in_one_group_and_scalars_are_not_decayed(scheme: str) -> None:
    model = scheme_gpt(scheme)
    groups = parameter_groups(model, weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    decayed = {id(parameter) for group in groups if group["weight_decay"] > 0 for parameter in group["params"]}
    wrong = [name for name, p in model.named_parameters() if id(p) in decayed and p.ndim < 2]
    assert wrong == []
    assert decayed


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_queries_and_last_projections_have_learning_rates_of_their_own(mlp: str) -> None:
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, scheme="spheret", mlp=mlp))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, weight_decay=0.1, lr_factors={"qkv": 0.25, "mlp-out": 0.5})
    scales = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    for i in range(2):
        assert scales[f"blocks.{i}.attn.c_attn.weight"] == (0.25, 0.1)
        assert scales[f"blocks.{i}.mlp.c_proj.weight"] == (0.5, 0.1)
        assert scales[f"blocks.{i}.attn.c_proj.weight"] == scales[f"blocks.{i}.mlp.c_fc.weight"] == (1.0, 0.1)
        assert scales[f"blocks.{i}.mlp_connection.step.weight"] == (0.05, 0.0)


def test_a_parameter_nobody_answers_for_is_named() -> None:
    toy = Toy()
    toy.orphan = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="orphan"):
        parameter_groups(toy, weight_decay=0.1)
    roles = {name: role for name, role in parameter_roles(Toy()).items() if name != "gate.alpha"}
    with pytest.raises(ValueError, match=r"gate\.alpha"):
        parameter_groups(Toy(), weight_decay=0.1, roles=roles)


def test_frozen_parameters_are_left_out() -> None:
    toy = Toy()
    toy.linear.weight.requires_grad_(False)
    grouped = [p for group in parameter_groups(toy, 0.1) for p in group["params"]]
    assert all(p is not toy.linear.weight for p in grouped)


def test_lr_scale_holds_at_every_step() -> None:
    toy = Toy()
    optimizer = build_adamw(toy, lr=0.1, weight_decay=0.0)
    for lr in (0.1, 0.04):
        before = (toy.gate.alpha.item(), toy.gate.slow.item())
        toy.gate.alpha.grad, toy.gate.slow.grad = torch.ones(1), torch.ones(1)
        set_learning_rate(optimizer, lr)
        optimizer.step()
        # Adam's step under a constant gradient is the learning rate itself.
        assert before[0] - toy.gate.alpha.item() == pytest.approx(lr, rel=1e-4)
        assert before[1] - toy.gate.slow.item() == pytest.approx(lr / 4, rel=1e-4)


def test_only_decayed_parameters_shrink() -> None:
    toy = Toy()
    weight, gain = toy.linear.weight.detach().clone(), toy.norm.weight.detach().clone()
    optimizer = build_adamw(toy, lr=0.1, weight_decay=0.5)
    for parameter in toy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(toy.linear.weight.detach(), weight * (1 - 0.05))
    assert torch.equal(toy.norm.weight, gain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_step_is_that_of_plain_adamw(dtype: torch.dtype) -> None:
    """Fused or not, whatever the device and dtype allow."""
    torch.manual_seed(0)
    ours, plain = Toy().to(dtype), Toy().to(dtype)
    plain.load_state_dict(ours.state_dict())
    optimizer = build_adamw(ours, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    set_learning_rate(optimizer, 0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in ours.parameters()]
        for model in (ours, plain):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
        optimizer.step()
        reference.step()
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if name != "gate.slow":
            torch.testing.assert_close(a, b)


# --- the schedule ---


def curve(steps: int, **options: object) -> list[float]:
    return [learning_rate(step, lr=2.0, steps=steps, **options) for step in range(steps)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_and_reaches_the_peak(kind: str) -> None:
    rates = curve(100, warmup_steps=9, kind=kind)
    assert rates[:10] == pytest.approx([2.0 * (i + 1) / 10 for i in range(10)])
    assert max(rates) == 2.0


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [10, 11, 1000])
def test_the_decay_ends_exactly_at_the_last_step(kind: str, ratio: float, steps: int) -> None:
    rates = curve(steps, warmup_steps=3, kind=kind, min_lr_ratio=ratio)
    assert rates[-1] == ratio * 2.0
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert ratio == 1.0 or rates[-2] > rates[-1]


def test_cosine_passes_its_middle_half_way() -> None:
    assert curve(101, kind="cosine", min_lr_ratio=0.5)[50] == pytest.approx(1.5)


def test_wsd_is_constant_and_then_linear() -> None:
    rates = curve(100, kind="wsd", min_lr_ratio=0.0, decay_fraction=0.2)
    assert rates[:80] == [2.0] * 80
    assert rates[80:] == pytest.approx([2.0 * (1 - (i + 1) / 20) for i in range(20)])


def test_constant_stays() -> None:
    assert curve(10, kind="constant") == [2.0] * 10


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_a_single_step_has_a_rate(kind: str) -> None:
    assert all(0 < rate <= 2.0 and math.isfinite(rate) for rate in curve(1, kind=kind))


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="use 0 to 9"):
        learning_rate(step, lr=1.0, steps=10)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'linear'"):
        learning_rate(0, lr=1.0, steps=10, kind="linear")  # type: ignore[arg-type]
