"""Between which ranks the pieces of a bucket travel, flat or in two levels, and how many bytes that costs.

Flat: every rank encodes the whole bucket and sends each other rank the payload of its shard.

Two-level, for a group with ``g`` ranks on each of ``n`` nodes, rank ``k = i * g + j`` being the ``j``-th of node ``i``:

1. Inside each node, exactly: the ``j``-th rank sums shard ``i * g + j`` of every node ``i`` over the node's ranks. The
   shards of one node are contiguous, so that this is ``n`` ordinary reduce-scatters and no permutation.
2. Between nodes, encoded: the ``n`` ranks that are ``j``-th on their node exchange payloads of these partial sums. For
   them the partial sums are a bucket of ``numel / g`` elements over ``n`` ranks, laid out as any other.

Rank ``k`` ends with shard ``k`` either way. A node sends ``g`` times fewer bytes to others in two levels, and a rank
stores the error of ``1 / g`` of the elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_loco.core.chunks import count_chunks, split_layout
from megatron_loco.core.wire import BucketLayout, ParamSpan, bucket_layout, node_spans


@dataclass(frozen=True)
class Cost:
    """What one rank sends in one reduction, averaged over the group: equal on all its ranks.

    Attributes:
        sent_bytes: Everything that leaves the rank.
        inner_bytes: Of these, the exact first hop of two levels, inside a node.
        internode_bytes: Of these, what goes to ranks on other nodes.
        elements: Elements that leave the rank, the first hop of two levels not counted.
    """

    sent_bytes: float = 0.0
    inner_bytes: float = 0.0
    internode_bytes: float = 0.0
    elements: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """How a group reduces one bucket; the same object on all its ranks. See :func:`plan_exchange`.

    Attributes:
        numel: Elements of the bucket, padding included.
        nodes: Node of each rank, in rank order.
        layouts: Flat: the layout of the bucket. Two-level: those of the partial sums, one per position on a node.
        num_chunks: How many all-to-alls a layout travels in.
    """

    numel: int
    nodes: tuple[int, ...]
    layouts: tuple[BucketLayout, ...]
    num_chunks: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes on which ranks of the group are."""
        return len(set(self.nodes))

    @property
    def inner_size(self) -> int:
        """Ranks that sum exactly before anything is encoded: ``g`` in two levels, 1 if flat."""
        return len(self.layouts)

    @property
    def is_two_level(self) -> bool:
        """Whether there is an inner hop."""
        return self.inner_size > 1

    def layout(self, rank: int) -> BucketLayout:
        """The layout of what ``rank`` encodes and decodes."""
        return self.layouts[rank % self.inner_size]

    def chunks(self, rank: int) -> tuple[BucketLayout, ...]:
        """What ``rank`` encodes, sends and decodes one after the other; :meth:`layout` itself if it is one chunk."""
        return self._chunks[rank % self.inner_size]

    @cached_property
    def _chunks(self) -> tuple[tuple[BucketLayout, ...], ...]:
        return tuple(split_layout(layout, self.num_chunks) for layout in self.layouts)

    @cached_property
    def cost(self) -> Cost:
        """The cost of a compressed reduction."""
        itemsize = self.layouts[0].exact_itemsize
        inner = self.numel * itemsize * (self.inner_size - 1) / self.inner_size
        between = sum(chunk.wire_bytes for chunks in self._chunks for chunk in chunks) / self.inner_size
        num_peers = self.world_size // self.inner_size
        return Cost(
            sent_bytes=inner + between,
            inner_bytes=inner,
            internode_bytes=sum(map(self._internode_bytes, range(self.inner_size))) / self.inner_size,
            elements=self.numel / self.inner_size * (num_peers - 1) / num_peers,
        )

    def _internode_bytes(self, position: int) -> float:
        # Each destination receives its payload from all ranks, and those of other nodes are what counts here.
        peers = self.nodes[position :: self.inner_size]
        on_node = Counter(peers)
        return sum(
            size * (len(peers) - on_node[node])
            for chunk in self._chunks[position]
            for size, node in zip(chunk.send_splits, peers, strict=True)
        ) / len(peers)

    def ring_cost(self, itemsize: int, *, passes: int = 1) -> Cost:
        """The cost of an exact reduction: :func:`ring_cost`."""
        return ring_cost(self.numel, self.nodes, itemsize, passes=passes)


def ring_cost(numel: int, nodes: Sequence[int], itemsize: int, *, passes: int = 1) -> Cost:
    """The cost of an exact reduction by a ring that enters and leaves each node once.

    Args:
        numel: Elements of the bucket.
        nodes: Node of each rank of the group.
        itemsize: Bytes of an element.
        passes: 1 for a reduce-scatter, 2 for an all-reduce.
    """
    world_size, num_nodes = len(nodes), len(set(nodes))
    elements = passes * numel * (world_size - 1) / world_size
    links = num_nodes if num_nodes > 1 else 0
    sent = elements * itemsize
    return Cost(sent_bytes=sent, internode_bytes=sent * links / world_size, elements=elements)


def flat_exchange(
    layout: BucketLayout, nodes: Sequence[int] | None = None, *, chunk_bytes: int | None = None
) -> Exchange:
    """The flat exchange of ``layout``; without ``nodes`` all ranks count as on one node.

    ``chunk_bytes`` as in :func:`plan_exchange`.
    """
    nodes = tuple(nodes) if nodes is not None else (0,) * layout.world_size
    return Exchange(layout.numel, nodes, (layout,), 1 if chunk_bytes is None else count_chunks([layout], chunk_bytes))


def plan_exchange(
    numel: int,
    nodes: Sequence[int],
    params: Iterable[ParamSpan],
    *,
    two_level: bool,
    bits: int,
    block_size: int,
    exact_itemsize: int,
    chunk_bytes: int | None = None,
) -> Exchange:
    """Lay a bucket out for the ranks of a group.

    Args:
        numel: Elements of the bucket, padding included; divisible by the number of ranks.
        nodes: Node of each rank of the group, in rank order.
        params: Where each parameter lies in the bucket (:func:`megatron_loco.core.wire.bucket_layout`).
        two_level: Sum inside nodes first. Every node must have the same number of ranks, at least 2, consecutive in
            rank order.
        bits: Width of a code.
        block_size: Elements that share a scale.
        exact_itemsize: Bytes of an element that travels unquantised.
        chunk_bytes: About how many bytes a rank sends in one all-to-all, its own share included; default: all at once.

    Raises:
        ValueError: as :func:`megatron_loco.core.wire.bucket_layout`.
    """
    spans = list(params)
    num_nodes = len(set(nodes))
    inner_size = len(nodes) // num_nodes if two_level else 1
    assert not two_level or list(nodes) == [nodes[k - k % inner_size] for k in range(len(nodes))]
    num_peers = len(nodes) // inner_size
    layouts = tuple(
        bucket_layout(
            numel // inner_size,
            num_peers,
            spans if inner_size == 1 else node_spans(numel, num_peers, inner_size, position, spans),
            bits=bits,
            block_size=block_size,
            exact_itemsize=exact_itemsize,
        )
        for position in range(inner_size)
    )
    return Exchange(numel, tuple(nodes), layouts, 1 if chunk_bytes is None else count_chunks(layouts, chunk_bytes))
