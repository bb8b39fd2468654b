"""Reduce-scatter whose gradients travel in a few bits: flat all-to-all, fp32 sum at the owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.work import Work
from megatron_loco.kernels.schema import check_decode, check_encode


@torch.no_grad()
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    state: BucketState,
    *,
    op: Any,
    group: dist.ProcessGroup,
    async_op: bool = False,
    exact: Callable[..., Any] = dist.reduce_scatter_tensor,
) -> Any:
    """Reduce ``input`` over ``group`` and leave this rank's shard in ``output``, as ``dist.reduce_scatter_tensor``
    does.

    1. In the warm-up, and in a group of one rank, call ``exact``.
    2. Encode: add the stored error, quantise, pack one payload per destination, update the error.
    3. Exchange the payloads by one all-to-all.
    4. Decode what arrived, sum in fp32 in rank order, divide for an average, round to the dtype of ``output``.

    Encoding is done when the call returns, so ``input`` may be overwritten then (``output`` may be a view of it).
    Must be called in the same order on all ranks of ``group``.

    Args:
        output: This rank's shard, shape ``[numel / world_size]``, fp32, bf16 or fp16.
        input: The local gradients, shape ``[numel]``, contiguous, same dtype. Not written, unless ``output`` is a view
        of it. state: State of this bucket; its error and counters advance by one step.
        op: ``dist.ReduceOp.SUM`` or ``AVG``.
        group: Ranks that hold the other gradients; its size is the layout's.
        async_op: Return at once; the result exists after ``wait()`` of what is returned.
        exact: Reduce-scatter without compression for the cases of step 1, called as ``exact(output, input, op=, group=,
            async_op=)``.

    Returns:
        With ``async_op`` a :class:`Work`, else ``None``; in step 1 whatever ``exact`` returns.

    Raises:
        ValueError: ``op``, a shape, a dtype or the size of the group does not fit.
    """
    layout = state.layout
    if group.size() != layout.world_size:
        raise ValueError(f"{state.name}: made for {layout.world_size} ranks, called on a group of {group.size()}")
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"{state.name}: op must be ReduceOp.SUM or ReduceOp.AVG, got {op}")
    rank = group.rank()
    bf16_bytes = layout.ring_bytes(torch.bfloat16.itemsize)
    if state.in_warmup or layout.world_size == 1:
        state.begin_step()
        state.end_step()
        state.statistics.zero_()
        state.traffic.add(layout.ring_bytes(input.element_size()), bf16_bytes, compressed=False)
        return exact(output, input, op=op, group=group, async_op=async_op)

    send = state.scratch.take(layout.send_bytes)
    recv = state.scratch.take(layout.recv_bytes(rank))
    try:
        check_encode(input, state.error, layout, send)
        check_decode(recv, layout, rank, output)
        if output.dtype != input.dtype:
            raise ValueError(f"output must be {input.dtype} as the gradients are, got {output.dtype}")
    except ValueError:
        state.scratch.give_back(send)
        state.scratch.give_back(recv)
        raise
    state.begin_step()
    state.statistics.zero_()
    state.backend.encode(
        input,
        state.error,
        layout,
        range(layout.world_size),
        send,
        step=state.step,
        beta=state.config.beta,
        reset=state.resets_now,
        statistics=state.statistics,
    )
    state.end_step()
    state.traffic.add(layout.wire_bytes, bf16_bytes, compressed=True)
    transfer = dist.all_to_all_single(
        recv,
        send,
        output_split_sizes=[layout.shards[rank].payload_bytes] * layout.world_size,
        input_split_sizes=layout.send_splits,
        group=group,
        async_op=True,
    )
    assert transfer is not None  # async_op, and this rank belongs to the group
    divisor = layout.world_size if op == dist.ReduceOp.AVG else 1

    @torch.no_grad()
    def finish() -> None:
        state.backend.decode_sum(recv, layout, rank, output, divisor=divisor)
        state.scratch.give_back(send)
        state.scratch.give_back(recv)

    work = Work(transfer, finish)
    if async_op:
        return work
    work.wait()
    return None
