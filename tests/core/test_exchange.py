"""Which elements travel where in two levels, element by element, and what flat and two-level reductions cost."""

from __future__ import annotations

import itertools

import pytest

from megatron_loco.core.exchange import Exchange, flat_exchange, plan_exchange, ring_cost
from megatron_loco.core.wire import ParamSpan, bucket_layout, node_spans

SHAPES = ((2, 2), (3, 2), (2, 3), (4, 8))
"""Nodes, and ranks on each."""


def spans_with_gaps(numel: int) -> list[ParamSpan]:
    """Parameters of growing odd sizes, some exact, with gaps; some lie in one shard, some in many."""
    spans, start, index = [], 0, 0
    while start < numel:
        stop = min(numel, start + 1 + 7 * index * index)
        spans.append(ParamSpan(start, stop, exact=index % 4 == 1))
        start = stop + index % 3
        index += 1
    return spans


def plan(numel: int, nodes: list[int], *, two_level: bool, block_size: int = 32) -> Exchange:
    spans = spans_with_gaps(numel)
    return plan_exchange(numel, nodes, spans, two_level=two_level, bits=4, block_size=block_size, exact_itemsize=4)


def on_nodes(num_nodes: int, size: int) -> list[int]:
    return [node for node in range(num_nodes) for _ in range(size)]


@pytest.mark.parametrize(("num_nodes", "size"), SHAPES)
def test_every_element_keeps_its_parameter(num_nodes: int, size: int) -> None:
    world_size = num_nodes * size
    for shard_numel in (1, 2, 31, 128):
        numel = world_size * shard_numel
        spans = spans_with_gaps(numel)
        # The index of the parameter of each element of the bucket.
        owner = [next((i for i, s in enumerate(spans) if s.start <= k < s.stop), None) for k in range(numel)]
        for position in range(size):
            pieces = node_spans(numel, num_nodes, size, position, spans)
            # What the rank of this position holds: the shard of that position of each node, side by side.
            held = [
                owner[(node * size + position) * shard_numel + k]
                for node in range(num_nodes)
                for k in range(shard_numel)
            ]
            exact = [None if i is None else spans[i].exact for i in held]
            laid_out: list[bool | None] = [None] * len(held)
            for piece in pieces:
                assert set(laid_out[piece.start : piece.stop]) == {None}
                laid_out[piece.start : piece.stop] = [piece.exact] * (piece.stop - piece.start)
                # One parameter, in one shard: blocks start anew at each.
                assert len(set(held[piece.start : piece.stop])) == 1
                assert piece.start // shard_numel == (piece.stop - 1) // shard_numel
            assert laid_out == exact


def test_spans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="10 elements cannot be sharded over 4 ranks"):
        node_spans(10, 2, 2, 0, [])
    for span in (ParamSpan(0, 9, False), ParamSpan(-1, 3, False)):
        with pytest.raises(ValueError, match="leaves a bucket of 8"):
            node_spans(8, 2, 2, 0, [span])
    spans = [ParamSpan(0, 5, False), ParamSpan(4, 8, False)]
    with pytest.raises(ValueError, match="overlaps"):
        plan_exchange(8, [0, 0, 1, 1], spans, two_level=True, bits=4, block_size=32, exact_itemsize=4)


@pytest.mark.parametrize(("num_nodes", "size"), SHAPES)
def test_two_levels_send_the_same_payloads_a_gth_as_often(num_nodes: int, size: int) -> None:
    world_size = num_nodes * size
    for shard_numel in (1, 2, 31, 1000):
        numel, nodes = world_size * shard_numel, on_nodes(num_nodes, size)
        flat, two_level = plan(numel, nodes, two_level=False), plan(numel, nodes, two_level=True)
        assert (flat.inner_size, two_level.inner_size) == (1, size)
        assert (flat.is_two_level, two_level.is_two_level) == (False, True)
        for rank in range(world_size):
            shard = flat.layout(rank).shards[rank]
            partial = two_level.layout(rank).shards[rank // size]
            assert (shard.payload_bytes, shard.num_blocks) == (partial.payload_bytes, partial.num_blocks)
            assert shard.num_exact == partial.num_exact
        # Exactly, not nearly: between nodes a gth of the bytes, and a gth of the error to keep.
        assert two_level.cost.internode_bytes * size == pytest.approx(flat.cost.internode_bytes, rel=4 * 2**-53)
        assert sum(layout.num_blocks for layout in two_level.layouts) == flat.layouts[0].num_blocks


@pytest.mark.parametrize(("num_nodes", "size"), SHAPES)
@pytest.mark.parametrize("two_level", [False, True])
def test_costs_are_the_bytes_of_each_pair_of_ranks(num_nodes: int, size: int, two_level: bool) -> None:
    world_size, nodes = num_nodes * size, on_nodes(num_nodes, size)
    exchange = plan(77 * world_size, nodes, two_level=two_level)
    sent = internode = 0
    for sender, receiver in itertools.permutations(range(world_size), 2):
        if two_level and sender % size != receiver % size:
            continue
        layout = exchange.layout(sender)
        size_bytes = layout.send_splits[receiver // size if two_level else receiver]
        sent += size_bytes
        internode += size_bytes if nodes[sender] != nodes[receiver] else 0
    cost = exchange.cost
    # In the first hop a rank sends all but its own part of the fp32 bucket, once.
    inner = 4 * exchange.numel * (size - 1) / size if two_level else 0
    assert cost.inner_bytes == inner
    assert cost.sent_bytes - inner == pytest.approx(sent / world_size, rel=1e-14)
    assert cost.internode_bytes == pytest.approx(internode / world_size, rel=1e-14)
    if two_level:
        assert cost.internode_bytes == pytest.approx(cost.sent_bytes - inner, rel=1e-14)
    elements_sent = exchange.numel / size if two_level else exchange.numel
    peers = num_nodes if two_level else world_size
    assert cost.elements == pytest.approx(elements_sent * (peers - 1) / peers, rel=1e-14)


def test_flat_with_uneven_nodes() -> None:
    # Payloads of 16 (codes) + 16 (scales) bytes each; node 0 has one rank, node 1 two. To other nodes: rank 0 sends two
    # payloads, ranks 1 and 2 one each, which is 4 / 3 payloads per rank.
    layout = bucket_layout(96, 3, [ParamSpan(0, 96, False)], bits=4, block_size=32, exact_itemsize=4)
    cost = flat_exchange(layout, [0, 1, 1]).cost
    assert (cost.sent_bytes, cost.inner_bytes) == (2 * 32, 0)
    assert cost.internode_bytes == pytest.approx(32 * 4 / 3, rel=1e-15)
    assert cost.elements == 64
    # Not known: nothing counts as leaving.
    assert flat_exchange(layout).cost.internode_bytes == 0


def test_ring() -> None:
    # 8 ranks send 7/8 of 800 elements of 2 bytes each; of the 8 links, 2 join nodes, or 4, or none.
    assert ring_cost(800, on_nodes(2, 4), 2).sent_bytes == 1400
    assert ring_cost(800, on_nodes(2, 4), 2).internode_bytes == 1400 * 2 / 8
    assert ring_cost(800, on_nodes(4, 2), 2).internode_bytes == 1400 * 4 / 8
    assert ring_cost(800, on_nodes(1, 8), 2).internode_bytes == 0
    # An order in which nodes alternate does not make the ring cross more often: NCCL orders it by node.
    assert ring_cost(800, [0, 1] * 4, 2).internode_bytes == 1400 * 2 / 8
    twice = ring_cost(800, on_nodes(2, 4), 4, passes=2)
    assert (twice.sent_bytes, twice.internode_bytes, twice.elements) == (5600, 1400, 1400)


def test_equal_on_all_ranks_and_hashable() -> None:
    one, same = plan(640, on_nodes(2, 2), two_level=True), plan(640, on_nodes(2, 2), two_level=True)
    assert one == same
    assert hash(one) == hash(same)
    flat = plan(640, on_nodes(2, 2), two_level=False)
    assert len({one, flat, plan(640, on_nodes(4, 1), two_level=False)}) == 3
