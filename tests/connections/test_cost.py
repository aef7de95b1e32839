"""What a connection moves, as `spheret schemes` states it: counted here operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spheret.connections import build_connection, parse_scheme
from spheret.kernels import operator

ROWS, DIM = 64, 16


class Units(TorchDispatchMode):
    """Counts the tensors of the stream's size that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.count += sum(t.numel() == ROWS * DIM for t in tensors)
        return out


def moved(scheme: str) -> tuple[int, int]:
    """Units forward and backward of one connection in a network: two readers send a gradient back to ``h'``."""
    connection = build_connection(scheme, dim=DIM, layer_idx=1, n_layer=4)
    h, f, g1, g2 = (torch.randn(ROWS, DIM) for _ in range(4))
    inputs = [h.requires_grad_(), f.requires_grad_(), *connection.parameters()]
    with Units() as forward:
        stream, read = connection.combine_and_split(h, f)
        branch = connection.branch_input(read)
    with Units() as backward:
        torch.autograd.grad([stream, branch], inputs, [g1, g2])
    return forward.count, backward.count


def stated(scheme: str) -> str:
    return parse_scheme(scheme).cost


@pytest.mark.parametrize("scheme", ["pre-ln", "post-ln", "peri-ln", "pre-dyt", "keel", "gpt-qknorm", "ngpt", "angpt"])
def test_cost_is_what_is_stated(scheme: str) -> None:
    forward, backward = moved(scheme)
    assert stated(scheme) == f"{forward + backward} units, {forward} forward and {backward} backward"


@pytest.mark.parametrize("scheme", ["proj", "spheret:p=0.5", "geonorm"])
def test_cost_of_a_rotation_is_what_is_stated(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    forward, backward = moved(scheme)
    monkeypatch.setattr(operator, "FORCED", "autograd")
    plain = sum(moved(scheme))
    assert stated(scheme) == (
        f"{forward + backward} units, {forward} forward and {backward} backward, in the compiled loops; "
        f"{plain} units in plain PyTorch"
    )
