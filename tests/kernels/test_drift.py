"""A thousand connections in a row: how far the norm of the stream drifts on every path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import spheret

STEPS, BATCH = 1000, 50
Chain = Callable[[Tensor, Tensor, float | None], Tensor]


def chain(h: Tensor, updates: Tensor, radius: float | None) -> Tensor:
    for f in updates.unbind(0):
        h = spheret.retract(h, f, alpha=0.5, p=1.5, radius=radius)
    return h


def drift(run: Chain, dtype: torch.dtype, *, reproject: bool, dim: int = 768) -> float:
    """Largest relative change of a row's norm after a thousand updates, half of them partly radial."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(4, dim, generator=generator)
    h = (h * dim**0.5 / h.norm(dim=-1, keepdim=True)).to(dtype)
    start = h.double().norm(dim=-1)
    for _ in range(STEPS // BATCH):
        updates = 0.5 * torch.randn(BATCH, 4, dim, generator=generator)
        updates[::2] += 0.3 * h.float()
        h = run(h, updates.to(dtype), dim**0.5 if reproject else None)
    goal = torch.tensor(dim**0.5).double() if reproject else start
    return float((h.double().norm(dim=-1) / goal - 1).abs().max())


@pytest.fixture(params=["cpp", "autograd", "compiled"])
def run(request: pytest.FixtureRequest) -> Iterator[Chain]:
    if request.param == "cpp":
        request.getfixturevalue("compiled_kernel")
    if request.param == "compiled":
        request.getfixturevalue("cxx_compiler")
        torch._dynamo.reset()
        yield torch.compile(chain, fullgraph=True)
    else:
        with spheret.backend(request.param):
            yield chain


@pytest.mark.parametrize(
    ("dtype", "reproject", "bound"),
    [
        (torch.float32, False, 1e-5),
        (torch.float32, True, 1e-6),
        (torch.bfloat16, False, 1e-2),
        (torch.bfloat16, True, 5e-4),
    ],
)
def test_a_thousand_connections(run: Chain, dtype: torch.dtype, reproject: bool, bound: float) -> None:
    with torch.no_grad():
        assert drift(run, dtype, reproject=reproject) < bound
