"""Byte layout of what one rank sends; the only place that computes offsets.

A bucket of ``numel`` elements is owned in ``world_size`` equal shards. Rank ``i`` sends to rank ``j`` the payload of
shard ``j``::

    [ codes | scales | exact values ]        each region starts at a multiple of 16 bytes

``codes``: the blocks of the shard's quantised elements, packed (:func:`megatron_loco.core.quantize.pack_codes`);
``scales``: one fp32 per block; ``exact values``: elements of exact parameters in the dtype of the bucket.

Rules:

* A block never crosses a shard (its owner sums it alone) nor a parameter (parameters differ in magnitude). The last
  block of a parameter's piece may be partial; it travels as a whole block whose tail codes are 0.
* Elements that no parameter covers are padding: they are not read and not sent, whatever they hold, and come out as 0.
* The layout follows from configuration and shapes alone, so that every rank of a group computes the same one. Payloads
  of different shards may differ in size; all that a rank receives have the size of its own shard's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

SCALE_BYTES = 4
ALIGNMENT_BYTES = 16
"""Widest load and store of the devices in question (128 bits)."""


@dataclass(frozen=True)
class ParamSpan:
    """Where a parameter lies in its bucket: elements ``start`` to ``stop - 1``; ``exact`` ones travel unquantised."""

    start: int
    stop: int
    exact: bool


@dataclass(frozen=True)
class BlockRun:
    """Consecutive quantised elements ``start`` to ``stop - 1`` of a bucket, cut into blocks from ``start`` on.

    ``first_block`` is the index of the first of its blocks in the bucket (the row of the error state).
    """

    start: int
    stop: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class ShardLayout:
    """One shard, or in a chunk a part of it, and the payload that every rank sends to its owner.

    Offsets are bytes from the payload's start; elements are those of the bucket.
    """

    start: int
    stop: int
    runs: tuple[BlockRun, ...]
    exact: tuple[tuple[int, int], ...]
    padding: tuple[tuple[int, int], ...]
    first_block: int
    num_blocks: int
    scales_offset: int
    exact_offset: int
    payload_bytes: int

    @property
    def num_exact(self) -> int:
        """Elements that travel unquantised."""
        return sum(stop - start for start, stop in self.exact)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of all shards of a bucket (:func:`bucket_layout`), or of one chunk of them
    (:func:`megatron_loco.core.chunks.split_layout`).

    Attributes:
        numel: Elements of the whole bucket.
        world_size: Ranks of the group.
        bits: Width of a code.
        block_size: Elements that share a scale.
        exact_itemsize: Bytes of an element that travels unquantised.
        shards: What each rank owns of the bucket or of the chunk.
        error_rows: Blocks of the whole bucket: the rows of its error state.
    """

    numel: int
    world_size: int
    bits: int
    block_size: int
    exact_itemsize: int
    shards: tuple[ShardLayout, ...]
    error_rows: int

    @property
    def code_block_bytes(self) -> int:
        """Bytes of one packed block."""
        return self.block_size * self.bits // 8

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of all shards together."""
        return sum(shard.num_blocks for shard in self.shards)

    @property
    def shard_numel(self) -> int:
        """Elements of the bucket that a rank owns; the shard of ``rank`` starts at ``rank * shard_numel``."""
        return self.numel // self.world_size

    @cached_property
    def send_splits(self) -> list[int]:
        """Bytes that go to each rank, in rank order; together one send buffer."""
        return [shard.payload_bytes for shard in self.shards]

    @cached_property
    def send_offsets(self) -> list[int]:
        """Start of each rank's payload in the send buffer, in bytes."""
        return [0, *accumulate(self.send_splits)][:-1]

    @cached_property
    def send_bytes(self) -> int:
        """Size of the send buffer in bytes, this rank's own shard included."""
        return sum(self.send_splits)

    def recv_bytes(self, rank: int) -> int:
        """Size of the receive buffer of ``rank`` in bytes: one payload of its shard from every rank."""
        return self.world_size * self.shards[rank].payload_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that cross the network per rank and reduction, averaged over the group: equal on all ranks.

        A rank sends every payload but its own: ``(world_size - 1) / world_size`` of the send buffer on average.
        """
        return self.send_bytes * (self.world_size - 1) / self.world_size

    def ring_bytes(self, itemsize: int) -> float:
        """What a ring reduce-scatter of elements of ``itemsize`` bytes would move per rank."""
        return self.numel * itemsize * (self.world_size - 1) / self.world_size


def bucket_layout(
    numel: int,
    world_size: int,
    params: Iterable[ParamSpan],
    *,
    bits: int,
    block_size: int,
    exact_itemsize: int,
) -> BucketLayout:
    """Lay a bucket out.

    Args:
        numel: Elements of the bucket, padding included; divisible by ``world_size``.
        world_size: Ranks of the group that reduces the bucket.
        params: Where each parameter lies, without overlap, in any order; what they leave out is padding.
        bits: Width of a code: 1, 2, 4 or 8; 32 if every parameter is exact.
        block_size: Elements that share a scale, a multiple of 32.
        exact_itemsize: Bytes of an element that travels unquantised (the dtype of the bucket).

    Raises:
        ValueError: ``numel`` is not divisible, parameters overlap or leave the bucket, or some are to be quantised to a
            width that no code has (32 bits carry exact values only).
    """
    if numel % world_size:
        raise ValueError(f"a bucket of {numel} elements cannot be sharded over {world_size} ranks")
    spans = sorted((span for span in params if span.stop != span.start), key=lambda span: span.start)
    end = 0
    for span in spans:
        if bits > 8 and not span.exact:
            raise ValueError(f"parameter at {span.start}:{span.stop} cannot be quantised to {bits} bits; mark it exact")
        if span.start < end or span.stop > numel or span.stop < span.start:
            raise ValueError(f"parameter at {span.start}:{span.stop} overlaps another or leaves a bucket of {numel}")
        end = span.stop
    shard_numel = numel // world_size
    shards: list[ShardLayout] = []
    first_block = 0
    for rank in range(world_size):
        shard = _shard_layout(
            rank * shard_numel,
            (rank + 1) * shard_numel,
            spans,
            first_block,
            code_block_bytes=block_size * bits // 8,
            block_size=block_size,
            exact_itemsize=exact_itemsize,
        )
        shards.append(shard)
        first_block += shard.num_blocks
    return BucketLayout(numel, world_size, bits, block_size, exact_itemsize, tuple(shards), first_block)


def node_spans(
    numel: int, num_nodes: int, ranks_per_node: int, local_rank: int, params: Iterable[ParamSpan]
) -> list[ParamSpan]:
    """Parameters as they lie in the partial sums that one rank of each node holds in a two-level reduction.

    Rank ``k = i * ranks_per_node + j`` of the group is the ``j``-th of node ``i``. Inside each node, the ``j``-th rank
    sums shard ``i * ranks_per_node + j`` of every node ``i``: ``num_nodes`` shards, put together in node order. They
    are a bucket of their own, of ``numel / ranks_per_node`` elements over ``num_nodes`` ranks.

    Args:
        numel: Elements of the whole bucket, padding included.
        num_nodes: Nodes of the group.
        ranks_per_node: Ranks of the group on each node.
        local_rank: ``j``.
        params: Where each parameter lies in the whole bucket.

    Returns:
        Spans for :func:`bucket_layout` with ``numel // ranks_per_node`` and ``num_nodes``. A parameter that several of
        the shards hold a piece of has as many spans.

    Raises:
        ValueError: ``numel`` is not divisible by the number of ranks, or a parameter leaves the bucket.
    """
    if numel % (num_nodes * ranks_per_node):
        raise ValueError(f"a bucket of {numel} elements cannot be sharded over {num_nodes * ranks_per_node} ranks")
    shard_numel = numel // (num_nodes * ranks_per_node)
    params = list(params)
    outside = next((span for span in params if span.start < 0 or span.stop > numel), None)
    if outside:
        raise ValueError(f"parameter at {outside.start}:{outside.stop} leaves a bucket of {numel}")
    pieces = []
    for node in range(num_nodes):
        start = (node * ranks_per_node + local_rank) * shard_numel
        moved_by = node * shard_numel - start
        for span in params:
            piece_start, piece_stop = max(span.start, start), min(span.stop, start + shard_numel)
            if piece_start < piece_stop:
                pieces.append(ParamSpan(piece_start + moved_by, piece_stop + moved_by, span.exact))
    return pieces


def _shard_layout(
    start: int,
    stop: int,
    spans: Sequence[ParamSpan],
    first_block: int,
    *,
    code_block_bytes: int,
    block_size: int,
    exact_itemsize: int,
) -> ShardLayout:
    pieces = [
        ParamSpan(max(span.start, start), min(span.stop, stop), span.exact)
        for span in spans
        if span.start < stop and span.stop > start
    ]
    return place_regions(
        start,
        stop,
        _block_runs([p for p in pieces if not p.exact], first_block, block_size),
        tuple((p.start, p.stop) for p in pieces if p.exact),
        _gaps(start, stop, pieces),
        first_block,
        code_block_bytes=code_block_bytes,
        exact_itemsize=exact_itemsize,
    )


def place_regions(
    start: int,
    stop: int,
    runs: tuple[BlockRun, ...],
    exact: tuple[tuple[int, int], ...],
    padding: tuple[tuple[int, int], ...],
    first_block: int,
    *,
    code_block_bytes: int,
    exact_itemsize: int,
) -> ShardLayout:
    """Lay out the payload of elements ``start`` to ``stop - 1``, which ``runs``, ``exact`` and ``padding`` make up."""
    num_blocks = sum(run.num_blocks for run in runs)
    scales_offset = _align(num_blocks * code_block_bytes)
    exact_offset = _align(scales_offset + num_blocks * SCALE_BYTES)
    num_exact = sum(b - a for a, b in exact)
    return ShardLayout(
        start=start,
        stop=stop,
        runs=runs,
        exact=exact,
        padding=padding,
        first_block=first_block,
        num_blocks=num_blocks,
        scales_offset=scales_offset,
        exact_offset=exact_offset,
        payload_bytes=_align(exact_offset + num_exact * exact_itemsize),
    )


def _block_runs(pieces: Sequence[ParamSpan], first_block: int, block_size: int) -> tuple[BlockRun, ...]:
    runs: list[BlockRun] = []
    for piece in pieces:
        blocks = -(-(piece.stop - piece.start) // block_size)
        last = runs[-1] if runs else None
        # Pieces that follow each other at a block boundary become one run: the same blocks, fewer launches.
        if last and last.stop == piece.start and (last.stop - last.start) % block_size == 0:
            runs[-1] = BlockRun(last.start, piece.stop, last.first_block, last.num_blocks + blocks)
        else:
            runs.append(BlockRun(piece.start, piece.stop, first_block, blocks))
        first_block += blocks
    return tuple(runs)


def _gaps(start: int, stop: int, pieces: Sequence[ParamSpan]) -> tuple[tuple[int, int], ...]:
    borders = [start, *(b for piece in pieces for b in (piece.start, piece.stop)), stop]
    return tuple((a, b) for a, b in zip(borders[::2], borders[1::2], strict=True) if b > a)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
