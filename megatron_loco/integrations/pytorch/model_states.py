"""LoCo states of one PyTorch model, and what their reductions share: node groups, scratch memory, unit, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.agreement import check_agreement, settings_facts
from megatron_loco.collectives.node_placement import NodePlacement
from megatron_loco.collectives.placement import TWO_LEVEL, Topology
from megatron_loco.collectives.schedule import chunk_bytes
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.self_check import check_collectives
from megatron_loco.collectives.state import BucketState, Traffic
from megatron_loco.collectives.two_level import NodeGroups
from megatron_loco.config import LoCoConfig
from megatron_loco.core.exchange import plan_exchange, ring_cost
from megatron_loco.core.wire import ParamSpan

logger = logging.getLogger(__name__)

GradientScale = Callable[[], float | Tensor]
"""Returns what the gradients are multiplied by at present, equal on all ranks: the scale of a gradient scaler."""


class ModelStates:
    """States of the buckets of one model.

    Args:
        config: Settings, equal on all ranks.
        gradient_scale: See :data:`GradientScale`; default: gradients are not scaled.
        gather_dtype: In what sums travel back where all ranks need them; default: the dtype of the gradients.
    """

    def __init__(
        self,
        config: LoCoConfig,
        gradient_scale: GradientScale | None = None,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.gather_dtype = gather_dtype
        self.states: dict[str, BucketState] = {}
        """Name -> state, in the order in which they were made; equal on all ranks of a group."""
        self.exact_traffic = Traffic()
        """What was reduced by torch's own function: small buckets, and those whose parameters are not all there."""
        self._retired_traffic = Traffic()
        self._gradient_scale = gradient_scale
        self._placement = NodePlacement()
        self._topologies: dict[dist.ProcessGroup, Topology] = {}
        self._pools: dict[Hashable, ScratchPool] = {}
        self._said: set[str] = set()

    def settle(self, group: dist.ProcessGroup, *, average: bool) -> None:
        """Compare the ranks of ``group``, check its collectives, choose its topology. A collective over ``group``.

        Every rank of the job must call it equally often, since it may make groups.

        Raises:
            ValueError: ranks disagree, or a topology is asked for that the placement does not allow.
            RuntimeError: a collective of the group returns wrong results.
        """
        if group in self._topologies:
            return
        check_agreement(settings_facts(self.config), group)
        self._topologies[group] = self._placement.settle(group, self.config)
        check_collectives(group, average=average)

    def make(
        self,
        name: str,
        numel: int,
        spans: Sequence[ParamSpan],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stream: str,
    ) -> BucketState:
        """Make the state of a bucket, in place of an earlier one of that name.

        Args:
            name: Of the bucket.
            numel: Its elements, divisible by the size of the group.
            spans: Its parameters.
            group: Who reduces it; :meth:`settle` was called for it.
            dtype: Of its gradients.
            device: Where they live.
            stream: What is reduced on different streams must not share scratch memory: a name for each.
        """
        topology = self._topologies[group]
        exchange = plan_exchange(
            numel,
            topology.nodes,
            spans,
            two_level=topology.kind == TWO_LEVEL,
            bits=self.config.bits,
            block_size=self.config.block_size,
            exact_itemsize=dtype.itemsize,
            chunk_bytes=chunk_bytes(self.config, device),
        )
        pool = self._pools.setdefault((device, stream), ScratchPool(device))
        state = BucketState(name, exchange.layout(group.rank()), self.config, device, pool, exchange)
        self.remove(name)
        self.states[name] = state
        return state

    def remove(self, name: str) -> None:
        """Drop the state of a bucket, if there is one. What it sent stays counted."""
        state = self.states.pop(name, None)
        if state is not None:
            _add(self._retired_traffic, state.traffic)

    def node_groups(self, group: dist.ProcessGroup) -> NodeGroups | None:
        """The parts of ``group`` if it reduces in two levels."""
        return self._placement.node_groups(group)

    def unit(self, device: torch.device) -> Tensor | None:
        """What the gradients are multiplied by; ``None`` if nothing depends on it, or they are not scaled."""
        if self._gradient_scale is None or not self.config.depends_on_unit:
            return None
        return torch.as_tensor(self._gradient_scale(), dtype=torch.float32, device=device).reshape(())

    def count_exact(self, name: str, reason: str, numel: int, group: dist.ProcessGroup, itemsize: int) -> None:
        """Count a reduction that torch's own function does, and say so the first time."""
        nodes = self._topologies[group].nodes
        cost, bf16 = ring_cost(numel, nodes, itemsize), ring_cost(numel, nodes, torch.bfloat16.itemsize)
        self.exact_traffic.add(cost, bf16, compressed=False)
        if name not in self._said and self.is_first_rank:
            logger.info("LoCo: %s reduces exactly: %s", name, reason)
        self._said.add(name)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one that logs."""
        return dist.get_rank() == 0

    def discard(self) -> None:
        """Take the last reduction of every bucket back, since the optimizer step was skipped."""
        for state in self.states.values():
            state.discard()

    @property
    def traffic(self) -> Traffic:
        """What left this rank since the start, all buckets together."""
        total = Traffic()
        of_states = (state.traffic for state in self.states.values())
        for traffic in (self.exact_traffic, self._retired_traffic, *of_states):
            _add(total, traffic)
        return total


def _add(total: Traffic, traffic: Traffic) -> None:
    for field, value in vars(traffic).items():
        setattr(total, field, getattr(total, field) + value)
