"""Byte layouts of as many ranks as a job may have, with Megatron's own padding (kind 17)."""

from __future__ import annotations

import itertools

import pytest

from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import BucketLayout, ParamSpan
from tests._buckets import layout_of

PARAMS = (1, 640, 1021, 4096, 77, 12_289, 2)
"""Elements of the parameters of a bucket; the first and the last are exact."""


def megatron_bucket(world_size: int, *, for_nccl_busbw: bool) -> tuple[int, list[ParamSpan]]:
    """Size and parameters of a bucket as Megatron lays it out."""
    from megatron.core.optimizer.param_layout import pad_bucket_end, pad_param_start

    spans, end = [], 0
    for number, numel in enumerate(PARAMS):
        start = pad_param_start(end)
        end = start + numel
        spans.append(ParamSpan(start, end, exact=number in (0, len(PARAMS) - 1)))
    return pad_bucket_end(end, world_size, for_nccl_busbw), spans


def check(layout: BucketLayout, spans: list[ParamSpan]) -> None:
    """Whole bytes per rank, no block of two owners or two parameters, every element once."""
    owner = {}
    rows = []
    shard_numel = layout.numel // layout.world_size
    for rank, shard in enumerate(layout.shards):
        assert (shard.start, shard.stop) == (rank * shard_numel, (rank + 1) * shard_numel)
        assert shard.num_blocks * layout.block_size * layout.bits % 8 == 0
        assert shard.num_blocks * layout.code_block_bytes <= shard.scales_offset <= shard.exact_offset
        pieces = [*shard.exact]
        for run in shard.runs:
            assert run.num_blocks == -(-(run.stop - run.start) // layout.block_size)
            rows += range(run.first_block, run.first_block + run.num_blocks)
            pieces.append((run.start, run.stop))
            # Several parameters in a run only where each but the last is whole blocks.
            borders = [s.start for s in spans if run.start < s.start < run.stop]
            assert all((border - run.start) % layout.block_size == 0 for border in borders)
        for start, stop in pieces:
            assert shard.start <= start < stop <= shard.stop
            assert start not in owner
            owner[start] = stop - start
    assert rows == list(range(layout.num_blocks))
    assert sum(owner.values()) == sum(PARAMS)
    assert sum(layout.send_splits) == layout.send_bytes
    assert all(split % 16 == 0 for split in layout.send_splits)


@pytest.mark.kind(17)
@pytest.mark.parametrize("for_nccl_busbw", [False, True])
def test_every_number_of_ranks_with_megatrons_padding(for_nccl_busbw: bool) -> None:
    blocks = itertools.cycle((32, 128, 256))
    for world_size in range(1, 257):
        numel, spans = megatron_bucket(world_size, for_nccl_busbw=for_nccl_busbw)
        check(layout_of(numel, world_size, spans, LoCoConfig(bits=4, block_size=next(blocks))), spans)


@pytest.mark.kind(17)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("block_size", [32, 128, 256, 4096])
@pytest.mark.parametrize("world_size", [7, 128, 192, 256])
def test_every_width_where_shards_are_smallest(world_size: int, block_size: int, bits: int) -> None:
    numel, spans = megatron_bucket(world_size, for_nccl_busbw=False)
    check(layout_of(numel, world_size, spans, LoCoConfig(bits=bits, block_size=block_size)), spans)
