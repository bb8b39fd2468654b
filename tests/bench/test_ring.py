"""The ring that serves as the baseline computes the exact sum and sends no more than it must."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loco.bench.ring import RingReduceScatter
from tests._ranks import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _grads(seed: int, numel: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    # Whole numbers of at most 30, whose sums over four ranks (120 at most) bf16 holds exactly: it has 8 bits.
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-30, 31, (numel,), generator=generator).to(dtype) for _ in range(world_size)]


def _reduce(group: dist.ProcessGroup, shard_numel: int, dtype: torch.dtype, num_pieces: int) -> None:
    rank, world_size = group.rank(), group.size()
    numel = shard_numel * world_size
    ring = RingReduceScatter(numel, dtype, group, num_pieces=num_pieces)
    for seed in range(3):  # the buffers are used again
        grads = _grads(seed, numel, world_size, dtype)
        output = torch.full((shard_numel,), float("nan"), dtype=dtype)
        before = grads[rank].clone()
        ring(output, grads[rank])
        exact = torch.stack(grads).double().sum(0)[rank * shard_numel : (rank + 1) * shard_numel]
        assert torch.equal(output.double(), exact)
        assert torch.equal(grads[rank], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("shard_numel", "num_pieces"), [(1000, 8), (5, 8), (4096, 1)])
def test_sum_is_exact(ranks: RankPool, size: int, dtype: torch.dtype, shard_numel: int, num_pieces: int) -> None:
    ranks.run(_reduce, size, shard_numel, dtype, num_pieces)


def _count_sent(group: dist.ProcessGroup, numel: int) -> int:
    ring = RingReduceScatter(numel, torch.bfloat16, group)
    sent = 0
    send = ring._send

    def counting(piece: torch.Tensor, *args: Any) -> Any:
        nonlocal sent
        sent += piece.numel()
        return send(piece, *args)

    ring._send = counting  # type: ignore[method-assign]
    ring(torch.empty(numel // group.size(), dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16))
    return sent


def test_every_rank_sends_all_shards_but_one(ranks: RankPool) -> None:
    assert ranks.run(_count_sent, 4, 4000) == [3000] * 4


def _refuse(group: dist.ProcessGroup) -> str:
    with pytest.raises(ValueError, match="a bucket of 1001 elements cannot be sharded over 2 ranks") as caught:
        RingReduceScatter(1001, torch.float32, group)
    return str(caught.value)


def test_refuses_a_bucket_that_has_no_equal_shards(ranks: RankPool) -> None:
    ranks.run(_refuse, 2)
