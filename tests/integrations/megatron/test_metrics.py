"""Figures of a logging interval, against the counters and sums that they come from."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron.metrics import Interval, Metrics
from tests._buckets import spans_of, state_of
from tests._ranks import run_ranks

NUMEL = 3 * 1024


def _intervals(rank: int, world_size: int) -> list[tuple[Interval, list[float], float, float]]:
    states = [
        state_of(NUMEL, world_size, spans_of(NUMEL), LoCoConfig(bits=4, block_size=32, warmup_steps=2))
        for _ in range(2)
    ]
    metrics = Metrics(states)
    result = []
    for steps in (3, 2):
        for step in range(steps):
            for index, state in enumerate(states):
                grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + 10 * index + rank))
                output = torch.empty(NUMEL // world_size)
                reduce_scatter(output, grad, state, op=dist.ReduceOp.SUM, group=dist.group.WORLD)
        sums = sum(state.statistics for state in states)
        interval = metrics.interval(steps)
        wire = sum(state.layout.wire_bytes for state in states)
        exact = sum(state.layout.ring_bytes(4) for state in states)
        result.append((interval, sums.tolist(), wire, exact))
    return result


def test_figures_of_an_interval() -> None:
    world_size = 3
    ranks = run_ranks(_intervals, world_size)
    # A rank may own more exact elements than another, but every rank reports the same figures.
    assert all([interval for interval, *_ in rank] == [interval for interval, *_ in ranks[0]] for rank in ranks)
    for number, (interval, _, wire, exact) in enumerate(ranks[0]):
        grad_sq, residual_sq, error_sq, _ = (sum(rank[number][1][i] for rank in ranks) for i in range(4))
        assert math.isclose(interval.relative_error, math.sqrt(residual_sq / grad_sq), rel_tol=1e-12)
        assert math.isclose(interval.error_norm, math.sqrt(error_sq), rel_tol=1e-12)
        # The first interval has two exact steps of three.
        expected = (2 * exact + wire) / 3 if number == 0 else wire
        assert math.isclose(interval.wire_bytes, expected, rel_tol=1e-12)
        assert interval.exact_steps == (2 if number == 0 else 0)
        assert math.isclose(interval.bf16_bytes, 2 * NUMEL * 2 * (world_size - 1) / world_size, rel_tol=1e-12)
        assert math.isclose(interval.bits_per_element, 16 * expected / interval.bf16_bytes, rel_tol=1e-12)
        assert interval.nonfinite_blocks == 0
        assert 0 < interval.relative_error < 0.2
