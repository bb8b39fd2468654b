"""Chunks of a bucket: together the bucket, cut between blocks, whatever the number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_loco.config import LoCoConfig
from megatron_loco.core.chunks import MAX_CHUNKS, count_chunks, split_layout
from megatron_loco.core.exchange import flat_exchange, plan_exchange
from megatron_loco.core.wire import ALIGNMENT_BYTES, BucketLayout, ParamSpan
from tests._buckets import layout_of, spans_of

LAYOUTS = [
    # numel, world_size, spans: odd parameters with gaps, one long run, shards of padding alone, everything exact.
    (1021 * 4, 4, spans_of(1021 * 4)),
    (4096 * 3, 3, [ParamSpan(0, 4096 * 3 - 7, False)]),
    (128 * 4, 4, [ParamSpan(0, 5, False)]),
    (300, 2, [ParamSpan(10, 290, True)]),
    (64, 2, []),
]


def blocks(layout: BucketLayout, rank: int) -> list[tuple[int, int, int]]:
    """Of each block of a shard: row, first element, end."""
    found = []
    for run in layout.shards[rank].runs:
        for index in range(run.num_blocks):
            start = run.start + index * layout.block_size
            found.append((run.first_block + index, start, min(run.stop, start + layout.block_size)))
    return found


def elements(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [element for start, stop in ranges for element in range(start, stop)]


@pytest.mark.parametrize(("numel", "world_size", "spans"), LAYOUTS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 64])
def test_chunks_are_the_bucket(numel: int, world_size: int, spans: list[ParamSpan], num_chunks: int) -> None:
    layout = layout_of(numel, world_size, spans, LoCoConfig(bits=4, block_size=32), torch.bfloat16)
    chunks = split_layout(layout, num_chunks)
    assert len(chunks) == num_chunks
    for rank in range(world_size):
        shards = [chunk.shards[rank] for chunk in chunks]
        assert [shard.start for shard in shards[1:]] == [shard.stop for shard in shards[:-1]]
        assert (shards[0].start, shards[-1].stop) == (layout.shards[rank].start, layout.shards[rank].stop)
        assert [block for chunk in chunks for block in blocks(chunk, rank)] == blocks(layout, rank)
        for kind in ("exact", "padding"):
            together = [element for shard in shards for element in elements(getattr(shard, kind))]
            assert together == elements(getattr(layout.shards[rank], kind))
        for shard in shards:
            assert shard.first_block == next((run.first_block for run in shard.runs), shard.first_block)
            assert shard.num_blocks == sum(run.num_blocks for run in shard.runs)
            for offset in (shard.scales_offset, shard.exact_offset, shard.payload_bytes):
                assert offset % ALIGNMENT_BYTES == 0
        # Three regions, each of which is rounded up once more per chunk.
        extra = sum(shard.payload_bytes for shard in shards) - layout.shards[rank].payload_bytes
        assert 0 <= extra <= (num_chunks - 1) * 3 * (ALIGNMENT_BYTES - 1) + 3 * (ALIGNMENT_BYTES - 1)
    assert all((chunk.error_rows, chunk.numel) == (layout.num_blocks, numel) for chunk in chunks)


def test_chunks_are_of_about_equal_size() -> None:
    layout = layout_of(3 * 10_000, 3, [ParamSpan(0, 30_000, False)], LoCoConfig(bits=4, block_size=64))
    sizes = [chunk.send_bytes for chunk in split_layout(layout, 5)]
    # A border moves down by less than a block of each shard, which is 32 bytes of codes and 4 of scale; plus gaps.
    assert max(sizes) - min(sizes) <= 3 * (2 * 36 + 45)


def test_one_chunk_is_the_layout_itself() -> None:
    layout = layout_of(64, 2, [], LoCoConfig(bits=4))
    assert split_layout(layout, 1)[0] is layout
    with pytest.raises(ValueError, match="at least 1"):
        split_layout(layout, 0)


def test_number_of_chunks() -> None:
    layout = layout_of(2**17, 2, [ParamSpan(0, 2**17, False)], LoCoConfig(bits=4))
    assert layout.send_bytes == 2**16 + 2**17 // 256 * 4
    for chunk_bytes, expected in ((10**9, 1), (layout.send_bytes, 1), (layout.send_bytes - 1, 2), (1000, MAX_CHUNKS)):
        assert count_chunks([layout], chunk_bytes) == expected
    assert count_chunks([layout_of(2, 2, [], LoCoConfig(bits=4)), layout], layout.send_bytes // 3 - 1) == 4
    assert count_chunks([layout_of(2, 2, [], LoCoConfig(bits=4))], 100) == 1  # nothing is sent


def test_cost_counts_what_the_chunks_send() -> None:
    spans = spans_of(1200)
    for two_level in (False, True):
        plan: Any = {"two_level": two_level, "bits": 4, "block_size": 32, "exact_itemsize": 4}
        whole = plan_exchange(1200, [0, 0, 1, 1], spans, **plan)
        parts = plan_exchange(1200, [0, 0, 1, 1], spans, **plan, chunk_bytes=100)
        assert whole.num_chunks == 1
        assert parts.num_chunks > 3
        expected = [
            sum(chunk.wire_bytes for chunk in split_layout(layout, parts.num_chunks)) for layout in whole.layouts
        ]
        inner = whole.cost.inner_bytes
        assert parts.cost.sent_bytes == pytest.approx(sum(expected) / len(expected) + inner)
        assert parts.cost.sent_bytes > whole.cost.sent_bytes
        assert parts.cost.internode_bytes > whole.cost.internode_bytes
        assert parts.cost.elements == whole.cost.elements
        for rank in range(4):
            assert parts.chunks(rank) == split_layout(parts.layout(rank), parts.num_chunks)
    assert flat_exchange(whole.layouts[0]).num_chunks == 1
