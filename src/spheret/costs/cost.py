"""The cost of a run, computed before the run: parameters, floating-point operations, memory, tokens, hours on a GPU.

Operations are counted as PaLM does (arXiv 2204.02311, appendix B): ``6 N + 12 L d T`` per token. N counts the weights
of matrix products: those of the head, but not the embeddings. A weight times a number is 2 operations, a product and a
sum. The backward pass makes two products for each one of the forward pass. The second term is attention's scores and
averages over all T tokens of the context, masked or not. Elementwise operations are not counted: they cost memory
traffic, not arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from spheret.costs.memory import StepMemory, in_bfloat16, step_memory
from spheret.models import GPT, GPTConfig
from spheret.training import TrainConfig

# --- operations and parameters ---


def block_flops(config: GPTConfig) -> int:
    """Operations of the forward pass of all blocks, per token of a full context."""
    # Attention adds two products per layer, the scores and the averages, each of 2 d operations for each of T tokens.
    weights = sum(m.weight.numel() for m in _on_meta(config).blocks.modules() if isinstance(m, nn.Linear))
    return 2 * weights + 4 * config.n_layer * config.n_embd * config.block_size


def forward_flops(config: GPTConfig) -> int:
    """Operations of the forward pass including the head, per token of a full context."""
    return block_flops(config) + 2 * config.vocab_size * config.n_embd


def training_flops(config: GPTConfig) -> int:
    """Operations of the forward and backward pass, per token of a full context."""
    return 3 * forward_flops(config)


def count_parameters(config: GPTConfig) -> int:
    """Parameters of the model; shared ones count once."""
    return _on_meta(config).num_parameters()


def _on_meta(config: GPTConfig) -> GPT:
    # Tensors on the meta device have a shape but no storage, so a model of any size is built at once.
    with torch.device("meta"):
        return GPT(config)


# --- GPUs ---


@dataclass(frozen=True)
class GPU:
    """A GPU with its vendor's figures. No program reaches the peak.

    Attributes:
        memory: bytes.
        bfloat16: peak speed of dense matrix products, operations per second.
        float32: the same without TF32, which PyTorch leaves off by default.
    """

    name: str
    memory: float
    bfloat16: float
    float32: float

    def seconds(self, flops: float, *, mfu: float, bfloat16: bool = True) -> float:
        """Time for ``flops`` at the share ``mfu`` of the peak. ValueError: a share outside (0, 1]."""
        return flops / (check_mfu(mfu) * (self.bfloat16 if bfloat16 else self.float32))


# SXM boards, figures second hand from data sheets. An HGX board makes 180 of the 192 GB of a B200 available.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100-80GB", 80e9, 312e12, 19.5e12),
        GPU("H100", 80e9, 989e12, 67e12),
        GPU("H200", 141e9, 989e12, 67e12),
        GPU("B200", 180e9, 2250e12, 75e12),
    )
}


def find_gpu(name: str) -> GPU:
    """The GPU of this name, in upper or lower case. ValueError, which lists the known names, for an unknown one."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in known:
        raise ValueError(f"gpu = {name!r} is not known: choose one of {', '.join(GPUS)}")
    return known[name.lower()]


def check_mfu(mfu: float) -> float:
    """Returns ``mfu`` unchanged. ValueError: it is outside (0, 1]."""
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu = {mfu}: the share of the peak speed lies in (0, 1]; 0.4 is a good run")
    return mfu


# --- a whole run ---


@dataclass(frozen=True)
class RunCost:
    """Cost of one run on one device.

    Attributes:
        parameters: number of the model's parameters; shared ones count once.
        tokens: number of training tokens.
        flops_per_token: operations of the forward and backward pass.
        memory: memory of an optimizer step of the trainer.
        recomputed: memory of a step that keeps only the input of every block. The trainer does not do this.
        recompute_flops_per_token: operations that recomputing adds to `flops_per_token`.
        bfloat16: whether matrix products are in bfloat16.
    """

    parameters: int
    tokens: int
    flops_per_token: int
    memory: StepMemory
    recomputed: StepMemory
    recompute_flops_per_token: int
    bfloat16: bool

    @property
    def flops(self) -> int:
        """Operations of the whole run, without its evaluations."""
        return self.tokens * self.flops_per_token

    def hours(self, gpu: GPU, mfu: float) -> float:
        """Hours on one GPU that reaches the share `mfu` of its peak speed (model FLOPs utilisation)."""
        return gpu.seconds(self.flops, mfu=mfu, bfloat16=self.bfloat16) / 3600


def run_cost(config: TrainConfig) -> RunCost:
    """Cost of the run with this configuration. No tensor has storage, so this takes seconds even for 36 blocks."""
    return RunCost(
        parameters=count_parameters(config.model),
        tokens=config.total_steps * config.tokens_per_step,
        flops_per_token=training_flops(config.model),
        memory=step_memory(config),
        recomputed=step_memory(config, recompute=True),
        recompute_flops_per_token=block_flops(config.model),
        bfloat16=in_bfloat16(config),
    )
