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
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils import checkpoint as ckpt

import spheret
from spheret.kernels.ops import OPERATORS

pytestmark = pytest.mark.usefixtures("compiled_kernel")


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Junction(nn.Module):
    """A connection of which both outputs are read, as a block reads them."""

    def __init__(self, p: float | str = 1.0) -> None:
        super().__init__()
        self.connection = spheret.build_connection(f"spheret:p={p}", dim=48, layer_idx=1, n_layer=4)
        self.linear = nn.Linear(48, 48, bias=False)

    def forward(self, h: Tensor, f: Tensor) -> Tensor:
        stream, branch = self.connection(h, f, split=True)
        return stream + torch.tanh(self.linear(branch))


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs[:2])
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


# --- compilers ---


@pytest.mark.usefixtures("cxx_compiler")
@pytest.mark.parametrize("p", [1.0, "learn-per-layer"])
def test_compiled_in_one_graph(p: float | str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Junction(p)
    inputs = [rows(9, 48), rows(9, 48, seed=1), *module.parameters()]
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, inputs), gradients(module, inputs), rtol=1e-4, atol=1e-5)


def test_compiled_code_calls_the_operator() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    connection = spheret.build_connection("proj", dim=8, layer_idx=1, n_layer=4)
    h, f = rows(3, 8), rows(3, 8, seed=1)
    compiled = torch.compile(connection, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    out = compiled(h, f)
    out.sum().backward()
    called = {node.target for graph in graphs for node in graph.graph.nodes}
    assert {OPERATORS.retract, OPERATORS.retract_backward} <= called
    torch.testing.assert_close(out, connection(h, f))


def test_a_compiled_call_is_served_as_which_backend_says() -> None:
    """A forced backend holds in compiled code too."""

    def call(h: Tensor, f: Tensor) -> Tensor:
        return spheret.retract(h, f, alpha=0.5)

    h, f = rows(3, 8).detach(), rows(3, 8, seed=1).detach()
    for name in ("cpp", "autograd"):
        targets: set[object] = set()
        torch._dynamo.reset()
        with spheret.backend(name):
            assert spheret.which_backend(h, f).name == name
            torch.compile(call, backend=aot_autograd(fw_compiler=partial(_keep_targets, targets)))(h, f)
        assert (OPERATORS.retract in targets) == (name == "cpp")


def _keep_targets(targets: set[object], graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
    targets.update(node.target for node in graph.graph.nodes)
    return make_boxed_func(graph)


# --- how many graphs ---


@pytest.fixture
def counter() -> CompileCounter:
    """A compiler that counts its graphs."""
    torch._dynamo.reset()
    return CompileCounter()


@pytest.mark.parametrize("varied", ["alpha", "p", "radius"])
def test_numbers_that_vary_share_two_graphs(varied: str, counter: CompileCounter) -> None:
    def call(h: Tensor, f: Tensor, value: float) -> Tensor:
        return spheret.retract(h, f, **{varied: value})

    h, f = rows(3, 8), rows(3, 8, seed=1)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for i in range(1, 25):
        torch.testing.assert_close(compiled(h, f, i**-0.5), call(h, f, i**-0.5))
    assert counter.frame_count <= 2


def test_alpha_and_p_that_vary_together_share_two_graphs(counter: CompileCounter) -> None:
    def call(h: Tensor, f: Tensor, alpha: float, p: float) -> Tensor:
        return spheret.retract(h, f, alpha=alpha, p=p)

    h, f = rows(3, 8), rows(3, 8, seed=1)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for i in range(1, 25):
        torch.testing.assert_close(compiled(h, f, i**-0.5, 0.3 * i), call(h, f, i**-0.5, 0.3 * i))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "scheme", ["proj", "spheret:p=learn-per-layer", "geonorm", "spheret:p=1.7,alpha-form=softplus"]
)
def test_connections_compiled_one_by_one_share_two_graphs(scheme: str, counter: CompileCounter) -> None:
    h, f = rows(3, 8), rows(3, 8, seed=1)
    for layer_idx in range(24):
        connection = spheret.build_connection(scheme, dim=8, layer_idx=layer_idx, n_layer=24)
        compiled = torch.compile(connection, backend=counter, fullgraph=True)
        torch.testing.assert_close(compiled(h, f), connection(h, f))
    assert counter.frame_count <= 2


def test_an_exponent_that_is_set_costs_two_graphs(counter: CompileCounter) -> None:
    h, f = rows(3, 8), rows(3, 8, seed=1)
    connection = spheret.build_connection("proj", dim=8, layer_idx=1, n_layer=4)
    compiled = torch.compile(connection, backend=counter, fullgraph=True)
    for p in (1.0, 2.0, 0.5, 1.3, 7.0):
        connection.p = p
        torch.testing.assert_close(compiled(h, f), connection(h, f))
    assert counter.frame_count <= 2


# --- export ---


def test_exported_program_holds_one_node() -> None:
    module = Junction()
    h, f = rows(9, 48).detach(), rows(9, 48, seed=1).detach()
    program = torch.export.export(module, (h, f), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},) * 2)
    assert sum("spheret.retract" in str(node.target) for node in program.graph.nodes) == 1
    more = rows(20, 48).detach(), rows(20, 48, seed=1).detach()
    torch.testing.assert_close(program.module()(*more), module(*more), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", ["geonorm", "proj", "spheret:p=learn-per-layer"])
@pytest.mark.parametrize("strict", [True, False])
def test_exported_graphs_hold_finite_numbers_alone(scheme: str, strict: bool) -> None:
    """Packages of compiled models are JSON inside, which has no NaN and no infinity."""
    connection = spheret.build_connection(scheme, dim=8, layer_idx=1, n_layer=4)
    program = torch.export.export(connection, (torch.randn(3, 8), torch.randn(3, 8)), strict=strict)
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if "spheret" in str(node.target)]
    everything = [node for graph in graphs for node in graph.nodes]
    numbers = [a for node in everything for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    assert nodes and numbers and all(math.isfinite(number) for number in numbers)


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
        save = op == OPERATORS.retract
        return ckpt.CheckpointPolicy.MUST_SAVE if save else ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(ckpt.create_selective_checkpoint_contexts, policy)
    wrapped = partial(ckpt.checkpoint, module, use_reentrant=False, context_fn=contexts)
    ours = gradients(wrapped, inputs)
    assert any("spheret.retract" in name for name in seen)
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


WRAPS = {"ddp": wrap_ddp, "fsdp": wrap_fsdp}


def work(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for name, wrap in WRAPS.items():
        model = wrap(small_gpt())
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch(rank))
        state = {key.removeprefix("module."): whole(p.detach()) for key, p in model.named_parameters()}
        if rank == 0:
            torch.save(state, folder / name)
    dist.destroy_process_group()


def test_two_processes_make_the_step_of_one(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, tmp_path), nprocs=2)
    model = small_gpt()
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.cat([batch(0), batch(1)]))
    for wrap in WRAPS:
        theirs = torch.load(tmp_path / wrap)
        for name, p in model.named_parameters():
            torch.testing.assert_close(theirs[name], p.detach(), rtol=1e-4, atol=1e-6, msg=f"{wrap}: {name}")
