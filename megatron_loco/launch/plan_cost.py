"""Bytes, memory and time of a training step on a cluster that is only described: a model, not a measurement.

Bytes come from :mod:`megatron_loco.core.exchange`, as in training. Times are bytes over assumed rates; every one of
them is an attribute of :class:`Cluster` and is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_loco.config import LoCoConfig
from megatron_loco.core.exchange import Exchange, plan_exchange, ring_cost
from megatron_loco.core.wire import SCALE_BYTES, ParamSpan
from megatron_loco.launch.plan_model import Param

GPUS = {
    "a100": (312.0, 300.0, 2039.0),
    "a800": (312.0, 200.0, 2039.0),
    "h100": (989.0, 450.0, 3350.0),
    "h800": (989.0, 200.0, 3350.0),
    "h200": (989.0, 450.0, 4800.0),
    "b200": (2250.0, 900.0, 7700.0),
}
"""Name -> dense bf16 TFLOP/s, NVLink GB/s in one direction, memory GB/s: peaks of the vendor's data sheets (SXM)."""

MODEL_FLOPS_UTILISATION = 0.39
"""Attained share of the peak where none is given: LLaMA-2 7B on A100 by its published 184,320 GPU hours for 2e12
tokens, 6 FLOP per parameter and token. Taken for the other GPUs too."""

NETWORK_EFFICIENCY = 0.85
NVLINK_EFFICIENCY = 0.75
KERNEL_EFFICIENCY = 0.55
PARAM_BYTES = 2
"""The all-gather of the updated parameters is in bf16 in all variants."""

BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Rates that are assumed.

    Attributes:
        nodes, gpus_per_node: Size.
        network_links: Links per node.
        network_bytes: Bytes/s that leave a node, all its links together, as attained.
        nvlink_bytes: Bytes/s that a GPU sends to others of its node, as attained.
        flops: FLOP/s attained per GPU.
        kernel_bytes: Bytes/s of memory that encode and decode attain.
    """

    nodes: int
    gpus_per_node: int
    network_links: int
    network_bytes: float
    nvlink_bytes: float
    flops: float
    kernel_bytes: float

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Group:
    """Ranks that reduce one set of gradients: parameters as one of them holds them, and the node of each rank."""

    name: str
    params: tuple[Param, ...]
    nodes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the gradient buffer, padded to whole shards."""
        size = len(self.nodes)
        return -(-sum(param.numel for param in self.params) // size) * size

    def spans(self, loco: LoCoConfig) -> list[ParamSpan]:
        """Where each parameter lies in the buffer, and whether it travels exactly."""
        spans, start = [], 0
        for param in self.params:
            spans.append(ParamSpan(start, start + param.numel, loco.is_exact(param.name, param.num_dimensions)))
            start += param.numel
        return spans

    def exchange(self, loco: LoCoConfig, *, two_level: bool, itemsize: int) -> Exchange:
        """How LoCo reduces it, as if it were one bucket."""
        return plan_exchange(
            self.numel,
            self.nodes,
            self.spans(loco),
            two_level=two_level,
            bits=loco.bits,
            block_size=loco.block_size,
            exact_itemsize=itemsize,
        )


@dataclass(frozen=True)
class Reduction:
    """One way to reduce the gradients, summed over the groups a rank is in.

    Attributes:
        name: For the table.
        sent_bytes: Bytes that leave a rank per step.
        internode_bytes: Bytes that leave a node per step, all its ranks together.
        transfer_s, kernel_s: Seconds on the links, and of encode and decode.
        error_bytes, scratch_bytes: Memory per GPU that LoCo adds.
    """

    name: str
    sent_bytes: float
    internode_bytes: float
    transfer_s: float
    kernel_s: float = 0.0
    error_bytes: float = 0.0
    scratch_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the reduction with nothing hidden."""
        return self.transfer_s + self.kernel_s


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step consists of besides the reduction of gradients.

    Attributes:
        compute_s: Forward, backward, and all else that attained FLOP/s stand for, pipeline bubbles included.
        gather_s: All-gather of the updated parameters.
        num_micro_batches: Per step; an overlapped transfer hides behind one of them only.
        overlap_reduce, overlap_gather: Whether Megatron overlaps them.
    """

    compute_s: float
    gather_s: float
    num_micro_batches: int
    overlap_reduce: bool = False
    overlap_gather: bool = False

    def seconds(self, reduction: Reduction) -> float:
        """Time of the whole step. Encode and decode are never hidden: they use the GPU that computes."""
        one = self.compute_s / self.num_micro_batches
        transfer = max(0.0, reduction.transfer_s - BACKWARD_SHARE * one * self.overlap_reduce)
        gather = max(0.0, self.gather_s - (1 - BACKWARD_SHARE) * one * self.overlap_gather)
        return self.compute_s + gather + transfer + reduction.kernel_s


def speed_up(x: float, *, a: float, k: float, q: float = 0.0) -> float:
    """Whole-step speed-up without overlap, ``(1 + a x + x) / (1 + a x + k x + q)``.

    Args:
        x: Time of the stock reduction over time of computing.
        a: Time of the parameters' all-gather over that of the stock reduction.
        k: Time of LoCo's transfer over that of the stock reduction.
        q: Time of encode and decode over time of computing.
    """
    return (1 + a * x + x) / (1 + a * x + k * x + q)


def ring(name: str, groups: Sequence[Group], cluster: Cluster, itemsize: int) -> Reduction:
    """The stock reduce-scatter, or the all-gather that is its mirror: a ring over whole nodes.

    Its time is that of its slowest part: the links of a node, or NVLink.
    """
    sent = between = seconds = 0.0
    for group in groups:
        if len(group.nodes) == 1:
            continue
        cost = ring_cost(group.numel, group.nodes, itemsize)
        leaves = cost.internode_bytes * cluster.gpus_per_node
        on_nvlink = cost.sent_bytes if len(set(group.nodes)) < len(group.nodes) else 0.0
        seconds += max(leaves / cluster.network_bytes, on_nvlink / cluster.nvlink_bytes)
        sent, between = sent + cost.sent_bytes, between + leaves
    return Reduction(name, sent, between, seconds)


def compressed(
    name: str,
    groups: Sequence[Group],
    cluster: Cluster,
    loco: LoCoConfig,
    *,
    two_level: Sequence[bool],
    itemsize: int,
    overlap: bool,
) -> Reduction:
    """LoCo's reduction; its memory too.

    Args:
        name: For the table.
        groups: Groups of a rank.
        cluster: Rates.
        loco: Settings.
        two_level: For each group, whether it sums inside nodes first.
        itemsize: Bytes of a gradient element in Megatron's buffers.
        overlap: Whether Megatron cuts the buffers into buckets, two of which are in flight.
    """
    sent = between = transfer = kernel = error = scratch = 0.0
    for group, levels in zip(groups, two_level, strict=True):
        world_size = len(group.nodes)
        if world_size == 1:
            continue
        exchange = group.exchange(loco, two_level=levels, itemsize=itemsize)
        cost, layout = exchange.cost, exchange.layouts[0]
        leaves = cost.internode_bytes * cluster.gpus_per_node
        second_hop_inside = cost.sent_bytes - cost.inner_bytes - cost.internode_bytes
        transfer += max(leaves / cluster.network_bytes, second_hop_inside / cluster.nvlink_bytes)
        transfer += cost.inner_bytes / cluster.nvlink_bytes
        sent, between = sent + cost.sent_bytes, between + leaves

        error_row = loco.block_size * loco.error_bits / 8 + (SCALE_BYTES if loco.error_bits in (8, 16) else 0)
        rows = layout.error_rows if loco.keeps_error else 0
        error += rows * error_row * (2 if loco.rollback == "restore" else 1)
        # Encode reads the gradient, reads and writes the error, writes codes; decode reads codes and writes the shard.
        kernel += layout.numel * itemsize + 2 * rows * error_row + layout.send_bytes
        kernel += layout.send_bytes + group.numel / world_size * itemsize  # a rank receives as much as it sends
        buffers = 2 * layout.send_bytes + (layout.numel * itemsize if levels else 0)
        scratch = max(scratch, buffers * _share_in_flight(group, overlap))
    return Reduction(name, sent, between, transfer, kernel / cluster.kernel_bytes, error, scratch)


def _share_in_flight(group: Group, overlap: bool) -> float:
    # Largest two consecutive buckets of Megatron's, which closes one as soon as it is large enough (last layer first).
    if not overlap:
        return 1.0
    wanted = max(40_000_000, 1_000_000 * len(group.nodes))
    sizes = [0]
    for param in reversed(group.params):
        if sizes[-1] >= wanted:
            sizes.append(0)
        sizes[-1] += param.numel
    return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True))) / sum(sizes)
