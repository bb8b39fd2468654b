"""All-reduce whose gradients travel in a few bits to their owners, and back in a chosen width: reduce-scatter as in
:mod:`megatron_loco.collectives.reduce_scatter`, then an all-gather of the sums.

Every rank takes what was gathered, also of its own shard, so that all ranks end with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.two_level import NodeGroups
from megatron_loco.collectives.work import Transfer


class AllReduce:
    """An all-reduce in two collectives: the first is started by :func:`start_all_reduce`, the second by :meth:`gather`.

    Two steps and not a chain of callbacks, so that the caller says in which order the collectives of several buckets
    start. Ranks have to start them in the same order, and callbacks of different ranks run when they run.
    """

    def __init__(
        self,
        tensor: Tensor,
        padded: Tensor,
        state: BucketState,
        group: dist.ProcessGroup,
        gather_dtype: torch.dtype,
        reduction: Any,
    ) -> None:
        self._tensor = tensor
        self._padded = padded
        self._state = state
        self._group = group
        self._gather_dtype = gather_dtype
        self._reduction = reduction
        self._gathered = padded
        self._transfer: Transfer | None = None

    @torch.no_grad()
    def gather(self) -> dist.Work:
        """Wait for the sums of this rank's shard, round them to the width of the gather, and start it.

        Returns:
            The transfer, for its future; :meth:`finish` is to be called when it is done.
        """
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        shard = own_shard(self._padded, self._group)
        if self._gather_dtype != self._padded.dtype:
            self._gathered = torch.empty_like(self._padded, dtype=self._gather_dtype)
            shard = own_shard(self._gathered, self._group).copy_(shard)
        transfer = dist.all_gather_into_tensor(self._gathered, shard, group=self._group, async_op=True)
        assert transfer is not None  # async_op, and this rank belongs to the group
        self._transfer = transfer
        return transfer

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Put the gathered sums into the tensor that was given; return it. The transfer is done."""
        if self._gathered is not self._tensor:
            self._tensor.copy_(self._gathered[: self._tensor.numel()])
        return self._tensor

    def wait(self) -> None:
        """Do what is left of the two; the result is in the tensor that was given."""
        (self._transfer or self.gather()).wait()
        self.finish()


@torch.no_grad()
def start_all_reduce(
    tensor: Tensor,
    state: BucketState,
    *,
    op: Any,
    group: dist.ProcessGroup,
    gather_dtype: torch.dtype | None = None,
    unit: Tensor | None = None,
    node_groups: NodeGroups | None = None,
) -> AllReduce | dist.Work:
    """Start reducing ``tensor`` over ``group``, in place.

    In the warm-up that is ``dist.all_reduce`` itself, whose transfer is returned.
    Must be called in the same order on all ranks of ``group``, and so must :meth:`AllReduce.gather`.

    Args:
        tensor: The local gradients, contiguous, one-dimensional, fp32, bf16 or fp16; holds the result afterwards.
        state: State of this bucket, for :func:`padded_numel` elements; its error and counters advance by one step.
        op: ``dist.ReduceOp.SUM`` or ``AVG``.
        group: Ranks that hold the other gradients.
        gather_dtype: In what the sums travel; default: the dtype of ``tensor``.
        unit: As for :func:`megatron_loco.collectives.reduce_scatter.reduce_scatter`.
        node_groups: Parts of ``group``, for a two-level exchange.

    Raises:
        ValueError: a shape, a dtype or ``op`` does not fit.
    """
    numel = state.exchange.numel
    if tensor.dim() != 1 or not tensor.is_contiguous() or padded_numel(tensor.numel(), group.size()) != numel:
        raise ValueError(
            f"{state.name}: needs a contiguous tensor of one dimension that is padded to {numel} elements, got shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}"
        )
    itemsize = tensor.element_size()
    bf16_cost = state.exchange.ring_cost(torch.bfloat16.itemsize, passes=2)
    if state.in_warmup or group.size() == 1:
        state.begin_step(unit)
        state.end_step()
        state.statistics.zero_()
        state.traffic.add(state.exchange.ring_cost(itemsize, passes=2), bf16_cost, compressed=False)
        transfer = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        assert transfer is not None
        return transfer
    padded = tensor
    if numel != tensor.numel():
        padded = torch.cat([tensor, tensor.new_zeros(numel - tensor.numel())])
    # The owner's sum may overwrite its own shard: that was encoded before anything arrives.
    reduction = reduce_scatter(
        own_shard(padded, group), padded, state, op=op, group=group, async_op=True, unit=unit, node_groups=node_groups
    )
    gather_dtype = gather_dtype or tensor.dtype
    # The reduction has counted itself, beside a reduce-scatter in bf16.
    both = state.exchange.ring_cost(gather_dtype.itemsize), state.exchange.ring_cost(torch.bfloat16.itemsize)
    state.traffic.add_bytes(*both)
    return AllReduce(tensor, padded, state, group, gather_dtype, reduction)


def padded_numel(numel: int, world_size: int) -> int:
    """Elements that shards of equal size over ``world_size`` ranks make up, at least ``numel``."""
    return -(-numel // world_size) * world_size


def own_shard(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shard of this rank: a view."""
    return tensor.view(group.size(), -1)[group.rank()]
