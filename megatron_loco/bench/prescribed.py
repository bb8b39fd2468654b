"""Megatron's real DistributedDataParallel on Gloo ranks, around a module whose gradients are prescribed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from megatron_loco import cpu, patch
from megatron_loco.config import LoCoConfig

SHAPES = ((33, 20), (20,), (7, 65), (1,), (128, 3), (5,))
"""Matrices and 1-D parameters of odd sizes; Megatron pads between them and at bucket ends."""


@dataclass(frozen=True)
class Case:
    """One way to set up data parallelism, and the gradients."""

    overlap: bool = False
    average: bool = False
    grad_dtype: torch.dtype = torch.float32
    num_micro_batches: int = 1
    bucket_size: int | None = None
    expert_parallel: int = 1
    context_parallel: int = 1
    num_instances: int = 1
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    multiple_of: int = 0
    """Integer-valued gradients that Megatron's ``1 / multiple_of`` leaves integers: any order of summation is exact."""
    magnitudes: bool = False
    """The same gradients without their signs."""

    def gradient(self, shape: Sequence[int], *seed: int) -> Tensor:
        """The gradient of one parameter in one micro-batch of one rank and step, in bf16 resolution."""
        number = sum(part * 1009**i for i, part in enumerate(seed))
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(number))
        # Up to 31: the sum over 8 ranks stays below 256, up to which bf16 holds all whole numbers.
        whole = (8 * values).round().clamp(-31, 31) * self.multiple_of
        result = whole if self.multiple_of else values.bfloat16().float()
        return result.abs() if self.magnitudes else result


class Prescribed(torch.nn.Module):
    """``loss = sum(parameter * coefficient)``: the gradient of a parameter is its coefficient.

    Args:
        dtype: Of the parameters.
        expert: Whether the third and the fourth are expert parameters.
        shapes: Of the parameters.
    """

    def __init__(self, dtype: torch.dtype, expert: bool, shapes: Sequence[Sequence[int]] = SHAPES) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(*s, dtype=dtype)) for s in shapes])
        for weight in list(self.weights)[2:4] if expert else ():
            weight.allreduce = False

    def forward(self, coefficients: Sequence[Tensor | None]) -> Tensor:
        """The loss; a parameter without a coefficient is not used."""
        loss = torch.zeros(())
        for weight, coefficient in zip(self.weights, coefficients, strict=True):
            if coefficient is not None:
                loss = loss + (weight * coefficient.to(weight.dtype)).sum()
        return loss


def end_new_groups(stack: ExitStack) -> None:
    """Destroy the process groups that are made from now on when ``stack`` closes without an exception.

    ``parallel_state.destroy_model_parallel`` only forgets them. A process that sets Megatron up for one case after
    another would collect their threads, some ten per group.
    """
    before = set(_world.pg_map)

    def end(failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            return  # the other ranks may be waiting elsewhere
        dist.barrier()  # all ranks are done with them
        for group in set(_world.pg_map) - before:
            dist.destroy_process_group(group)
        gc.collect()

    stack.push(end)


def parallel_megatron(
    stack: ExitStack, expert_parallel: int = 1, *, context_parallel: int = 1, num_instances: int = 1
) -> None:
    """Enter the CPU runtime and set up Megatron's groups on the ranks of the default group, until ``stack`` closes."""
    stack.enter_context(cpu.enter())
    from megatron.core import parallel_state

    end_new_groups(stack)
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_parallel,
        context_parallel_size=context_parallel,
        num_distributed_optimizer_instances=num_instances,
    )
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
            num_distributed_optimizer_instances=case.num_instances,
        ),
        Prescribed(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, case.expert_parallel > 1, case.shapes),
    )


def train_step(ddp: Any, case: Case, rank: int, step: int, *, poison: Callable[[Any], None] | None = None) -> None:
    """One forward, backward and gradient sync, as Megatron's schedule without pipeline does it.

    Args:
        ddp: A model of :func:`wrap`.
        case: Says what the gradients are.
        rank: Whose gradients.
        step: Of which step.
        poison: May change the list of coefficients of the last micro-batch in place.
    """
    ddp.zero_grad_buffer()
    for micro_batch in range(case.num_micro_batches):
        last = micro_batch == case.num_micro_batches - 1
        coefficients = [case.gradient(s, rank, step, micro_batch, i) for i, s in enumerate(case.shapes)]
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
    with patch(config) if config else nullcontext():
        ddp = wrap(case)
        result = []
        for step in range(num_steps):
            train_step(ddp, case, rank, step)
            result.append(shards(ddp))
        return result
