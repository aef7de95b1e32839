"""Residual schemes: one small file each, all with the protocol of ``base.py``."""

from spheret.connections.base import Connection, Scheme, Stream
from spheret.connections.geonorm import GeoNorm
from spheret.connections.keel import Keel
from spheret.connections.options import InitRule
from spheret.connections.peri_ln import PeriLN
from spheret.connections.post_ln import PostLN
from spheret.connections.pre_dyt import PreDyT
from spheret.connections.pre_ln import PreLN
from spheret.connections.registry import (
    available,
    build_connection,
    build_stream,
    canonical_name,
    list_schemes,
    parse_scheme,
)
from spheret.connections.spheret import CaySpheretNorm, ProjSpheretNorm, SpheretNorm
from spheret.connections.weights import ParameterRole, parameter_roles

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
    "available",
    "build_connection",
    "build_stream",
    "canonical_name",
    "list_schemes",
    "parameter_roles",
    "parse_scheme",
]
