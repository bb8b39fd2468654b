"""Models of prescribed shapes, dtypes and gradients under Megatron's real DDP, and what each shard must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import BucketLayout, ParamSpan, bucket_layout
from tests._buckets import Oracle

Gradient = Callable[[int, int], Tensor]
"""``(rank, number of the parameter)`` -> its gradient in one step, fp32."""


class Prescribed(torch.nn.Module):
    """``loss = sum(parameter * coefficient)``: the gradient of a parameter is its coefficient."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(tuple(s), dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
        )

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        return sum((w * c.to(w.dtype)).sum().float() for w, c in zip(self.weights, coefficients, strict=True))


def wrap(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    reduce_in_fp32: bool = True,
    overlap: bool = False,
    bucket_size: int | None = None,
    one_group: bool = False,
    average: bool = False,
) -> Any:
    """Build a ``DistributedDataParallel`` model; needs ``parallel_megatron`` of tests/integrations/megatron/_ddp.py.

    Args:
        shapes: Of the parameters, in order.
        dtype: Of all parameters.
        dtypes: Of each parameter, instead.
        reduce_in_fp32: Whether gradients are fp32; else they have the dtype of their parameter.
        overlap: Reduce during the backward pass.
        bucket_size: Elements of a bucket; works with ``overlap`` only, as in Megatron.
        one_group: Reduce all buckets together, as Megatron does for model chunks after the first.
        average: Let the collective average.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    return DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            average_in_collective=average,
            grad_reduce_in_fp32=reduce_in_fp32,
            bucket_size=bucket_size,
        ),
        Prescribed(shapes, dtypes or [dtype] * len(shapes)),
        disable_bucketing=one_group,
    )


def backward(ddp: Any, rank: int, *gradients: Gradient, prepare: Callable[[], None] | None = None) -> None:
    """One step up to the backward pass of its last micro-batch; each of ``gradients`` is one micro-batch.

    ``prepare`` is called when the gradient buffers have been zeroed.
    """
    shapes = [weight.shape for weight in ddp.module.weights]
    ddp.zero_grad_buffer()
    if prepare is not None:
        prepare()
    for number, gradient in enumerate(gradients):
        with nullcontext() if number == len(gradients) - 1 else ddp.no_sync():
            ddp([gradient(rank, index).view(shape) for index, shape in enumerate(shapes)]).backward()


def step(ddp: Any, rank: int, *gradients: Gradient, prepare: Callable[[], None] | None = None) -> list[Tensor]:
    """:func:`backward` and the end of the reduction; returns this rank's shard of each bucket."""
    backward(ddp, rank, *gradients, prepare=prepare)
    ddp.finish_grad_sync()
    return shards(ddp)


def buckets(ddp: Any) -> list[Any]:
    """All buckets of a model without experts."""
    return [bucket for group in ddp.bucket_groups for bucket in group.buckets]


def shards(ddp: Any) -> list[Tensor]:
    """Copies of this rank's reduced shards, one per bucket."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [bucket.grad_data.chunk(world_size)[rank].clone() for bucket in buckets(ddp)]


def states(ddp: Any) -> list[BucketState]:
    """LoCo's state of each bucket; empty where it has none."""
    return [state for group in ddp.bucket_groups for _, state in getattr(group, "loco_states", [])]


def layout_of(bucket: Any, config: LoCoConfig, world_size: int) -> BucketLayout:
    """The flat layout of a Megatron bucket, from its parameters."""
    grad_data = bucket.grad_data
    spans = [ParamSpan(start, stop, exact=param.dim() < 2) for param, (start, stop) in bucket.param_to_index.items()]
    return bucket_layout(
        grad_data.numel(),
        world_size,
        spans,
        bits=config.bits,
        block_size=config.block_size,
        exact_itemsize=grad_data.element_size(),
    )


class Expected:
    """What every rank's shards must be, by one oracle per bucket and rank. Flat exchange, sum of scaled gradients."""

    def __init__(self, ddp: Any, config: LoCoConfig) -> None:
        self.world_size = dist.get_world_size()
        self.number = {weight: index for index, weight in enumerate(ddp.module.weights)}
        self.oracles = {
            bucket: [
                Oracle(layout_of(bucket, config, self.world_size), config.beta, config.warmup_steps)
                for _ in range(self.world_size)
            ]
            for bucket in buckets(ddp)
        }

    def shards(self, rank: int, gradient: Gradient) -> list[Tensor]:
        """The shards of ``rank`` after the next step of all ranks."""
        result = []
        for bucket, oracles in self.oracles.items():
            if self.world_size > 1:
                sent = [oracle.send(self.local(bucket, r, gradient)) for r, oracle in enumerate(oracles)]
            else:
                sent = [self.local(bucket, 0, gradient).float()]
            total = sent[0]
            for other in sent[1:]:
                total = total + other
            result.append(total.to(bucket.grad_data.dtype).chunk(self.world_size)[rank])
        return result

    def local(self, bucket: Any, rank: int, gradient: Gradient) -> Tensor:
        """What a rank's bucket holds before the reduction, padding being 0."""
        flat = torch.zeros(bucket.grad_data.numel(), dtype=bucket.grad_data.dtype)
        for param, (start, stop) in bucket.param_to_index.items():
            # The coefficient in the parameter's dtype, accumulated in the buffer's.
            flat[start:stop] = gradient(rank, self.number[param]).flatten().to(param.dtype).to(flat.dtype)
        return flat.mul_(bucket.gradient_scaling_factor)
