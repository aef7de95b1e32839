"""Residual schemes: one small file each, behind one protocol."""

from spheret.connections.base import Connection, InitRule, ParameterRole, Scheme, Stream, parameter_roles
from spheret.connections.geonorm import GeoNorm
from spheret.connections.keel import Keel
from spheret.connections.peri_ln import PeriLN
from spheret.connections.post_ln import PostLN
from spheret.connections.pre_dyt import PreDyT
from spheret.connections.pre_ln import PreLN
from spheret.connections.registry import build_connection, canonical_name, list_schemes, parse_scheme
from spheret.connections.spheret import CaySpheretNorm, ProjSpheretNorm, SpheretNorm

__all__ = [
    "CaySpheretNorm",
    "Connection",
    "GeoNorm",
    "InitRule",
    "Keel",
    "ParameterRole",
    "PeriLN",
    "PostLN",
    "PreDyT",
    "PreLN",
    "ProjSpheretNorm",
    "Scheme",
    "SpheretNorm",
    "Stream",
    "build_connection",
    "canonical_name",
    "list_schemes",
    "parameter_roles",
    "parse_scheme",
]
