"""Nodes of the ranks of a group, and the topology that follows."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_loco.collectives import placement
from megatron_loco.collectives.placement import choose_topology, find_nodes, host_identity
from tests._ranks import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.mark.parametrize(
    ("nodes", "kind", "ranks_per_node", "reason"),
    [
        ([0, 0, 1, 1], "two-level", 2, "2 of its ranks share each node"),
        ([0] * 8 + [1] * 8 + [2] * 8, "two-level", 8, "8 of its ranks share each node"),
        ([0, 1, 2], "flat", 1, "each of its ranks is on a node of its own"),
        ([0, 0, 0], "flat", 3, "all its ranks are on one node"),
        ([0], "flat", 1, "all its ranks are on one node"),
        ([0, 0, 1], "flat", 0, "its nodes hold different numbers of its ranks"),
        ([0, 0, 1, 1, 1, 1, 0, 0], "flat", 0, "the ranks of a node are not consecutive in it"),
        ([0, 1, 0, 1], "flat", 0, "the ranks of a node are not consecutive in it"),  # Slurm's cyclic distribution
        ([0, 1, 1, 0], "flat", 0, "the ranks of a node are not consecutive in it"),
    ],
)
def test_auto(nodes: list[int], kind: str, ranks_per_node: int, reason: str) -> None:
    topology = choose_topology(nodes, "auto")
    assert (topology.kind, topology.ranks_per_node, topology.reason) == (kind, ranks_per_node, reason)
    assert topology.nodes == tuple(nodes)
    assert topology.num_nodes == max(nodes) + 1


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 2], [0, 0, 0], [0, 0, 1], [0, 1, 0, 1]])
def test_flat_is_always_possible(nodes: list[int]) -> None:
    assert choose_topology(nodes, "flat").kind == "flat"


def test_flat_keeps_what_two_levels_would_have_been() -> None:
    topology = choose_topology([0, 0, 1, 1], "flat")
    assert (topology.ranks_per_node, topology.reason) == (2, "as --loco-topology says")


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ([0, 0, 1, 1], "two-level"),
        # Of a job with two levels for dense gradients, the groups of experts may well be so.
        ([0, 1, 2], "flat"),
        ([0, 0, 0], "flat"),
        ([0], "flat"),
    ],
)
def test_two_level_where_it_is_possible_or_the_same(nodes: list[int], kind: str) -> None:
    assert choose_topology(nodes, "two-level").kind == kind


@pytest.mark.parametrize(
    ("nodes", "obstacle", "placed"),
    [
        ([0, 0, 1], "different numbers", "node 0 (2 ranks), node 1 (1 rank)."),
        ([0, 1, 1], "different numbers", "node 0 (1 rank), node 1 (2 ranks)."),
        ([0, 1, 0, 1], "not consecutive", "node 0 (1 rank), node 1 (1 rank), node 0 (1 rank), node 1 (1 rank)."),
        ([0, 1] * 9, "not consecutive", "node 1 (1 rank), ..."),
    ],
)
def test_two_level_that_is_impossible_is_refused(nodes: list[int], obstacle: str, placed: str) -> None:
    message = f"--loco-topology two-level: a group of {len(nodes)} ranks .*{obstacle}.*{re.escape(placed)}.*"
    with pytest.raises(ValueError, match=message + "--loco-topology flat, or auto"):
        choose_topology(nodes, "two-level")


def _found(group: dist.ProcessGroup, hosts: list[str], ranks_per_node: int) -> tuple[int, ...]:
    with mock.patch.dict("os.environ", {"NCCL_HOSTID": hosts[group.rank()]} if hosts else {}):
        return find_nodes(group, ranks_per_node)


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node", "nodes"),
    [
        ([], 0, (0, 0, 0, 0)),  # this machine
        (["b", "b", "a", "a"], 0, (0, 0, 1, 1)),  # counted as they appear
        (["a", "b", "a", "c"], 0, (0, 1, 0, 2)),
        ([], 2, (0, 0, 1, 1)),
        ([], 3, (0, 0, 0, 1)),
        ([], 8, (0, 0, 0, 0)),
        (["a", "b", "c", "d"], 2, (0, 0, 1, 1)),  # what is said counts, not what is found
    ],
)
def test_all_ranks_find_the_same(
    ranks: RankPool, hosts: list[str], ranks_per_node: int, nodes: tuple[int, ...]
) -> None:
    assert ranks.run(_found, 4, hosts, ranks_per_node) == [nodes] * 4


def _found_in_subgroup(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    odd, even = (dist.new_group(members) for members in ([1, 3], [0, 2]))
    mine = odd if group.rank() % 2 else even
    assert mine is not None
    return find_nodes(mine, 1), find_nodes(mine, 2), find_nodes(mine, 4)


def test_global_ranks_count_not_those_of_the_group(ranks: RankPool) -> None:
    # Ranks 1 and 3: with 2 consecutive global ranks to a node, on nodes 0 and 1.
    assert ranks.run(_found_in_subgroup, 4) == [((0, 1), (0, 1), (0, 0))] * 4


def test_a_host_is_told_by_name_and_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(placement, "_BOOT_ID", boot)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    without_boot = host_identity()
    boot.write_text("0f5c\n", encoding="ascii")
    first = host_identity()
    assert host_identity() == first != without_boot
    # Two pods of one machine; two machines whose image has one name.
    monkeypatch.setattr(socket, "gethostname", lambda: "node-2")
    assert host_identity() != first
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    boot.write_text("9a3e\n", encoding="ascii")
    assert host_identity() != first
    monkeypatch.setenv("NCCL_HOSTID", "rack-7")
    assert host_identity() == "rack-7"
