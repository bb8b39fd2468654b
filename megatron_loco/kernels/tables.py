"""Where everything lies, as arrays of numbers that a kernel can walk: one launch per bucket, however many parameters.

All numbers are int64: neither elements nor bytes of a bucket need fit in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_loco.core.wire import SCALE_BYTES, BucketLayout, ShardLayout

RUN_COLUMNS = ("element", "numel", "position", "num_blocks", "row", "codes", "scales")
EXACT_COLUMNS = ("element", "numel", "values")
ZERO_COLUMNS = ("start", "length")


@dataclass(frozen=True)
class Table:
    """One encode of a layout, or one decode of it on a rank.

    Attributes:
        runs: int64 ``[num_runs, 7]``, :data:`RUN_COLUMNS`: first element (in the gradients, or in the output), number
            of elements, number of blocks in the runs before it, number of blocks, row of the error state of its first
            block, and the bytes at which its codes and scales start (in the send buffer, or in a payload).
        exact: int64 ``[num_exact_ranges, 3]``, :data:`EXACT_COLUMNS`: first element, number of elements, byte at which
            the values start.
        zeros: int64 ``[num_gaps, 2]``, :data:`ZERO_COLUMNS`: what is to be filled with zero: byte and number of bytes
            between the regions of the send buffer, or element and number of elements of the output (padding).
        num_blocks: Blocks of all runs together.
    """

    runs: Tensor
    exact: Tensor
    zeros: Tensor
    num_blocks: int


class PerLayout[T]:
    """What a backend needs to know of each layout that it meets, made once.

    Args:
        make: Makes it for an encode of a layout (rank -1), or for a decode on a rank.
    """

    def __init__(self, make: Callable[[BucketLayout, int], T]) -> None:
        self._make = make
        # By identity: comparing layouts of hundreds of ranks would cost more than a launch. The layout is kept, so that
        # no other one can have its address.
        self._made: dict[tuple[int, int], tuple[BucketLayout, T]] = {}

    def encode(self, layout: BucketLayout) -> T:
        """For an encode."""
        return self._get(layout, -1)

    def decode(self, layout: BucketLayout, rank: int) -> T:
        """For a decode on ``rank``."""
        return self._get(layout, rank)

    def _get(self, layout: BucketLayout, rank: int) -> T:
        key = id(layout), rank
        if key not in self._made:
            self._made[key] = layout, self._make(layout, rank)
        return self._made[key][1]


def make_table(layout: BucketLayout, rank: int) -> Table:
    """The table of an encode (rank -1) or of a decode on ``rank``."""
    return encode_table(layout) if rank < 0 else decode_table(layout, rank)


def encode_table(layout: BucketLayout) -> Table:
    """Return the table of an encode, on the CPU. Bytes count from the start of the send buffer."""
    runs: list[tuple[int, ...]] = []
    exact: list[tuple[int, ...]] = []
    zeros: list[tuple[int, ...]] = []
    position = 0
    for shard, base in zip(layout.shards, layout.send_offsets, strict=True):
        position = _add_shard(runs, exact, layout, shard, base=base, origin=0, position=position)
        zeros += [(base + start, stop - start) for start, stop in payload_gaps(layout, shard) if stop > start]
    return _table(runs, exact, zeros, position)


def decode_table(layout: BucketLayout, rank: int) -> Table:
    """Return the table of a decode on ``rank``, on the CPU. Bytes count from the start of each payload."""
    runs: list[tuple[int, ...]] = []
    exact: list[tuple[int, ...]] = []
    shard = layout.shards[rank]
    origin = rank * layout.shard_numel
    num_blocks = _add_shard(runs, exact, layout, shard, base=0, origin=origin, position=0)
    zeros: list[tuple[int, ...]] = [(start - origin, stop - start) for start, stop in shard.padding]
    return _table(runs, exact, zeros, num_blocks)


def payload_gaps(layout: BucketLayout, shard: ShardLayout) -> list[tuple[int, int]]:
    """Bytes between the regions of a payload, first to last; they are zero, so that equal values give equal bytes."""
    return [
        (shard.num_blocks * layout.code_block_bytes, shard.scales_offset),
        (shard.scales_offset + shard.num_blocks * SCALE_BYTES, shard.exact_offset),
        (shard.exact_offset + shard.num_exact * layout.exact_itemsize, shard.payload_bytes),
    ]


def _add_shard(
    runs: list[tuple[int, ...]],
    exact: list[tuple[int, ...]],
    layout: BucketLayout,
    shard: ShardLayout,
    *,
    base: int,
    origin: int,
    position: int,
) -> int:
    # Returns the position behind the shard.
    for run in shard.runs:
        before = run.first_block - shard.first_block
        runs.append(
            (
                run.start - origin,
                run.stop - run.start,
                position,
                run.num_blocks,
                run.first_block,
                base + before * layout.code_block_bytes,
                base + shard.scales_offset + before * SCALE_BYTES,
            )
        )
        position += run.num_blocks
    values = base + shard.exact_offset
    for start, stop in shard.exact:
        exact.append((start - origin, stop - start, values))
        values += (stop - start) * layout.exact_itemsize
    return position


def _table(
    runs: list[tuple[int, ...]], exact: list[tuple[int, ...]], zeros: list[tuple[int, ...]], num_blocks: int
) -> Table:
    return Table(
        torch.tensor(runs, dtype=torch.int64).view(-1, len(RUN_COLUMNS)),
        torch.tensor(exact, dtype=torch.int64).view(-1, len(EXACT_COLUMNS)),
        torch.tensor(zeros, dtype=torch.int64).view(-1, len(ZERO_COLUMNS)),
        num_blocks,
    )
