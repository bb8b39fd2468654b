"""Topologies of the data-parallel groups of a job, and the groups for those that reduce in two levels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_loco.collectives.placement import FLAT, TWO_LEVEL, Topology, choose_topology, find_nodes
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.two_level import NodeGroups, keep_in_step, new_node_groups
from megatron_loco.config import LoCoConfig


class NodePlacement:
    """What :meth:`settle` found out about each group. Groups of the same ranks share it, as those of model chunks."""

    def __init__(self) -> None:
        self._settled: dict[tuple[int, ...], tuple[Topology, NodeGroups | None]] = {}
        self._node_groups: dict[dist.ProcessGroup, NodeGroups | None] = {}

    def settle(self, group: dist.ProcessGroup, config: LoCoConfig) -> Topology:
        """Choose the topology of ``group`` and make its node groups. A collective over ``group``.

        Every rank of the job makes the same number of process groups, whatever the topologies (:func:`keep_in_step`).

        Raises:
            ValueError: ``config`` asks for two levels, and the placement does not allow it.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks in self._settled:
            self.settle_nothing(config)
        else:
            topology = choose_topology(find_nodes(group, config.ranks_per_node), config.topology)
            if topology.kind == TWO_LEVEL:
                self._settled[ranks] = topology, new_node_groups(topology, group)
            else:
                self.settle_nothing(config)
                self._settled[ranks] = topology, None
        topology, self._node_groups[group] = self._settled[ranks]
        return topology

    @staticmethod
    def settle_nothing(config: LoCoConfig) -> None:
        """What a rank calls in place of :meth:`settle` where it has no group and others may."""
        if config.topology != FLAT:
            keep_in_step()

    def node_groups(self, group: dist.ProcessGroup) -> NodeGroups | None:
        """The parts of ``group`` if it reduces in two levels."""
        return self._node_groups.get(group)


def describe(kind: str, topology: Topology, states: Sequence[BucketState]) -> str:
    """One line: how the gradients of ``kind`` are reduced, why, and what leaves a node per step."""
    world_size, num_nodes = len(topology.nodes), topology.num_nodes
    text = f"{kind} gradients of {world_size} ranks on {num_nodes} node(s): {topology.kind}, since {topology.reason}"
    if num_nodes == 1:
        return text
    per_rank = sum(state.exchange.cost.internode_bytes for state in states)
    size = topology.ranks_per_node
    leaving = {topology.kind: per_rank}
    if size > 1:
        # Payloads have the same sizes in both, since shards are the same, and so their blocks.
        flat = per_rank * size if topology.kind == TWO_LEVEL else per_rank
        leaving = {TWO_LEVEL: flat / size, FLAT: flat}
    ring = (state.exchange.ring_cost(torch.bfloat16.itemsize) for state in states)
    leaving["bf16 ring"] = sum(cost.internode_bytes for cost in ring)
    ranks_of_node = world_size / num_nodes
    figures = ", ".join(f"{name} {ranks_of_node * sent / 1e6:.3f} MB" for name, sent in leaving.items())
    return f"{text}; bytes leaving a node per compressed step: {figures}"
