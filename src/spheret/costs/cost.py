"""What a run costs before it is run: parameters, arithmetic, memory, tokens; `plan.py` is what a comparison consists
of."""

from __future__ import annotations

from dataclasses import dataclass

from spheret.costs.flops import block_flops, count_parameters, training_flops
from spheret.costs.gpus import GPU
from spheret.costs.memory import StepMemory, in_bfloat16, step_memory
from spheret.training import TrainConfig


@dataclass(frozen=True)
class RunCost:
    """One run on one device.

    Attributes:
        parameters: of the model, shared ones once.
        tokens: trained on.
        flops_per_token: of forward and backward pass.
        memory: of a step as the trainer makes it.
        recomputed: of a step that keeps only the input of every block, which the trainer does not do.
        recompute_flops_per_token: what that adds to `flops_per_token`.
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
        """Of the whole run, evaluations left out."""
        return self.tokens * self.flops_per_token

    def hours(self, gpu: GPU, mfu: float) -> float:
        """On one GPU that reaches the share `mfu` of its peak speed (model FLOPs utilisation)."""
        return gpu.seconds(self.flops, mfu=mfu, bfloat16=self.bfloat16) / 3600


def run_cost(config: TrainConfig) -> RunCost:
    """Cost of the run of this configuration. Seconds for a model of 36 blocks: nothing is computed, all is counted."""
    return RunCost(
        parameters=count_parameters(config.model),
        tokens=config.total_steps * config.tokens_per_step,
        flops_per_token=training_flops(config.model),
        memory=step_memory(config),
        recomputed=step_memory(config, recompute=True),
        recompute_flops_per_token=block_flops(config.model),
        bfloat16=in_bfloat16(config),
    )
