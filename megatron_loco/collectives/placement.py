"""On which node each rank of a group is, and whether the group then reduces flat or in two levels.

A node is where ranks reach each other without the network. By default it is a host as NCCL tells hosts apart: by name
and boot, or by ``NCCL_HOSTID`` if that is set. So

* processes of one host, in one container or under Slurm, share a node;
* containers with host names of their own (Kubernetes pods) on one machine are nodes of their own: they share no
  memory, and NCCL talks between them over the network too;
* machines with equal names, as in images that set none, are told apart by their boot.

``ranks_per_node`` says it instead: consecutive global ranks, for nodes that are larger than a host (NVLink across
hosts) or smaller, and to try two levels out on one machine.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

FLAT = "flat"
TWO_LEVEL = "two-level"

_RUNS_SHOWN = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Topology:
    """How a group reduces, and why.

    Attributes:
        kind: :data:`FLAT` or :data:`TWO_LEVEL`.
        nodes: Node of each rank, in rank order; nodes are counted from 0 as they appear.
        ranks_per_node: Ranks of the group on each node; 0 where nodes hold different numbers of them, or not
            consecutive ones.
        reason: Why this kind, for the log.
    """

    kind: str
    nodes: tuple[int, ...]
    ranks_per_node: int
    reason: str

    @property
    def num_nodes(self) -> int:
        """Nodes on which ranks of the group are."""
        return len(set(self.nodes))


def find_nodes(group: dist.ProcessGroup, ranks_per_node: int) -> tuple[int, ...]:
    """Return the node of each rank of ``group``, counted from 0 as they appear in rank order: the same on all ranks.

    Args:
        group: The ranks. With ``ranks_per_node == 0`` a collective: every rank of the group must call it.
        ranks_per_node: Consecutive global ranks of a node; 0 = by host. Equal on all ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    where: list[object]
    if ranks_per_node > 0:
        where = [rank // ranks_per_node for rank in ranks]
    elif len(ranks) == 1 or dist.get_backend(group) == "fake":  # Megatron's process group that delivers nothing
        where = [None] * len(ranks)
    else:
        where = [None] * len(ranks)
        dist.all_gather_object(where, host_identity(), group=group)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(where))}
    return tuple(numbers[name] for name in where)


def choose_topology(nodes: Sequence[int], asked: str) -> Topology:
    """Choose flat or two-level for a group whose ranks are on ``nodes``.

    Two levels save bytes between nodes where several ranks of a group share a node. They need the same number of ranks
    on every node, consecutive in rank order: shards are contiguous, and their owners must be.

    Args:
        nodes: Node of each rank, in rank order, counted from 0 as they appear.
        asked: ``auto``, ``flat`` or ``two-level``. A group on a single node, or with one rank per node, is flat in any
            case: there is nothing to send between nodes, or nothing to sum before.

    Raises:
        ValueError: ``two-level`` is asked for and the placement does not allow it.
    """
    sizes = Counter(nodes)
    num_nodes = len(sizes)
    size = sizes[0] if len(set(sizes.values())) == 1 else 0
    obstacle = ""
    if not size:
        obstacle = "its nodes hold different numbers of its ranks"
    elif any(nodes[k] != nodes[k - k % size] for k in range(len(nodes))):
        obstacle = "the ranks of a node are not consecutive in it"
    if num_nodes == 1:
        reason = "all its ranks are on one node"
    elif size == 1:
        reason = "each of its ranks is on a node of its own"
    elif asked == FLAT:
        reason = "as --loco-topology says"
    elif not obstacle:
        why = "as --loco-topology says" if asked == TWO_LEVEL else f"{size} of its ranks share each node"
        return Topology(TWO_LEVEL, tuple(nodes), size, why)
    elif asked == TWO_LEVEL:
        raise ValueError(
            f"--loco-topology two-level: a group of {len(nodes)} ranks cannot reduce in two levels, since {obstacle}. "
            f"In rank order they are on {_in_words(nodes)}. Use --loco-topology flat, or auto, which takes two levels "
            "where they fit; if nodes are not what hosts show, say so with --loco-ranks-per-node"
        )
    else:
        reason = obstacle
    return Topology(FLAT, tuple(nodes), 0 if obstacle else size, reason)


def _in_words(nodes: Sequence[int]) -> str:
    runs = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    text = ", ".join(f"node {node} ({count} rank{'s' if count > 1 else ''})" for node, count in runs[:_RUNS_SHOWN])
    return text + (", ..." if len(runs) > _RUNS_SHOWN else "")


def host_identity() -> str:
    """What ranks of one node, and no others, have in common: NCCL's rule."""
    explicit = os.environ.get("NCCL_HOSTID")
    if explicit:
        return explicit
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
