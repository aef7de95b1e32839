"""Names of schemes, and the one grammar in which they are written everywhere: ``name`` or
``name:option=value,option=value``."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, Literal

from spheret.connections.angpt import ANGPTScheme
from spheret.connections.base import Connection, Scheme, Stream
from spheret.connections.geonorm import GeoNormScheme
from spheret.connections.gpt_qknorm import GPTQKNormScheme
from spheret.connections.keel import KeelScheme
from spheret.connections.ngpt import NGPTScheme
from spheret.connections.peri_ln import PeriLNScheme
from spheret.connections.post_ln import PostLNScheme
from spheret.connections.pre_dyt import PreDyTScheme
from spheret.connections.pre_ln import PreLNScheme
from spheret.connections.spheret import SpheretScheme

# To add a scheme: one file beside this one, one line here.
SCHEMES: dict[str, type[Scheme]] = {
    "pre-ln": PreLNScheme,
    "post-ln": PostLNScheme,
    "peri-ln": PeriLNScheme,
    "pre-dyt": PreDyTScheme,
    "keel": KeelScheme,
    "geonorm": GeoNormScheme,
    "spheret": SpheretScheme,
    "gpt-qknorm": GPTQKNormScheme,
    "ngpt": NGPTScheme,
    "angpt": ANGPTScheme,
}
ALIASES = {"proj": "spheret:p=1", "cay": "spheret:p=2"}
# What `list_schemes` lists for a scheme that is a family: members worth a row of their own.
FAMILY = ("spheret:p=0.5", "spheret:p=learn", "spheret:p=learn-per-layer")


def list_schemes() -> list[str]:
    """Names of all schemes; ``spheret:p=<x>`` takes any x in (0, inf]."""
    return [name for name in SCHEMES if name != "spheret"] + list(ALIASES) + list(FAMILY)


def parse_scheme(spec: str | Scheme) -> Scheme:
    """``"spheret:p=0.5,alpha=1"`` -> the scheme with its options.

    Raises:
        ValueError: an unknown name, option or value; the message lists what there is.
    """
    if isinstance(spec, Scheme):
        return spec
    name, _, text = spec.strip().partition(":")
    if name in ALIASES:
        name, _, base = ALIASES[name].partition(":")
        text = f"{base},{text}" if text else base
    if name not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}: choose one of {', '.join(list_schemes())}")
    cls = SCHEMES[name]
    types_by_key = _option_types(cls)
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        key = key.replace("-", "_")
        if not equals or key not in types_by_key:
            known = ", ".join(types_by_key) or "no options"
            raise ValueError(f"scheme {spec!r}: no option {item!r}; {name} takes {known}")
        if key in options and options[key] != _value(types_by_key[key], value, spec, key):
            raise ValueError(f"scheme {spec!r}: option {key!r} is given twice with different values")
        options[key] = _value(types_by_key[key], value, spec, key)
    preset = cls.presets[options.pop("preset")] if "preset" in options else {}
    return cls(**{**preset, **options})


def canonical_name(spec: str | Scheme) -> str:
    """One spelling per scheme: its name and the options that differ from their defaults (``proj`` and ``cay`` keep
    their short names)."""
    scheme = parse_scheme(spec)
    changed = {
        f.name: getattr(scheme, f.name) for f in dataclasses.fields(scheme) if getattr(scheme, f.name) != f.default
    }
    if scheme.name == "spheret":
        changed = {"p": scheme.p, **changed}  # type: ignore[attr-defined]
        short = {1.0: "proj", 2.0: "cay"}.get(changed["p"])
        if short is not None:
            del changed["p"]
            return _join(short, changed)
    return _join(scheme.name, changed)


def build_connection(
    spec: str | Scheme,
    *,
    dim: int,
    layer_idx: int = 0,
    n_layer: int,
    sublayer: int = 0,
    stream: Stream | None = None,
) -> Connection:
    """One drop-in connection for sublayer ``sublayer`` (0 or 1) of block ``layer_idx`` (from 0) of ``n_layer``, in a
    model of width ``dim``.

    In a block, ``h = conn(h, F(conn.branch_input(h)))``: only with ``branch_input`` does a scheme that normalises in
    front of the sublayer do so. Options on the ends of the network and on initial weights (``final_norm``,
    ``learn_radius``, ``gain``, ...) have no say here, and of a scheme that is a whole model this is the residual alone:
    what it asks of the rest is ``parse_scheme(spec).model_options(...)``. What connections share, a radius to
    re-project onto and the single exponent of ``p=learn``, is in ``stream = parse_scheme(spec).stream(dim, n_layer)``;
    without it, ``p=learn`` is an exponent of this connection alone.

    Raises:
        ValueError: an unknown scheme or option, a layer_idx outside the model, or ``reproject=true`` without a stream.
    """
    if not 0 <= layer_idx < n_layer:
        raise ValueError(f"layer_idx = {layer_idx}: blocks are counted from 0 to n_layer - 1 = {n_layer - 1}")
    return parse_scheme(spec).connection(dim, layer_idx=layer_idx, n_layer=n_layer, sublayer=sublayer, stream=stream)


def _option_types(cls: type[Scheme]) -> dict[str, Any]:
    """Type of every option that a name may carry: the scheme's fields, and ``preset`` where it has some."""
    hints = typing.get_type_hints(cls)
    options = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    return options | {"preset": Literal.__getitem__(tuple(cls.presets))} if cls.presets else options


def _join(name: str, options: dict[str, Any]) -> str:
    text = ",".join(f"{k.replace('_', '-')}={_text(v)}" for k, v in options.items())
    return f"{name}:{text}" if text else name


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _value(hint: Any, text: str, spec: str, key: str) -> Any:
    """``text`` as the first type of ``hint`` that takes it."""
    alternatives = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    for kind in alternatives:
        if typing.get_origin(kind) is Literal and text in typing.get_args(kind):
            return text
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind is float:
            try:
                number = float(text)
            except ValueError:
                continue
            if not math.isnan(number):
                return number
    raise ValueError(f"scheme {spec!r}: {key} = {text!r} does not fit; it takes {_allowed(alternatives)}")


def _allowed(alternatives: tuple[Any, ...]) -> str:
    names = []
    for kind in alternatives:
        if typing.get_origin(kind) is Literal:
            names += list(typing.get_args(kind))
        elif kind is not type(None):
            names.append({"float": "a number", "bool": "true or false"}.get(kind.__name__, kind.__name__))
    return ", ".join(map(str, names))
