"""Completion belongs to the handle that the caller waits for (kind 15)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from tests._buckets import CPU, layout_of, spans_of
from tests._ranks import RankPool

RanksOf = Callable[[int], RankPool]
REPEATS = 200
LATE = 20
"""The first repeats, in which rank 1 starts only after rank 0 has looked at its handles."""

# The error is reset at every step, so that equal gradients give equal results.
CONFIG = LoCoConfig(bits=4, block_size=32, warmup_steps=0, reset_interval=1)


class PoisonedPool(ScratchPool):
    """Lends memory that is full of NaN: what is read before it arrived shows."""

    def take(self, num_bytes: int) -> Tensor:
        return super().take(num_bytes).fill_(0xFF)


def _two_buckets(group: dist.ProcessGroup, device: torch.device) -> list[tuple[BucketState, Tensor, Tensor]]:
    """State, gradients and right result of two buckets; the result by a call that blocks."""
    world_size = group.size()
    scratch = PoisonedPool(device)
    buckets = []
    for seed, numel in enumerate((127 * world_size, 1021 * world_size)):
        state = BucketState("bucket", layout_of(numel, world_size, spans_of(numel), CONFIG), CONFIG, device, scratch)
        given = torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + group.rank())).to(device)
        right = torch.full((numel // world_size,), math.nan, device=device)
        reduce_scatter(right, given.clone(), state, op=dist.ReduceOp.SUM, group=group)
        assert right.isfinite().all()
        buckets.append((state, given, right))
    return buckets


def _inside_the_coalescing_manager(group: dist.ProcessGroup) -> None:
    # As Megatron dispatches: inside the manager, which holds none of these works and whose wait() waits for none.
    buckets = _two_buckets(group, CPU)
    for repeat in range(REPEATS):
        outputs = [torch.full_like(right, math.nan) for _, _, right in buckets]
        if group.rank() == 1 and repeat < LATE:
            dist.recv(torch.zeros(1), group=group, group_src=0)
        with dist._coalescing_manager(group, async_ops=True) as manager:
            works = [
                reduce_scatter(output, given.clone(), state, op=dist.ReduceOp.SUM, group=group, async_op=True)
                for output, (state, given, _) in zip(outputs, buckets, strict=True)
            ]
        manager.wait()
        if group.rank() == 0 and repeat < LATE:
            # Rank 1 starts when it is told to: nothing can have arrived.
            assert not any(work.is_completed() for work in works)
            assert all(output.isnan().all() for output in outputs)
            dist.send(torch.zeros(1), group=group, group_dst=1)
        for work in works if repeat % 2 else reversed(works):
            work.wait()
        assert all(work.is_completed() for work in works)
        for output, (_, _, right) in zip(outputs, buckets, strict=True):
            assert torch.equal(output, right), repeat


@pytest.mark.kind(15)
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_buckets_with_a_late_rank_200_times(ranks_of: RanksOf, world_size: int) -> None:
    ranks_of(3).run(_inside_the_coalescing_manager, world_size)


def _on_a_side_stream(group: dist.ProcessGroup) -> None:
    # The gradients come late, from a stream that the caller's stream waits for, as after a backward pass.
    device = torch.device("cuda", 0)
    buckets = _two_buckets(group, device)
    side = torch.cuda.Stream()
    for repeat in range(REPEATS):
        produced = [torch.full_like(given, math.nan) for _, given, _ in buckets]
        outputs = [torch.full_like(right, math.nan) for _, _, right in buckets]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            for late, (_, given, _) in zip(produced, buckets, strict=True):
                late.copy_(given)
        torch.cuda.current_stream().wait_stream(side)
        works = [
            reduce_scatter(output, late, state, op=dist.ReduceOp.SUM, group=group, async_op=True)
            for output, late, (state, _, _) in zip(outputs, produced, buckets, strict=True)
        ]
        for late, work in zip(produced, works, strict=True):
            late.fill_(math.nan)
            work.wait()
        for output, (_, _, right) in zip(outputs, buckets, strict=True):
            assert torch.equal(output, right), repeat


@pytest.mark.kind(15)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: streams")
def test_gradients_that_come_late_on_a_side_stream(ranks_of: RanksOf) -> None:
    ranks_of(3).run(_on_a_side_stream, 2)
