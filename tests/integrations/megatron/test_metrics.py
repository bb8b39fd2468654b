"""Figures of a logging interval, against the counters and sums that they come from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_loco.collectives.placement import choose_topology
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.two_level import new_node_groups
from megatron_loco.config import LoCoConfig
from megatron_loco.core.exchange import plan_exchange
from megatron_loco.core.wire import ParamSpan
from megatron_loco.integrations.megatron.metrics import Interval, Metrics
from tests._buckets import CPU, spans_of, state_of
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


@pytest.mark.kind(40)
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
        assert (interval.internode_bytes, interval.bf16_internode_bytes) == (0, 0)


def _on_two_nodes(rank: int, world_size: int) -> list[Interval]:
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=0)
    group = dist.group.WORLD
    assert group is not None
    topology = choose_topology([0, 0, 1, 1], "two-level")
    groups = new_node_groups(topology, group)
    intervals = []
    for two_level in (False, True):
        spans = [ParamSpan(0, NUMEL, False)]
        exchange = plan_exchange(
            NUMEL, topology.nodes, spans, two_level=two_level, bits=4, block_size=32, exact_itemsize=4
        )
        state = BucketState("bucket", exchange.layout(rank), config, CPU, ScratchPool(CPU), exchange)
        metrics = Metrics([state])
        for _ in range(2):
            output = torch.empty(NUMEL // world_size)
            reduce_scatter(output, torch.ones(NUMEL), state, op=dist.ReduceOp.SUM, group=group, node_groups=groups)
        intervals.append(metrics.interval(2))
    return intervals


def test_bytes_to_other_nodes() -> None:
    flat, two_levels = run_ranks(_on_two_nodes, 4)[0]
    # 4 bits and a scale of 32 bits per 32 elements: 5 bits. Flat sends 3/4 of them, 2/4 to other nodes; in two levels
    # half of the fp32 bucket stays inside the node, and half of 5 bits of each partial sum, of which it has half, goes.
    payload = NUMEL * 5 / 8
    assert (flat.wire_bytes, flat.internode_bytes) == (payload * 3 / 4, payload / 2)
    assert (two_levels.wire_bytes, two_levels.internode_bytes) == (NUMEL * 4 / 2 + payload / 4, payload / 4)
    for interval in (flat, two_levels):
        # How far values are compressed does not depend on the hops; a ring in bf16 crosses 2 of its 4 links.
        assert interval.bits_per_element == 5
        assert interval.bf16_internode_bytes == interval.bf16_bytes / 2 == NUMEL * 2 * 3 / 4 / 2
        assert interval.scalars()["loco/internode-bytes-per-step"] == interval.internode_bytes
    million = replace(two_levels, internode_bytes=250000.0, bf16_internode_bytes=1e6)
    assert " | of it to other nodes: 0.250 | bf16 ring: 1.000 | bits per element: 5.00 | " in million.line(1, 2)
    assert "other nodes" not in replace(million, bf16_internode_bytes=0.0).line(1, 2)
