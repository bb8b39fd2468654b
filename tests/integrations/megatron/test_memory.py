"""Scratch memory is reserved when the model is wrapped, and the steady state allocates nothing."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from typing import Any

import pytest

from megatron_loco.config import LoCoConfig
from tests._ranks import run_ranks
from tests.integrations.megatron._ddp import Case, buckets, parallel_megatron, train_step, wrap

LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=1, reset_interval=0, min_bucket_numel=0)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _memory(rank: int, world_size: int, cases: list[tuple[Case, LoCoConfig]]) -> list[dict[str, Any]]:
    results = []
    lines = _Lines()
    logger = logging.getLogger("megatron_loco.integrations.megatron.startup_report")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    for case, config in cases:
        with ExitStack() as stack:
            parallel_megatron(stack, num_instances=case.num_instances)
            from megatron_loco.integrations.megatron import patch

            lines.lines.clear()
            with patch(config):
                ddp = wrap(case)
                groups = [[state for _, state in group.loco_states] for group, _ in buckets(ddp)]
                states = [state for group in groups for state in group]
                pools = list({id(state.scratch): state.scratch for state in states}.values())
                before = [(pool.num_allocations, pool.allocated_bytes) for pool in pools]
                for step in range(4):
                    train_step(ddp, case, rank, step)
                peers = {state.exchange.inner_size for state in states}
                peer = rank // peers.pop()
                results.append(
                    {
                        "before": before,
                        "after": [(pool.num_allocations, pool.allocated_bytes) for pool in pools],
                        "largest": max(sum(size for s in group for size in s.scratch_bytes(peer)) for group in groups),
                        "groups": len(groups),
                        "error": sum(state.memory_bytes for state in states),
                        "elements": sum(state.exchange.numel for state in states),
                        "lines": [line for line in lines.lines if "memory" in line],
                    }
                )
    return results


@pytest.mark.kind(23)
def test_reserved_at_the_start_and_enough() -> None:
    cases = [
        (Case(bucket_size=700, multiple_of=4), LOCO),
        (Case(overlap=True, bucket_size=100, multiple_of=4), LOCO),
        (Case(overlap=True, bucket_size=None, multiple_of=4), LOCO),
        (Case(overlap=True, bucket_size=700, multiple_of=4), dataclasses.replace(LOCO, chunk_bytes=100)),
        (Case(bucket_size=700, multiple_of=4), dataclasses.replace(LOCO, rollback="restore", error_bits=32)),
        (
            Case(overlap=True, bucket_size=700, multiple_of=4),
            dataclasses.replace(LOCO, topology="two-level", ranks_per_node=2),
        ),
    ]
    results = run_ranks(_memory, 4, cases)
    for per_case, (case, _) in zip(zip(*results, strict=True), cases, strict=True):
        for result in per_case:
            assert result["before"] == result["after"]
            ((allocations, allocated),) = result["after"]
            assert allocations > 0
            # At least the largest group, and of the groups that are in flight no more than that each.
            assert result["largest"] <= allocated <= (2 if case.overlap else 1) * result["largest"]
        (line,) = per_case[0]["lines"]
        error, (_, scratch) = per_case[0]["error"], per_case[0]["after"][0]
        assert line == (
            f"LoCo: memory on this rank: error state {error / 1e6:.2f} MB, scratch {scratch / 1e6:.2f} MB; together "
            f"{(error + scratch) / per_case[0]['elements']:.2f} bytes per gradient element"
        )
        assert not any(result["lines"] for result in per_case[1:])
    with_overlap = results[0][1]
    assert with_overlap["groups"] > 2
    # Reset at the start of each case: what 32-bit errors kept twice (rollback) take, against 8 bits kept once.
    assert results[0][4]["error"] > 7 * results[0][0]["error"]
