"""Every scheme in every mixture of number formats: the stream's format is the caller's choice, and it stays."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from builders import SCHEMES, batch, build
from torch import Tensor

import spheret
from spheret.connections import Connection

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4, torch.float64: 1e-6}

pytestmark = pytest.mark.parametrize("scheme", SCHEMES)


def every_connection(scheme: str) -> Iterator[Connection]:
    """Both sublayers of the first block and of a later one: some schemes form them differently."""
    stream = spheret.build_stream(scheme, dim=24, n_layer=3)
    for layer_idx, sublayer in itertools.product((0, 2), (0, 1)):
        yield spheret.build_connection(scheme, dim=24, layer_idx=layer_idx, n_layer=3, sublayer=sublayer, stream=stream)


def rows(h_dtype: torch.dtype, f_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    h, f = torch.randn(2, 5, 24)
    return h.to(h_dtype).requires_grad_(), f.to(f_dtype).requires_grad_()


@pytest.mark.parametrize("h_dtype", DTYPES)
@pytest.mark.parametrize("f_dtype", DTYPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_stream_keeps_its_dtype(scheme: str, h_dtype: torch.dtype, f_dtype: torch.dtype, autocast: bool) -> None:
    """Whatever the dtype of the update, and that of the connection's own parameters, which are float32 here."""
    h, f = rows(h_dtype, f_dtype)
    tolerance = max(ROUNDING[h_dtype], ROUNDING[f_dtype])
    for connection in every_connection(scheme):
        expected = copy.deepcopy(connection).double()(h.double(), f.double()).detach()
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            out = connection(h, f)
            stream, branch = connection(h, f, split=True)
        assert out.dtype == stream.dtype == h_dtype
        # Under autocast a fused connection may write the branch as the sublayer will read it.
        narrow = autocast and h_dtype != torch.float64
        assert branch.dtype in ({h_dtype, torch.bfloat16} if narrow else {h_dtype})
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(stream, out)
        grads = torch.autograd.grad(out.double().sum(), (h, f))
        assert [grad.dtype for grad in grads] == [h_dtype, f_dtype]


@pytest.mark.parametrize("h_dtype", DTYPES)
def test_what_a_sublayer_reads_has_the_dtype_of_the_stream(scheme: str, h_dtype: torch.dtype) -> None:
    h, _ = rows(h_dtype, h_dtype)
    for connection in every_connection(scheme):
        assert connection.branch_input(h).dtype == h_dtype
    stream = spheret.build_stream(scheme, dim=24, n_layer=3)
    assert stream.enter(h).dtype == stream.exit(h, stream.enter(h)).dtype == h_dtype


@pytest.mark.slow
def test_the_stream_keeps_its_dtype_when_compiled(scheme: str) -> None:
    torch._dynamo.reset()
    mixtures = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)
    for connection, dtypes in zip(every_connection(scheme), mixtures, strict=False):
        h, f = rows(*dtypes)
        compiled = torch.compile(connection, backend="aot_eager", fullgraph=True)
        assert [out.dtype for out in compiled(h, f, split=True)] == [h.dtype, h.dtype]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_a_default_dtype_reaches_every_layer(scheme: str, default: torch.dtype) -> None:
    """A model built under a default dtype computes in it; its learned scalars stay float32 or better."""
    expected = build(scheme)(*batch())[1].item()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        model = build(scheme)
        logits, loss = model(*batch())
        loss.backward()
    finally:
        torch.set_default_dtype(before)
    assert logits.dtype == default
    assert abs(loss.item() - expected) < 0.6  # other random numbers
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.numel() > 1 or torch.finfo(parameter.dtype).bits >= 32, name


@pytest.mark.parametrize("autocast", [False, True])
def test_shapes_can_be_had_from_the_meta_device(scheme: str, autocast: bool) -> None:
    """Tools that count parameters, operations and memory run a model without numbers."""
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        model = build(scheme, n_layer=2)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        logits, loss = model(tokens, tokens)
        loss.backward()
    assert logits.shape == (2, 8, 61) and loss.shape == ()
    assert logits.is_meta and all(p.grad is not None and p.grad.is_meta for p in model.parameters())
