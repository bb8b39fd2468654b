"""Two-level reduction under Megatron's real DistributedDataParallel: four ranks that count as two nodes of two."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loco.config import LoCoConfig
from tests._ranks import RankPool
from tests.integrations.megatron._ddp import Case, buckets, parallel_megatron, reduce_case, shards, train_step, wrap

IDENTITY = LoCoConfig(bits=32, warmup_steps=0, min_bucket_numel=0, topology="two-level", ranks_per_node=2)
LOCO = LoCoConfig(
    bits=4, block_size=32, warmup_steps=0, reset_interval=0, min_bucket_numel=0, topology="two-level", ranks_per_node=2
)


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _equal(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True))


def _identity_differs(group: dist.ProcessGroup, cases: list[Case]) -> list[Case]:
    differing = []
    for expert_parallel, of_size in itertools.groupby(cases, key=lambda case: case.expert_parallel):
        with ExitStack() as stack:
            parallel_megatron(stack, expert_parallel)
            differing += [
                case
                for case in of_size
                if not _equal(reduce_case(case, group.rank(), IDENTITY), reduce_case(case, group.rank(), None))
            ]
    return differing


def test_identity_codec_is_bitwise_stock(ranks: RankPool) -> None:
    # Multiples of 4 in 1/4 steps: integers small enough for bf16, so that any order of summation is exact.
    cases = [
        Case(
            overlap=overlap,
            average=average,
            grad_dtype=dtype,
            num_micro_batches=micro,
            bucket_size=size,
            expert_parallel=expert_parallel,
            multiple_of=4,
        )
        for expert_parallel, overlap, average, (dtype, micro, size) in itertools.product(
            (1, 2), (False, True), (False, True), ((torch.float32, 2, 700), (torch.bfloat16, 1, None))
        )
    ]
    assert ranks.run(_identity_differs, 4, cases) == [[]] * 4


def _runs(group: dist.ProcessGroup, case: Case, configs: list[LoCoConfig]) -> list[list[list[torch.Tensor]]]:
    with ExitStack() as stack:
        parallel_megatron(stack)
        return [reduce_case(case, group.rank(), config) for config in configs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlap_changes_no_bit(ranks: RankPool, dtype: torch.dtype) -> None:
    case = Case(grad_dtype=dtype, num_micro_batches=2)
    plain = ranks.run(_runs, 4, case, [LOCO, replace(LOCO, topology="flat")])
    overlapped = ranks.run(_runs, 4, replace(case, overlap=True), [LOCO])
    for (two_levels, flat), (with_overlap,) in zip(plain, overlapped, strict=True):
        assert _equal(two_levels, with_overlap)
        assert not _equal(two_levels, flat)  # what is quantised differs: sums of a node, not gradients of a rank


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _what_it_is(group: dist.ProcessGroup, config: LoCoConfig, expert_parallel: int) -> dict[str, Any]:
    case = Case(expert_parallel=expert_parallel, overlap=True)
    log, handler = logging.getLogger("megatron_loco.integrations.megatron.startup_report"), _Lines()
    with ExitStack() as stack:
        parallel_megatron(stack, expert_parallel)
        from megatron_loco.integrations.megatron import patch

        stack.enter_context(patch(config))
        log.addHandler(handler)
        stack.callback(log.removeHandler, handler)
        level = log.level
        log.setLevel(logging.INFO)
        stack.callback(log.setLevel, level)
        ddp = wrap(case)
        train_step(ddp, case, group.rank(), 0)
        states = {
            kind: [state for bucket_group in bucket_groups for _, state in bucket_group.loco_states]
            for kind, bucket_groups in (("dense", ddp.bucket_groups), ("expert", ddp.expert_parallel_bucket_groups))
        }
    return {
        "two-level": {kind: [s.exchange.is_two_level for s in of_kind] for kind, of_kind in states.items()},
        "dense error": sum(s.error.num_bytes for s in states["dense"]),
        "dense internode": sum(s.traffic.internode_bytes for s in states["dense"]),
        "lines": [line for line in handler.lines if " gradients of " in line],
    }


def test_each_kind_of_group_has_its_own_topology(ranks: RankPool) -> None:
    # With 2 expert-parallel ranks, the groups of expert gradients are ranks 0, 2 and 1, 3: one rank on each node.
    with_experts = ranks.run(_what_it_is, 4, replace(LOCO, topology="auto"), 2)
    for result in with_experts:
        assert result["two-level"] == {"dense": [True], "expert": [False]}
    first, second, *others = [result["lines"] for result in with_experts]
    assert others == [[], []]
    # Rank 0 is the first of its two groups, rank 1 of its group for expert gradients.
    (dense, experts), (other_experts,) = first, second
    assert dense.startswith("LoCo: dense gradients of 4 ranks on 2 node(s): two-level, since 2 of its ranks share each")
    assert "expert gradients of 2 ranks on 2 node(s): flat, since each of its ranks is on a node of its own" in experts
    assert other_experts == experts


def test_error_and_bytes_between_nodes_are_half_of_flat(ranks: RankPool) -> None:
    two_levels = ranks.run(_what_it_is, 4, LOCO, 1)
    flat = ranks.run(_what_it_is, 4, replace(LOCO, topology="flat"), 1)
    for rank in range(4):
        assert two_levels[rank]["two-level"] == {"dense": [True], "expert": []}
        assert flat[rank]["two-level"] == {"dense": [False], "expert": []}
        assert flat[rank]["dense internode"] == 2 * two_levels[rank]["dense internode"] > 0
    # A rank keeps the error of the blocks of its position on each node; over a node that is what flat keeps on a rank.
    assert two_levels[0]["dense error"] + two_levels[1]["dense error"] == flat[0]["dense error"] > 0
    (line,) = two_levels[0]["lines"]
    (flat_line,) = flat[0]["lines"]
    assert line.startswith("LoCo: dense gradients of 4 ranks on 2 node(s): two-level, since as --loco-topology says;")
    # Both name the same figures: what one sends, and what the other would.
    figures = [dict(part.rsplit(" ", 2)[:2] for part in text.split(": ")[-1].split(", ")) for text in (line, flat_line)]
    assert figures[0] == figures[1]
    assert set(figures[0]) == {"two-level", "flat", "bf16 ring"}


def _refused(group: dist.ProcessGroup, configs: list[LoCoConfig]) -> str:
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron_loco.integrations.megatron.grad_sync import GradSync

        ddp = wrap(Case())
        try:
            GradSync().attach(ddp, configs[group.rank()])
        except ValueError as error:
            return str(error)
    return ""


def test_uneven_nodes_are_refused_or_flat(ranks: RankPool) -> None:
    for message in ranks.run(_refused, 4, [replace(LOCO, ranks_per_node=3)] * 4):
        assert "--loco-topology two-level" in message
        assert "node 0 (3 ranks), node 1 (1 rank)" in message
        assert "--loco-topology flat, or auto" in message
    uneven = ranks.run(_runs, 4, Case(), [replace(LOCO, ranks_per_node=3, topology="auto")])
    flat = ranks.run(_runs, 4, Case(), [replace(LOCO, topology="flat")])
    assert all(_equal(a, b) for (a,), (b,) in zip(uneven, flat, strict=True))


def test_ranks_that_differ_are_stopped_before_they_look_for_nodes(ranks: RankPool) -> None:
    by_host = replace(LOCO, topology="auto", ranks_per_node=0)
    for message in ranks.run(_refused, 4, [LOCO, LOCO, LOCO, by_host]):
        assert "--loco-topology: 'two-level' on rank 0, 'auto' on rank 3" in message
        assert "--loco-ranks-per-node: 2 on rank 0, 0 on rank 3" in message


def _nan(group: dist.ProcessGroup) -> tuple[list[bool], bool]:
    case = Case(overlap=True)
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron_loco.integrations.megatron import patch

        stack.enter_context(patch(LOCO))
        ddp = wrap(case)
        train_step(ddp, case, group.rank(), 0)

        def poison(coefficients: list[torch.Tensor]) -> None:
            if group.rank() == 3:
                coefficients[4][64, 1] = torch.nan

        train_step(ddp, case, group.rank(), 1, poison=poison)
        seen = [bool(shard.isnan().any()) for shard in shards(ddp)]
        train_step(ddp, case, group.rank(), 2)
        return seen, all(bool(shard.isfinite().all()) for shard in shards(ddp)) and len(buckets(ddp)) == 1


def test_nan_reaches_its_owner_alone_and_does_not_stay(ranks: RankPool) -> None:
    results = ranks.run(_nan, 4)
    assert sorted(seen for seen, _ in results) == [[False], [False], [False], [True]]
    assert all(is_finite_again for _, is_finite_again in results)
