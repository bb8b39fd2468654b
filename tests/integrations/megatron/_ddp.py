"""Megatron's real DistributedDataParallel on Gloo ranks, around a module whose gradients a test prescribes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loco import cpu
from megatron_loco.config import LoCoConfig

SHAPES = ((33, 20), (20,), (7, 65), (1,), (128, 3), (5,))
"""Matrices and 1-D parameters of odd sizes; Megatron pads between them and at bucket ends."""


@dataclass(frozen=True)
class Case:
    """One way to set up data parallelism."""

    overlap: bool = False
    average: bool = False
    grad_dtype: torch.dtype = torch.float32
    num_micro_batches: int = 1
    bucket_size: int | None = None
    expert_parallel: int = 1
    multiple_of: int = 0
    """Integer-valued gradients that Megatron's ``1 / multiple_of`` leaves integers: any order of summation is exact."""

    def gradient(self, shape: Sequence[int], *seed: int) -> Tensor:
        """The gradient of one parameter in one micro-batch of one rank and step, in bf16 resolution."""
        number = sum(part * 1009**i for i, part in enumerate(seed))
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(number))
        return (8 * values).round() * self.multiple_of if self.multiple_of else values.bfloat16().float()


class Prescribed(torch.nn.Module):
    """``loss = sum(parameter * coefficient)``: the gradient of a parameter is its coefficient."""

    def __init__(self, dtype: torch.dtype, expert: bool) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in SHAPES])
        for weight in self.weights[2:4] if expert else ():
            weight.allreduce = False

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        return sum((w * c.to(w.dtype)).sum() for w, c in zip(self.weights, coefficients, strict=True))


def parallel_megatron(stack: ExitStack, expert_parallel: int = 1) -> None:
    """Enter the CPU runtime and set up Megatron's groups on the ranks of the default group, until ``stack`` closes."""
    stack.enter_context(cpu.enter())
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
    stack.callback(parallel_state.destroy_model_parallel)


def wrap(case: Case) -> Any:
    """Build a ``DistributedDataParallel`` model for ``case``."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    dtype = case.grad_dtype
    return DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=case.overlap,
            average_in_collective=case.average,
            grad_reduce_in_fp32=dtype == torch.float32,
            bucket_size=case.bucket_size,
        ),
        Prescribed(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, case.expert_parallel > 1),
    )


def train_step(ddp: Any, case: Case, rank: int, step: int, *, poison: Callable[[Any], None] | None = None) -> None:
    """One forward, backward and gradient sync, as Megatron's schedule without pipeline does it."""
    ddp.zero_grad_buffer()
    for micro_batch in range(case.num_micro_batches):
        last = micro_batch == case.num_micro_batches - 1
        coefficients = [case.gradient(s, rank, step, micro_batch, i) for i, s in enumerate(SHAPES)]
        with nullcontext() if last else ddp.no_sync():
            if poison and last:
                poison(coefficients)
            ddp(coefficients).backward()
    ddp.finish_grad_sync()


def buckets(ddp: Any) -> list[tuple[Any, Any]]:
    """All ``(bucket group, bucket)`` pairs of a model, dense ones first."""
    groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
    return [(group, bucket) for group in groups for bucket in group.buckets]


def shards(ddp: Any) -> list[Tensor]:
    """Copies of this rank's reduced shards, one per bucket."""
    result = []
    for group, bucket in buckets(ddp):
        numel = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
        start = group.intra_distributed_optimizer_instance_rank * numel
        result.append(bucket.grad_data[start : start + numel].clone())
    return result


def reduce_case(case: Case, rank: int, config: LoCoConfig | None, num_steps: int = 3) -> list[list[Tensor]]:
    """Shards of every bucket after each of ``num_steps`` steps, with LoCo (``config``) or on stock Megatron (``None``).

    Needs :func:`parallel_megatron`.
    """
    from megatron_loco.integrations.megatron import patch

    with patch(config) if config else nullcontext():
        ddp = wrap(case)
        result = []
        for step in range(num_steps):
            train_step(ddp, case, rank, step)
            result.append(shards(ddp))
        return result
