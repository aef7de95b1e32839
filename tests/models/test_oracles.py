"""The whole-model schemes against independent implementations with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import build
from torch import Tensor, nn

from spheret.models import GPT

VOCAB, CONTEXT, LAYERS, WIDTH, HEADS = 97, 32, 3, 64, 4


def batch() -> Tensor:
    return torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(5))


def ours(scheme: str) -> GPT:
    shape = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "vocab_size": VOCAB, "block_size": CONTEXT}
    return build(scheme, **shape).eval()


@torch.no_grad()
def shake(model: GPT) -> None:
    """Gains and scales away from where they start, so that each is seen to act."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.mul_(1 + 0.5 * torch.rand_like(parameter))


def neighbours(rows: Tensor) -> Tensor:
    """Rows (heads x d_h, ...) from our planes (i, i + d_h/2) to planes of neighbours (2i, 2i + 1)."""
    heads = rows.view(HEADS, 2, WIDTH // HEADS // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


@torch.no_grad()
def copy_to_ngpt(model: GPT, other: Any) -> None:
    """Names and layouts of ngpt-pytorch: q, k and v apart, the halves of the MLP apart, one scale on queries for two on
    queries and keys, no absolute value on alpha."""
    pairs: list[tuple[Tensor, Tensor]] = [
        (other.token_embed.weight, model.wte.weight),
        (other.to_logits.weight, model.lm_head.weight),
        (other.logit_scale.scale, model.logit_scale.weight),
    ]
    for block, (attn, ff) in zip(model.blocks, other.layers, strict=True):
        q, k, v = block.attn.c_attn.weight.chunk(3)
        up, gate = block.mlp.c_fc.weight.chunk(2)
        up_scale, gate_scale = block.mlp.scale.weight.chunk(2)
        pairs += [
            (attn.fn.to_q.weight, neighbours(q)),
            (attn.fn.to_k.weight, neighbours(k)),
            (attn.fn.to_v.weight, v),
            (attn.fn.to_out.weight, block.attn.c_proj.weight),
            (attn.fn.qk_scale.scale, neighbours(block.attn.qk_scale().square()) / attn.fn.qk_scale.forward_scale),
            (attn.branch_scale.scale, block.attn_connection.alpha.weight),
            (ff.fn.to_hidden.weight, up),
            (ff.fn.to_gate.weight, gate),
            (ff.fn.hidden_scale.scale, up_scale),
            (ff.fn.gate_scale.scale, gate_scale),
            (ff.fn.to_out.weight, block.mlp.c_proj.weight),
            (ff.branch_scale.scale, block.mlp_connection.alpha.weight),
        ]
    for target, source in pairs:
        target.copy_(source)
    assert len(pairs) == sum(p.requires_grad for p in other.parameters())


@pytest.fixture
def ngpt_pair(monkeypatch: pytest.MonkeyPatch) -> tuple[GPT, Any]:
    package = pytest.importorskip("nGPT_pytorch.nGPT")
    for kind in vars(package).values():  # it defines __eq__ without __hash__, and modules are walked through with a set
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__hash__ is None:
            monkeypatch.setattr(kind, "__hash__", nn.Module.__hash__)
    model = ours("ngpt:mlp-scale=paper")
    shake(model)
    other = package.nGPT(
        num_tokens=VOCAB,
        dim=WIDTH,
        depth=LAYERS,
        dim_head=WIDTH // HEADS,
        heads=HEADS,
        ff_expand_factor=6,  # 2/3 of it is the hidden width: 4 d
        manual_norm_weights=True,
        add_value_residual=False,
        alpha_init=0.05,
        attn_flash_kwargs={"enable_math": True},
    ).eval()
    copy_to_ngpt(model, other)
    return model, other


def test_ngpt_equals_ngpt_pytorch(ngpt_pair: tuple[GPT, Any]) -> None:
    model, other = ngpt_pair
    with torch.no_grad():
        logits, expected = model(batch())[0], other(batch())
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_ngpt_constraint_equals_ngpt_pytorch(ngpt_pair: tuple[GPT, Any]) -> None:
    model, other = ngpt_pair
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.add_(0.1 * torch.randn_like(weight))
    copy_to_ngpt(model, other)
    model.after_step()
    other.norm_weights_()
    with torch.no_grad():
        torch.testing.assert_close(model(batch())[0], other(batch()), rtol=0, atol=1e-5)


def qwen_names(layer: int) -> dict[str, tuple[str, ...]]:
    """Our parameter -> those of Qwen3 that lie in it one below the other (the MLP: up, then gate)."""
    ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
    parts = {
        "attn_connection.norm": ("input_layernorm",),
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.q_norm": ("self_attn.q_norm",),
        "attn.k_norm": ("self_attn.k_norm",),
        "attn.c_proj": ("self_attn.o_proj",),
        "mlp_connection.norm": ("post_attention_layernorm",),
        "mlp.c_fc": ("mlp.up_proj", "mlp.gate_proj"),
        "mlp.c_proj": ("mlp.down_proj",),
    }
    return {f"{ours}{k}.weight": tuple(f"{theirs}{name}.weight" for name in v) for k, v in parts.items()}


def qwen_pair() -> tuple[GPT, Any]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    model = ours("gpt-qknorm")
    shake(model)
    mapping = {"wte.weight": ("model.embed_tokens.weight",), "stream.final_norm.weight": ("model.norm.weight",)}
    mapping["lm_head.weight"] = ("lm_head.weight",)
    for layer in range(LAYERS):
        mapping |= qwen_names(layer)
    assert set(mapping) == {name for name, _ in model.named_parameters()}
    assert {n for v in mapping.values() for n in v} == {name for name, _ in theirs.named_parameters()}
    with torch.no_grad():
        for name, sources in mapping.items():
            parts = model.get_parameter(name).chunk(len(sources))
            for source, part in zip(sources, parts, strict=True):
                theirs.get_parameter(source).copy_(part)
    return model, theirs


def test_gpt_with_qk_norm_equals_qwen3() -> None:
    model, theirs = qwen_pair()
    with torch.no_grad():
        logits, expected = model(batch())[0], theirs(batch()).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
