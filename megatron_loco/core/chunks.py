"""Chunks of a bucket, which are encoded, sent and decoded one after the other while others are on their way.

A chunk holds a part of every shard, so that each chunk is an all-to-all of its own. Shards are cut between blocks: the
same elements share a scale, and a block has the same row of the error state, whatever the number of chunks. Hence the
results are the same, bit for bit; only the gaps between the regions of a payload add a few bytes per chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_loco.core.wire import BlockRun, BucketLayout, ShardLayout, place_regions

MAX_CHUNKS = 64


def count_chunks(layouts: Iterable[BucketLayout], chunk_bytes: int) -> int:
    """Return how many chunks of about ``chunk_bytes`` a rank cuts its largest send buffer into, at most
    :data:`MAX_CHUNKS`."""
    largest = max(layout.send_bytes for layout in layouts)
    return min(max(1, -(-largest // chunk_bytes)), MAX_CHUNKS)


def split_layout(layout: BucketLayout, num_chunks: int) -> tuple[BucketLayout, ...]:
    """Cut a layout into chunks of about equal numbers of elements.

    Args:
        layout: Of a whole bucket.
        num_chunks: At least 1, which returns the layout itself.

    Returns:
        ``num_chunks`` layouts. Elements, blocks and rows are numbered as in the bucket; offsets of bytes are those of
        the chunk's own send and receive buffers. Chunks of a small bucket may be empty.

    Raises:
        ValueError: ``num_chunks`` is less than 1.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1, got {num_chunks}")
    if num_chunks == 1:
        return (layout,)
    parts = [_split_shard(layout, shard, num_chunks) for shard in layout.shards]
    return tuple(replace(layout, shards=tuple(part[index] for part in parts)) for index in range(num_chunks))


def _split_shard(layout: BucketLayout, shard: ShardLayout, num_chunks: int) -> list[ShardLayout]:
    numel = shard.stop - shard.start
    borders = [_border(layout, shard, shard.start + numel * index // num_chunks) for index in range(num_chunks)]
    parts = []
    first_block = shard.first_block
    for start, stop in zip(borders, [*borders[1:], shard.stop], strict=True):
        runs = tuple(_cut_runs(shard.runs, start, stop, layout.block_size))
        part = place_regions(
            start,
            stop,
            runs,
            _cut(shard.exact, start, stop),
            _cut(shard.padding, start, stop),
            first_block,
            code_block_bytes=layout.code_block_bytes,
            exact_itemsize=layout.exact_itemsize,
        )
        first_block += part.num_blocks
        parts.append(part)
    return parts


def _border(layout: BucketLayout, shard: ShardLayout, element: int) -> int:
    # Down to the start of the block that holds the element; exact values and padding can be cut anywhere.
    for run in shard.runs:
        if run.start <= element < run.stop:
            return element - (element - run.start) % layout.block_size
    return element


def _cut_runs(runs: Iterable[BlockRun], start: int, stop: int, block_size: int) -> Iterable[BlockRun]:
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            skipped = (first - run.start) // block_size
            yield BlockRun(first, last, run.first_block + skipped, -(-(last - first) // block_size))


def _cut(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    cut = ((max(first, start), min(last, stop)) for first, last in ranges)
    return tuple((first, last) for first, last in cut if first < last)
