"""Names of schemes and their grammar: ``name`` or ``name:option=value,option=value``.

Commands, configurations and reports all use this grammar.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, Literal

from spheret.connections.angpt import ANGPTScheme
from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, Scheme, Stream, counts_from_zero
from spheret.connections.geonorm import GeoNormScheme
from spheret.connections.gpt_qknorm import GPTQKNormScheme
from spheret.connections.keel import KeelScheme
from spheret.connections.ngpt import NGPTScheme
from spheret.connections.peri_ln import PeriLNScheme
from spheret.connections.post_ln import PostLNScheme
from spheret.connections.pre_dyt import PreDyTScheme
from spheret.connections.pre_ln import PreLNScheme
from spheret.connections.spheret import SpheretScheme

# To add a scheme: one file in this folder, one line here.
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
# The members of the `spheret` family that `list_schemes` lists separately.
FAMILY = ("spheret", "spheret:p=0.5", "spheret:p=learn", "spheret:p=learn-per-layer")


def list_schemes() -> list[str]:
    """Names of all schemes; ``spheret:p=<x>`` takes any x in (0, inf], and ``spheret`` alone is ``p=auto``."""
    return [name for name in SCHEMES if name != "spheret"] + list(ALIASES) + list(FAMILY)


available = list_schemes


def parse_scheme(scheme: str | Scheme) -> Scheme:
    """Build the scheme that a name such as ``"spheret:p=0.5,alpha=1"`` describes. A ``Scheme`` is returned as it is.

    Raises:
        ValueError: an unknown name, option or value; the message lists the known ones.
    """
    if isinstance(scheme, Scheme):
        return scheme
    name, _, text = scheme.strip().partition(":")
    if name in ALIASES:  # proj:alpha=1 becomes spheret:p=1,alpha=1
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
            raise ValueError(f"scheme {scheme!r}: no option {item!r}; {name} takes {known}")
        if key in options and options[key] != _value(types_by_key[key], value, scheme, key):
            raise ValueError(f"scheme {scheme!r}: option {key!r} is given twice with different values")
        options[key] = _value(types_by_key[key], value, scheme, key)
    preset = cls.presets[options.pop("preset")] if "preset" in options else {}
    return cls(**{**preset, **options})


def canonical_name(scheme: str | Scheme) -> str:
    """The one spelling of a scheme: its name and the options that differ from their defaults.

    ``spheret:p=1`` becomes ``proj``, ``spheret:p=2`` becomes ``cay``. Comparisons and reports use this spelling.
    """
    parsed = parse_scheme(scheme)
    changed = {
        f.name: getattr(parsed, f.name) for f in dataclasses.fields(parsed) if getattr(parsed, f.name) != f.default
    }
    if type(parsed) is not SpheretScheme:  # isinstance would also match GeoNormScheme, a subclass with its own name
        return _join(parsed.name, changed)
    if parsed.p in (1.0, 2.0):
        changed.pop("p", None)
        return _join("proj" if parsed.p == 1 else "cay", changed)
    return _join(parsed.name, changed)


def with_defaults_of_format_1(scheme: str, n_layer: int) -> str:
    """The canonical name under which a scheme of a run folder of format 1 means today what it meant then.

    The defaults of the sphere schemes have changed since: alpha, its learning rate and decay, what the head reads.
    """
    name, _, text = scheme.strip().partition(":")
    keys = {item.partition("=")[0].strip().replace("_", "-") for item in text.split(",")}
    if name not in ("spheret", "proj", "cay", "geonorm"):
        return canonical_name(scheme)
    old = {"decay": "inv-sqrt", "alpha-lr": "1", "head-input": "state"}
    if "preset=paper" not in text:
        old["alpha"] = repr(min(1.0, 2 / math.sqrt(n_layer)))
    if name == "spheret":
        old["p"] = "1"
    if "p=learn" in text:
        old["p-start"] = "1"
    added = [f"{key}={value}" for key, value in old.items() if key not in keys]
    return canonical_name(f"{name}:{','.join(filter(None, [text, *added]))}")


def build_stream(scheme: str | Scheme, *, dim: int, n_layer: int) -> Stream:
    """The stream of a model of ``n_layer`` blocks of width ``dim``.

    Call ``entry = h = stream.enter(h)`` after the embedding and ``h = stream.exit(h, entry)`` before the head; most
    schemes need no ``entry``. The stream also owns what the connections share: the sphere's radius, and the single
    exponent of ``p=learn``. Pass it to every :func:`build_connection`.

    Raises:
        ValueError: an unknown scheme or option.
    """
    return parse_scheme(scheme).stream(dim, n_layer)


@counts_from_zero
def build_connection(
    scheme: str | Scheme,
    *,
    dim: int,
    layer_idx: int = 0,
    n_layer: int,
    sublayer: int = 0,
    stream: Stream | None = None,
) -> Connection:
    """One drop-in connection for sublayer ``sublayer`` (0 or 1) of block ``layer_idx`` (from 0) of ``n_layer``, in a
    model of width ``dim``.

    In a block, write ``h = conn(h, F(conn.branch_input(h)))``: schemes that normalise before the sublayer do it in
    ``branch_input``. Options of the stream and of initial weights (``final_norm``, ``learn_radius``, ``gain``, ...)
    have no effect here. Some schemes (``ngpt``, ``angpt``, ``gpt-qknorm``) describe a whole model; this function builds
    only their residual, and ``parse_scheme(scheme).model_options(...)`` describes the rest.

    ``stream`` comes from :func:`build_stream`. Without it, ``p=learn`` learns an exponent of this connection alone.

    Raises:
        ValueError: an unknown scheme or option, a layer_idx or sublayer outside the model, or ``reproject=true``
            without a stream.
        TypeError: the old ``layer``, which counted from 1.
    """
    if not 0 <= layer_idx < n_layer:
        raise ValueError(f"layer_idx = {layer_idx}: blocks are counted from 0 to n_layer - 1 = {n_layer - 1}")
    if sublayer not in range(SUBLAYERS_PER_LAYER):
        raise ValueError(f"sublayer = {sublayer}: a block has sublayer 0 (attention) and 1 (MLP)")
    return parse_scheme(scheme).connection(dim, layer_idx=layer_idx, n_layer=n_layer, sublayer=sublayer, stream=stream)


def _option_types(cls: type[Scheme]) -> dict[str, Any]:
    """Type of every option that a name may carry: the scheme's fields, and ``preset`` if the scheme has presets."""
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
    # %g prints 1.0 as 1, but keeps six digits only: use it where it reads back as the same number.
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _value(hint: Any, text: str, scheme: str, key: str) -> Any:
    """Parse ``text`` as the first alternative of the type ``hint`` that accepts it."""
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
    raise ValueError(f"scheme {scheme!r}: {key} = {text!r} does not fit; it takes {_allowed(alternatives)}")


def _allowed(alternatives: tuple[Any, ...]) -> str:
    names = []
    for kind in alternatives:
        if typing.get_origin(kind) is Literal:
            names += list(typing.get_args(kind))
        elif kind is not type(None):
            names.append({"float": "a number", "bool": "true or false"}.get(kind.__name__, kind.__name__))
    return ", ".join(map(str, names))
