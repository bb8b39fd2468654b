"""The groups of a two-level exchange, and its first hop: an exact reduce-scatter inside the node.

The order of shards and hops is described in :mod:`megatron_loco.core.exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron_loco.collectives.agreement import group_device
from megatron_loco.collectives.placement import Topology


@dataclass(frozen=True)
class NodeGroups:
    """The two groups that a rank of a two-level exchange belongs to.

    Attributes:
        inside_node: The ranks of the data-parallel group on this rank's node.
        between_nodes: The ranks with this rank's position on every node.
    """

    inside_node: dist.ProcessGroup
    between_nodes: dist.ProcessGroup

    @property
    def sizes(self) -> tuple[int, int]:
        """Ranks inside the node, and nodes."""
        return self.inside_node.size(), self.between_nodes.size()


def new_node_groups(topology: Topology, group: dist.ProcessGroup) -> NodeGroups:
    """Make the groups of a two-level exchange. A collective: every rank of ``group`` must call it.

    They have the backend and the timeout of ``group``; nobody else takes part.
    """
    ranks = dist.get_process_group_ranks(group)
    size, mine = topology.ranks_per_node, group.rank()
    first = mine - mine % size
    return NodeGroups(
        _new_group(ranks[first : first + size], group, "inside node"),
        _new_group(ranks[mine % size :: size], group, "between nodes"),
    )


def keep_in_step() -> None:
    """Make and drop as many groups as :func:`new_node_groups`, on a rank that needs none.

    torch names later groups by how many a process has made. A rank that made fewer than others would wait for ever in
    the next group that all ranks make together.
    """
    for _ in range(2):
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        dist.destroy_process_group(alone)


def reduce_inside_node(
    partial_sums: Tensor, input: Tensor, num_nodes: int, *, op: Any, group: dist.ProcessGroup
) -> None:
    """Reduce-scatter, exactly, each node's part of ``input`` over the ranks of this node.

    Done when the call returns; on an accelerator, in the order of the current stream. One launch for all nodes, also
    inside a coalescing block of another group, as Megatron's: torch collects calls per group.

    Args:
        partial_sums: Where the shards of this rank's position go, in node order; shape ``[num_nodes * shard]``.
        input: The local gradients, shape ``[num_nodes * group.size() * shard]``, contiguous, same dtype; not written.
        num_nodes: Nodes of the whole group.
        op: ``dist.ReduceOp.SUM`` or ``AVG``.
        group: The ranks of this node.
    """
    with _coalescing_manager(group=group):
        for sums, part in zip(partial_sums.view(num_nodes, -1), input.view(num_nodes, -1), strict=True):
            dist.reduce_scatter_tensor(sums, part, op=op, group=group)


def _new_group(ranks: list[int], parent: dist.ProcessGroup, description: str) -> dist.ProcessGroup:
    group = dist.new_group(
        ranks,
        timeout=_timeout(parent),
        backend=dist.get_backend(parent),
        use_local_synchronization=True,
        group_desc=f"LoCo {description}",
    )
    assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
    # torch sorts them, as it did for the parent; in another order ranks would sum the wrong shards.
    assert dist.get_process_group_ranks(group) == ranks
    return group


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    # Not in torch's public interface; without it the new group has the default of its backend.
    options = getattr(group._get_backend(group_device(group)), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
