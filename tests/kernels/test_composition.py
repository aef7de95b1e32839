"""The fused retraction under everything that wraps a training step: compilers, autocast, checkpointing, export, data
parallel and sharded processes."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils import checkpoint as ckpt

import spheret
from spheret.kernels import cpu, retract_for_two

pytestmark = pytest.mark.skipif(bool(cpu.unavailable()), reason=cpu.unavailable() or "Numba is here")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def rows(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


class Junction(nn.Module):
    """A connection of which both outputs are read, as a block reads them."""

    def __init__(self, p: float | str = 1.0) -> None:
        super().__init__()
        self.connection = spheret.build_connection(f"spheret:p={p}", dim=48, layer_idx=1, n_layer=4)
        self.branch = nn.Linear(48, 48, bias=False)

    def forward(self, h: Tensor, f: Tensor) -> Tensor:
        stream, read = self.connection.combine_and_split(h, f)
        return stream + torch.tanh(self.branch(read))


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs[:2])
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


# --- two readers ---


@pytest.mark.parametrize("p", [0.5, 1.0, math.inf])
@pytest.mark.parametrize("radius", [None, 5.0])
def test_two_outputs_are_one_output_read_twice(p: float, radius: float | None) -> None:
    h, f, g, g2 = (rows(6, 40, seed=i) for i in range(4))
    alpha = torch.tensor([0.8], requires_grad=True)
    pair = retract_for_two(h, f, alpha=alpha, p=p, radius=radius)
    once = spheret.retract(h, f, alpha=alpha, p=p, radius=radius)
    assert torch.equal(pair[0], once) and torch.equal(pair[1], once)
    ours = torch.autograd.grad(pair, (h, f, alpha), (g, g2))
    torch.testing.assert_close(ours, torch.autograd.grad(once, (h, f, alpha), g + g2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reader", [0, 1])
def test_one_of_two_readers_may_be_absent(reader: int) -> None:
    h, f, g = (rows(6, 40, seed=i) for i in range(3))
    ours = torch.autograd.grad(retract_for_two(h, f)[reader], (h, f), g)
    torch.testing.assert_close(ours, torch.autograd.grad(spheret.retract(h, f), (h, f), g), rtol=0, atol=0)


def test_the_second_output_has_the_dtype_of_the_sublayer() -> None:
    h, f = rows(6, 40), rows(6, 40, dtype=BF16, seed=1)
    stream, read = retract_for_two(h, f, read_dtype=BF16)
    assert stream.dtype == F32 and torch.equal(read, stream.to(BF16))
    grads = torch.autograd.grad((stream, read), (h, f), (rows(6, 40, seed=2), rows(6, 40, dtype=BF16, seed=3)))
    assert [g.dtype for g in grads] == [F32, BF16]


# --- dtypes and autocast ---


@pytest.mark.parametrize("h_dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("f_dtype", [F32, BF16, F16, F64])
def test_every_mixture_of_dtypes_rounds_once(h_dtype: torch.dtype, f_dtype: torch.dtype) -> None:
    h, f, g = rows(5, 64, dtype=h_dtype), rows(5, 64, dtype=f_dtype, seed=1), rows(5, 64, dtype=h_dtype, seed=2)
    out = spheret.retract(h, f, alpha=0.7, p=1.5)
    ours = (out, *torch.autograd.grad(out, (h, f), g))
    h64, f64 = h.detach().double().requires_grad_(), f.detach().double().requires_grad_()
    exact_out = spheret.retract(h64, f64, alpha=0.7, p=1.5)
    exact = (exact_out, *torch.autograd.grad(exact_out, (h64, f64), g.double()))
    for a, b, dtype in zip(ours, exact, (h_dtype, h_dtype, f_dtype), strict=True):
        assert a.dtype == dtype
        rounded = (b.to(dtype).double() - b).abs().max()  # what an exact result loses when it is stored
        assert (a.double() - b).abs().max() <= 2 * rounded + 2e-6


@pytest.mark.parametrize("backend", ["numba", "autograd"])
def test_autocast_changes_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spheret.kernels.operator.FORCED", backend)
    h, f = rows(5, 64), rows(5, 64, dtype=BF16, seed=1)
    with torch.autocast("cpu", BF16):
        inside = gradients(spheret.retract, [h, f])
    assert all(torch.equal(a, b) for a, b in zip(inside, gradients(spheret.retract, [h, f]), strict=True))
    assert inside[0].dtype == F32


# --- compilers ---


@pytest.mark.parametrize("p", [1.0, "learn-per-layer"])
def test_compiled_in_one_graph(p: float | str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Junction(p)
    inputs = [rows(9, 48), rows(9, 48, seed=1), *module.parameters()]
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, inputs), gradients(module, inputs), rtol=1e-4, atol=1e-5)


def test_exported_program_holds_one_node() -> None:
    module = Junction()
    h, f = rows(9, 48).detach(), rows(9, 48, seed=1).detach()
    program = torch.export.export(module, (h, f), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},) * 2)
    assert sum("spheret.retract" in str(node.target) for node in program.graph.nodes) == 1
    more = rows(20, 48).detach(), rows(20, 48, seed=1).detach()
    torch.testing.assert_close(program.module()(*more), module(*more), rtol=1e-5, atol=1e-6)


# --- activation checkpointing ---


def test_full_checkpointing_gives_the_same_bits() -> None:
    module = Junction()
    inputs = [rows(9, 48), rows(9, 48, seed=1), *module.parameters()]
    wrapped = partial(ckpt.checkpoint, module, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(wrapped, inputs), gradients(module, inputs), strict=True))


def test_selective_checkpointing_sees_the_operator() -> None:
    module = Junction()
    inputs = [rows(9, 48), rows(9, 48, seed=1), *module.parameters()]
    seen: list[str] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> ckpt.CheckpointPolicy:
        seen.append(str(op))
        save = op == torch.ops.spheret.rotate_rows.default
        return ckpt.CheckpointPolicy.MUST_SAVE if save else ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(ckpt.create_selective_checkpoint_contexts, policy)
    wrapped = partial(ckpt.checkpoint, module, use_reentrant=False, context_fn=contexts)
    ours = gradients(wrapped, inputs)
    assert any("spheret.rotate_rows" in name for name in seen)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(module, inputs), strict=True))


# --- two processes ---


def small_gpt() -> spheret.GPT:
    torch.manual_seed(0)
    return spheret.GPT(
        spheret.GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=97, scheme="spheret:p=learn")
    )


def batch(rank: int) -> Tensor:
    return torch.randint(97, (4, 17), generator=torch.Generator().manual_seed(rank))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    optimizer.step()


def wrap_ddp(model: spheret.GPT) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def wrap_fsdp(model: spheret.GPT) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def work(rank: int, wrap: Callable[[spheret.GPT], nn.Module], port: int, path: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = wrap(small_gpt())
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch(rank))
    state = {name.removeprefix("module."): whole(p.detach()) for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(state, path)
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [wrap_ddp, wrap_fsdp])
def test_two_processes_make_the_step_of_one(wrap: Callable[[spheret.GPT], nn.Module], tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(wrap, port, tmp_path / "state.pt"), nprocs=2)
    model = small_gpt()
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.cat([batch(0), batch(1)]))
    theirs = torch.load(tmp_path / "state.pt")
    for name, p in model.named_parameters():
        torch.testing.assert_close(theirs[name], p.detach(), rtol=1e-4, atol=1e-6, msg=name)
