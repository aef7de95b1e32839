"""spheret: sphere-retraction residual connections for transformers.

``import spheret`` loads PyTorch, but not Triton, transformers or matplotlib.
"""

from spheret.connections import (
    CaySpheretNorm,
    GeoNorm,
    ProjSpheretNorm,
    SpheretNorm,
    available,
    build_connection,
    build_stream,
    list_schemes,
)
from spheret.kernels import backend, retract, which_backend
from spheret.models import GPT, GPTConfig

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "CaySpheretNorm",
    "GPTConfig",
    "GeoNorm",
    "ProjSpheretNorm",
    "SpheretNorm",
    "__version__",
    "available",
    "backend",
    "build_connection",
    "build_stream",
    "list_schemes",
    "retract",
    "which_backend",
]
