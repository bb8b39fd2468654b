"""The byte layout, element by element: each is in exactly one place, and no block or byte is shared by two owners."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from megatron_loco.core.wire import (
    ALIGNMENT_BYTES,
    SCALE_BYTES,
    BucketLayout,
    ParamSpan,
    ShardLayout,
    bucket_layout,
)

WORLD_SIZES = (1, 2, 3, 4, 64, 128, 256)
BLOCK_SIZES = (32, 128, 256)


def numels(world_size: int) -> list[int]:
    """Shards of one element, of odd and prime sizes, and sizes that Megatron's padding to lcm(ranks, 128) gives."""
    sizes = [*(n * world_size for n in (1, 2, 127)), 128, 384, 1021 * world_size, -(-4224 // world_size) * world_size]
    return [numel for numel in sizes if numel % world_size == 0]


def random_spans(numel: int, seed: int) -> list[ParamSpan]:
    """Parameters of sizes from 1 to the whole bucket, some side by side and some with gaps, shuffled."""
    source = random.Random(seed)
    spans = []
    start = source.choice((0, 0, source.randrange(numel)))
    largest = source.choice((3, 64, 300, numel))
    while start < numel:
        # Multiples of 256 are the usual case: runs of several parameters merge there.
        length = source.choice((source.randint(1, largest), 256 * source.randint(1, 4)))
        stop = min(numel, start + length)
        spans.append(ParamSpan(start, stop, exact=source.random() < 0.3))
        start = stop + source.choice((0, 0, 0, 1, source.randint(1, 100)))
    source.shuffle(spans)
    return spans


def blocks_of(shard: ShardLayout, block_size: int) -> Iterator[tuple[int, int, int]]:
    """``(index in the bucket, start, stop)`` of each block, from the runs."""
    for run in shard.runs:
        for k in range(run.num_blocks):
            start = run.start + k * block_size
            yield run.first_block + k, start, min(run.stop, start + block_size)


def expected_blocks(shard_start: int, shard_stop: int, spans: Sequence[ParamSpan], size: int) -> list[tuple[int, int]]:
    """The rule in its most literal form: cut every parameter's piece in the shard from its start."""
    blocks = []
    for span in sorted(spans, key=lambda span: span.start):
        start, stop = max(span.start, shard_start), min(span.stop, shard_stop)
        if not span.exact:
            blocks += [(a, min(a + size, stop)) for a in range(start, stop, size)]
    return blocks


def align(num_bytes: int) -> int:
    while num_bytes % 16:
        num_bytes += 1
    return num_bytes


def check(layout: BucketLayout, spans: Sequence[ParamSpan]) -> None:
    block_size, bits, world_size = layout.block_size, layout.bits, layout.world_size
    parameter_of: list[int | None] = [None] * layout.numel
    for number, span in enumerate(spans):
        for i in range(span.start, span.stop):
            parameter_of[i] = number
    seen = [0] * layout.numel
    next_block = 0
    assert len(layout.shards) == world_size
    for rank, shard in enumerate(layout.shards):
        assert (shard.start, shard.stop) == (rank * layout.numel // world_size, (rank + 1) * layout.numel // world_size)
        assert shard.first_block == next_block

        blocks = list(blocks_of(shard, block_size))
        assert [(start, stop) for _, start, stop in blocks] == expected_blocks(
            shard.start, shard.stop, spans, block_size
        )
        assert [index for index, _, _ in blocks] == list(range(next_block, next_block + shard.num_blocks))
        assert shard.num_blocks == sum(run.num_blocks for run in shard.runs) == len(blocks)
        for _, start, stop in blocks:
            assert shard.start <= start < stop <= shard.stop
            assert stop - start <= block_size
            owners = {parameter_of[i] for i in range(start, stop)}
            assert len(owners) == 1
            (owner,) = owners
            assert owner is not None
            assert not spans[owner].exact
            for i in range(start, stop):
                seen[i] += 1
        next_block += shard.num_blocks
        # Runs do not overlap and do not lie side by side where they could have been one.
        for run in shard.runs:
            assert run.num_blocks == -(-(run.stop - run.start) // block_size)

        for start, stop in shard.exact:
            assert shard.start <= start < stop <= shard.stop
            for i in range(start, stop):
                owner = parameter_of[i]
                assert owner is not None
                assert spans[owner].exact
                seen[i] += 1
        assert list(shard.exact) == sorted(shard.exact)
        assert shard.num_exact == sum(stop - start for start, stop in shard.exact)

        padding = {i for start, stop in shard.padding for i in range(start, stop)}
        assert sum(stop - start for start, stop in shard.padding) == len(padding)
        assert padding == {i for i in range(shard.start, shard.stop) if parameter_of[i] is None}

        # Regions: in this order, aligned, without overlap, and the payload ends at the first boundary behind the last.
        code_bytes = shard.num_blocks * layout.code_block_bytes
        assert shard.scales_offset == align(code_bytes)
        assert shard.exact_offset == align(shard.scales_offset + shard.num_blocks * SCALE_BYTES)
        assert shard.payload_bytes == align(shard.exact_offset + shard.num_exact * layout.exact_itemsize)
    assert ALIGNMENT_BYTES == 16
    assert [count for count, parameter in zip(seen, parameter_of, strict=True) if parameter is not None] == [1] * sum(
        parameter is not None for parameter in parameter_of
    )
    assert all(count == 0 for count, parameter in zip(seen, parameter_of, strict=True) if parameter is None)

    assert layout.code_block_bytes * 8 == block_size * bits
    assert layout.num_blocks == next_block
    assert layout.send_splits == [shard.payload_bytes for shard in layout.shards]
    assert layout.send_bytes == sum(layout.send_splits)
    assert layout.send_offsets == [sum(layout.send_splits[:rank]) for rank in range(world_size)]
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in layout.send_offsets)
    for rank in range(world_size):
        # Everybody sends rank the payload of its shard: what arrives is as large as what is expected.
        assert layout.recv_bytes(rank) == world_size * layout.send_splits[rank]
    # Averaged over the group: rank sends all but its own payload.
    sent = [layout.send_bytes - layout.send_splits[rank] for rank in range(world_size)]
    assert layout.wire_bytes == pytest.approx(sum(sent) / world_size, rel=1e-12)


@pytest.mark.kind(17)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_element_has_exactly_one_place(world_size: int, block_size: int) -> None:
    for numel in numels(world_size):
        # The large buckets once, the small ones with several divisions.
        for seed in range(1 if numel > 50_000 else 4):
            spans = random_spans(numel, seed)
            bits, itemsize = ((4, 4), (8, 2), (4, 2), (8, 4))[(seed + world_size) % 4]
            layout = bucket_layout(numel, world_size, spans, bits=bits, block_size=block_size, exact_itemsize=itemsize)
            check(layout, spans)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_order_of_the_parameters_does_not_matter(world_size: int) -> None:
    numel = 3072 * world_size
    spans = random_spans(numel, seed=11)
    settings = {"bits": 4, "block_size": 32, "exact_itemsize": 4}
    layout = bucket_layout(numel, world_size, spans, **settings)
    assert bucket_layout(numel, world_size, reversed(spans), **settings) == layout
    assert bucket_layout(numel, world_size, iter(sorted(spans, key=lambda s: s.start)), **settings) == layout


def test_parameters_that_meet_at_a_block_boundary_share_a_run_and_no_block() -> None:
    # 256 + 64 + 30 quantised elements side by side, then 10 that follow a partial block.
    spans = [
        ParamSpan(0, 256, False),
        ParamSpan(256, 320, False),
        ParamSpan(320, 350, False),
        ParamSpan(350, 360, False),
    ]
    (shard,) = bucket_layout(360, 1, spans, bits=4, block_size=32, exact_itemsize=4).shards
    assert [(run.start, run.stop, run.first_block, run.num_blocks) for run in shard.runs] == [
        (0, 350, 0, 11),
        (350, 360, 11, 1),
    ]
    # One parameter instead of three gives the same blocks.
    merged = [ParamSpan(0, 350, False), ParamSpan(350, 360, False)]
    assert bucket_layout(360, 1, merged, bits=4, block_size=32, exact_itemsize=4).shards == (shard,)


def test_gap_exact_range_and_shard_border_end_a_run() -> None:
    spans = [ParamSpan(0, 64, False), ParamSpan(65, 129, False), ParamSpan(129, 140, True), ParamSpan(140, 400, False)]
    first, second = bucket_layout(400, 2, spans, bits=4, block_size=32, exact_itemsize=2).shards
    assert [(run.start, run.stop) for run in first.runs] == [(0, 64), (65, 129), (140, 200)]
    assert first.exact == ((129, 140),)
    assert first.padding == ((64, 65),)
    assert [(run.start, run.stop) for run in second.runs] == [(200, 400)]


def test_sizes_literally() -> None:
    # Per shard 512 elements in 2 blocks of 256: 256 bytes of codes, 8 of scales padded to 16; nothing exact.
    layout = bucket_layout(2048, 4, [ParamSpan(0, 2048, False)], bits=4, block_size=256, exact_itemsize=2)
    assert layout.send_splits == [272] * 4
    assert layout.wire_bytes == 3 * 272
    assert layout.ring_bytes(2) == 2048 * 2 * 3 / 4
    # An exact parameter of 5 bf16 elements adds 10 bytes, padded to 16, to its owner's payload alone.
    spans = [ParamSpan(0, 2043, False), ParamSpan(2043, 2048, True)]
    layout = bucket_layout(2048, 4, spans, bits=4, block_size=256, exact_itemsize=2)
    assert layout.send_splits == [272, 272, 272, 272 + 16]
    # One rank sends nothing.
    alone = bucket_layout(2048, 1, spans, bits=4, block_size=256, exact_itemsize=2)
    assert alone.wire_bytes == 0
    assert alone.ring_bytes(2) == 0


@pytest.mark.kind(17)
def test_shard_of_padding_alone_has_an_empty_payload() -> None:
    layout = bucket_layout(384, 3, [ParamSpan(0, 128, False)], bits=4, block_size=32, exact_itemsize=4)
    assert layout.send_splits[1:] == [0, 0]
    assert layout.shards[2].padding == ((256, 384),)
    check(layout, [ParamSpan(0, 128, False)])
    nothing = bucket_layout(384, 3, [], bits=4, block_size=32, exact_itemsize=4)
    assert nothing.send_bytes == nothing.num_blocks == 0
    check(nothing, [])


def test_identity_codec_has_exact_values_alone() -> None:
    layout = bucket_layout(300, 3, [ParamSpan(0, 250, True)], bits=32, block_size=256, exact_itemsize=4)
    assert layout.num_blocks == 0
    assert layout.send_splits == [400, 400, 208]
    assert [shard.exact_offset for shard in layout.shards] == [0, 0, 0]


@pytest.mark.kind(17)
@pytest.mark.parametrize(
    ("numel", "world_size", "spans"),
    [
        (100, 3, []),  # not divisible
        (1, 2, []),
        (100, 2, [ParamSpan(0, 101, False)]),  # leaves the bucket
        (100, 2, [ParamSpan(-1, 10, False)]),
        (100, 2, [ParamSpan(0, 50, False), ParamSpan(49, 60, True)]),  # overlap
        (100, 2, [ParamSpan(40, 60, False), ParamSpan(40, 60, False)]),
        (100, 2, [ParamSpan(10, 20, False), ParamSpan(0, 100, True)]),
        (100, 2, [ParamSpan(20, 10, False)]),  # stops before it starts
    ],
)
def test_impossible_buckets_are_refused(numel: int, world_size: int, spans: list[ParamSpan]) -> None:
    with pytest.raises(ValueError, match=str(numel)):
        bucket_layout(numel, world_size, spans, bits=4, block_size=32, exact_itemsize=4)


def test_quantised_parameters_need_a_quantised_width() -> None:
    # 32 bits carry exact values only: no code of 32 bits exists.
    with pytest.raises(ValueError, match="32"):
        bucket_layout(100, 2, [ParamSpan(0, 100, False)], bits=32, block_size=32, exact_itemsize=4)


def test_empty_parameters_are_allowed() -> None:
    spans = [ParamSpan(0, 50, False), ParamSpan(50, 50, True), ParamSpan(50, 100, False)]
    check(bucket_layout(100, 2, spans, bits=4, block_size=32, exact_itemsize=4), spans)
