"""The grammar of scheme names."""

from __future__ import annotations

import math
import re

import pytest
import torch

import spheret
from spheret.connections import (
    Connection,
    GeoNorm,
    Keel,
    PeriLN,
    PostLN,
    PreDyT,
    PreLN,
    SpheretNorm,
    available,
    build_connection,
    build_stream,
    canonical_name,
    list_schemes,
    parse_scheme,
)


@pytest.mark.parametrize(
    ("scheme", "messages"),
    [
        ("pre-norm", ["'pre-norm'", "choose one of", "pre-ln", "spheret:p=0.5"]),
        ("", ["unknown scheme ''", "choose one of"]),
        ("spheret:q=1", ["'q=1'", "spheret takes", "alpha_form", "update_norm", "preset"]),
        ("spheret:p", ["no option 'p'"]),
        ("spheret:0.5", ["no option '0.5'"]),
        ("pre-ln:p=1", ["'p=1'", "pre-ln takes norm, bias"]),
        ("spheret:p=big", ["p = 'big'", "a number", "learn", "learn-per-layer"]),
        ("spheret:alpha=", ["alpha = ''", "a number"]),
        ("spheret:decay=sqrt", ["decay = 'sqrt'", "inv-sqrt", "inv", "none"]),
        ("spheret:project=1", ["project = '1'", "true or false"]),
        ("spheret:preset=text", ["preset = 'text'", "paper"]),
        ("spheret:p=0", ["p = 0", "(0, inf]"]),
        ("spheret:p=-2", ["p = -2", "(0, inf]"]),
        ("spheret:p=nan", ["p", "nan"]),
        ("spheret:alpha=nan", ["alpha = 'nan'", "number"]),
        ("spheret:p=learn,p-start=0", ["p", "0"]),
        ("spheret:p=2,p-start=3", ["p_start = 3", "p = 2 is fixed", "p=learn"]),
        ("spheret:alpha=inf", ["alpha = inf", "finite"]),
        ("geonorm:gain=inf", ["gain = inf", "finite"]),
        ("keel:first-block=attn", ["first_block = 'attn'", "attention", "pre-ln"]),
        ("keel:eps=0", ["eps = 0", "above 0"]),
        ("peri-ln:eps=-1", ["eps = -1", "above 0"]),
        ("peri-ln:norm=batch", ["norm = 'batch'", "layernorm", "rmsnorm"]),
        ("pre-dyt:embed-scale=8", ["embed_scale = '8'", "sqrt-d", "none"]),
        ("pre-ln:branch=-inf", ["branch = -inf", "finite"]),
        ("spheret:p=1,p=2", ["'p' is given twice"]),
        ("spheret:update-norm=rms,update_norm=none", ["'update_norm' is given twice"]),
        ("proj:p=2", ["'p' is given twice"]),
        ("geonorm:p=2", ["geonorm", "p = 2"]),
    ],
)
def test_errors_name_the_value_and_the_choices(scheme: str, messages: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_scheme(scheme)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("pre-ln", "pre-ln"),
        (" pre-ln ", "pre-ln"),
        ("pre-ln:", "pre-ln"),
        ("pre-ln:bias=false", "pre-ln"),
        ("pre-ln:bias=True", "pre-ln:bias=true"),
        ("keel:norm=layernorm", "keel"),
        ("peri-ln:eps=1e-6", "peri-ln:eps=1e-06"),
        ("pre-dyt:mlp-alpha=0.2", "pre-dyt:mlp-alpha=0.2"),
        ("proj", "proj"),
        ("spheret", "spheret"),
        ("spheret:p=auto", "spheret"),
        ("spheret:p=1", "proj"),
        ("spheret:p=1.00", "proj"),
        ("proj:p=1", "proj"),
        ("cay", "cay"),
        ("spheret:p=2", "cay"),
        ("spheret:p=0.5", "spheret:p=0.5"),
        ("spheret:alpha=1,p=0.5", "spheret:p=0.5,alpha=1"),
        ("spheret:p=0.5,decay=none", "spheret:p=0.5"),
        ("spheret:p=0.5,decay=inv-sqrt", "spheret:p=0.5,decay=inv-sqrt"),
        ("spheret:p=0.123456789", "spheret:p=0.123456789"),
        ("spheret:p=inf", "spheret:p=inf"),
        ("spheret:p=learn", "spheret:p=learn"),
        ("spheret:p=learn-per-layer,p-start=2", "spheret:p=learn-per-layer,p-start=2"),
        ("proj:alpha=0.5", "proj:alpha=0.5"),
        ("cay:alpha_form=softplus", "cay:alpha-form=softplus"),
        ("geonorm", "geonorm"),
        ("geonorm:p=inf", "geonorm"),
        ("geonorm:reproject=true", "geonorm:reproject=true"),
    ],
)
def test_canonical_name(scheme: str, name: str) -> None:
    assert canonical_name(scheme) == name
    assert parse_scheme(name) == parse_scheme(scheme)
    assert canonical_name(parse_scheme(scheme)) == name


def test_aliases_take_options() -> None:
    proj, cay = parse_scheme("proj:alpha=0.5"), parse_scheme("cay:alpha=0.5")
    assert (proj.p, proj.alpha) == (1.0, 0.5)
    assert (cay.p, cay.alpha) == (2.0, 0.5)
    assert proj == parse_scheme("spheret:p=1,alpha=0.5")


def test_a_scheme_passes_through() -> None:
    scheme = parse_scheme("proj")
    assert parse_scheme(scheme) is scheme


def test_available_schemes_can_be_built_and_have_one_spelling() -> None:
    names = list_schemes()
    assert {"pre-ln", "post-ln", "peri-ln", "pre-dyt", "keel"} <= set(names)
    assert {"geonorm", "proj", "cay", "spheret:p=0.5", "spheret:p=learn"} <= set(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert canonical_name(name) == name
        assert isinstance(build_connection(name, dim=8, layer_idx=0, n_layer=2), Connection)


def test_available_is_an_alias() -> None:
    assert available is list_schemes is spheret.available


def test_layers_counted_from_one_are_refused() -> None:
    with pytest.raises(TypeError, match="layer = 1: layer= counted from 1 was replaced by layer_idx, counted from 0"):
        build_connection("pre-ln", dim=8, layer=1, n_layer=2)


@pytest.mark.parametrize("sublayer", [-1, 2])
def test_sublayer_out_of_range(sublayer: int) -> None:
    with pytest.raises(ValueError, match=f"sublayer = {sublayer}: a block has sublayer 0"):
        build_connection("proj", dim=8, n_layer=3, sublayer=sublayer)


@pytest.mark.parametrize("layer_idx", [-1, 3, 4])
def test_layer_idx_out_of_range(layer_idx: int) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"layer_idx = {layer_idx}: blocks are counted from 0 to n_layer - 1 = 2")
    ):
        build_connection("proj", dim=8, layer_idx=layer_idx, n_layer=3)


def test_build_connection_gives_the_scheme_s_module() -> None:
    kinds = {
        "pre-ln": PreLN,
        "post-ln": PostLN,
        "peri-ln": PeriLN,
        "pre-dyt": PreDyT,
        "keel": Keel,
        "proj": SpheretNorm,
    }
    for name, kind in kinds.items():
        assert type(build_connection(name, dim=8, n_layer=2)) is kind
    geonorm = build_connection("geonorm", dim=8, layer_idx=1, n_layer=2)
    assert isinstance(geonorm, SpheretNorm) and math.isinf(geonorm.p)
    torch.manual_seed(0)
    h, f = torch.randn(5, 8), torch.randn(5, 8)
    assert torch.equal(geonorm(h, f), GeoNorm(layer_idx=1, n_layer=2)(h, f))


def test_paper_preset() -> None:
    paper = parse_scheme("proj:preset=paper")
    assert (paper.alpha, paper.alpha_form, paper.final_norm) == (1.0, "softplus", "none")
    assert paper != parse_scheme("proj")
    assert parse_scheme("proj:preset=default") == parse_scheme("proj")


def test_an_option_beside_the_preset_wins_also_where_it_is_the_default() -> None:
    scheme = parse_scheme("proj:alpha=0.25,preset=paper,final-norm=layernorm")
    assert (scheme.alpha, scheme.alpha_form, scheme.final_norm) == (0.25, "softplus", "layernorm")
    assert parse_scheme("proj:preset=paper,alpha-form=raw").alpha_form == "raw"
    for name in ("proj:preset=paper,alpha-form=raw", "cay:final-norm=layernorm,preset=paper"):
        assert parse_scheme(canonical_name(name)) == parse_scheme(name)


def test_reprojection_needs_the_radius_of_a_stream() -> None:
    with pytest.raises(ValueError, match=r"reproject=true: the radius .* stream=stream"):
        build_connection("proj:reproject=true", dim=8, n_layer=2)
    stream = build_stream("proj:reproject=true", dim=8, n_layer=2)
    connection = build_connection("proj:reproject=true", dim=8, n_layer=2, stream=stream)
    out = connection(torch.full((3, 8), 5.0), torch.randn(3, 8))
    torch.testing.assert_close(out.norm(dim=-1), torch.full((3,), 8**0.5))


def test_connections_of_one_stream_share_the_learned_exponent() -> None:
    stream = build_stream("spheret:p=learn", dim=8, n_layer=2)
    pair = [build_connection("spheret:p=learn", dim=8, layer_idx=i, n_layer=2, stream=stream) for i in (0, 1)]
    with torch.no_grad():
        stream.exponent.log_p.fill_(math.log(3))
    assert [c.current_p().item() for c in pair] == pytest.approx([3, 3])
    alone = build_connection("spheret:p=learn", dim=8, n_layer=2)
    assert "exponent.log_p" in dict(alone.named_parameters())


@pytest.mark.parametrize("scheme", ["proj:gain=-1", "pre-ln:embedding-gain=-0.5", "post-ln:residual=-1"])
def test_negative_initial_scales_are_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="initial scale is a finite number, 0 or more"):
        parse_scheme(scheme).init_rule(8, 2)
