"""Reduce-scatter whose gradients travel in a few bits: all-to-all, flat or between nodes, and fp32 sum at the owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.schedule import decode_stream
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.two_level import NodeGroups, reduce_inside_node
from megatron_loco.collectives.work import StreamWork, Work
from megatron_loco.kernels.schema import check_decode, check_encode, check_reduction


@torch.no_grad()
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    state: BucketState,
    *,
    op: Any,
    group: dist.ProcessGroup,
    async_op: bool = False,
    unit: Tensor | None = None,
    exact: Callable[..., Any] = dist.reduce_scatter_tensor,
    node_groups: NodeGroups | None = None,
) -> Any:
    """Reduce ``input`` over ``group`` and leave this rank's shard in ``output``, as ``dist.reduce_scatter_tensor``
    does.

    1. In the warm-up, and in a group of one rank, call ``exact``.
    2. In a two-level exchange, reduce inside the node exactly; the rest is about its partial sums, between nodes.
    3. Encode: add the stored error, quantise, pack one payload per destination, update the error.
    4. Exchange the payloads by an all-to-all.
    5. Decode what arrived, sum in fp32 in rank order, divide for an average, round to the dtype of ``output``.

    Steps 3 to 5 are done in chunks of the bucket (:mod:`megatron_loco.core.chunks`): while one is on its way, the next
    is encoded, and the one before decoded. On an accelerator a stream of its own decodes (4 and 5 need no wait then);
    elsewhere ``wait()`` does.

    Encoding is done when the call returns, so ``input`` may be overwritten then (``output`` may be a view of it). On an
    accelerator that means in the order of the current stream, which so waits for step 2, but not for step 4.
    Must be called in the same order on all ranks of ``group``.

    Args:
        output: This rank's shard, shape ``[numel / world_size]``, fp32, bf16 or fp16.
        input: The local gradients, shape ``[numel]``, contiguous, same dtype. Not written, unless ``output`` is a view
            of it.
        state: State of this bucket; its error and counters advance by one step.
        op: ``dist.ReduceOp.SUM`` or ``AVG``.
        group: Ranks that hold the other gradients; its size is that of the state's exchange.
        async_op: Return at once; the result exists after ``wait()`` of what is returned.
        unit: What the gradients are multiplied by (loss scale, token count), fp32 of shape ``[]``; default: as in the
            last reduction.
        exact: Reduce-scatter without compression for the cases of step 1, called as ``exact(output, input, op=, group=,
            async_op=)``.
        node_groups: Parts of ``group``, for a two-level exchange; a flat one does not use them.

    Returns:
        With ``async_op`` a :class:`Work` or :class:`StreamWork`, else ``None``; in step 1 whatever ``exact`` returns.

    Raises:
        ValueError: ``op``, a shape, a dtype or the size of a group does not fit.
    """
    exchange, layout = state.exchange, state.layout
    if group.size() != exchange.world_size:
        raise ValueError(f"{state.name}: made for {exchange.world_size} ranks, called on a group of {group.size()}")
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"{state.name}: op must be ReduceOp.SUM or ReduceOp.AVG, got {op}")
    # Also where the stock function reduces: not only when the warm-up is over, hours into a run.
    check_reduction(output, input, exchange.numel, layout)
    peers = group
    if exchange.is_two_level:
        if node_groups is None or node_groups.sizes != (exchange.inner_size, layout.world_size):
            raise ValueError(
                f"{state.name}: needs node_groups of {exchange.inner_size} ranks inside a node and {layout.world_size} "
                f"between nodes, got {node_groups and node_groups.sizes}"
            )
        peers = node_groups.between_nodes
    bf16_cost = exchange.ring_cost(torch.bfloat16.itemsize)
    if state.in_warmup or group.size() == 1:
        state.begin_step(unit)
        state.end_step()
        state.statistics.zero_()
        state.traffic.add(exchange.ring_cost(input.element_size()), bf16_cost, compressed=False)
        return exact(output, input, op=op, group=group, async_op=async_op)

    divisor = layout.world_size if op == dist.ReduceOp.AVG else 1
    work = _exchange_chunks(
        output, input, state, op=op, peers=peers, divisor=divisor, unit=unit, node_groups=node_groups
    )
    state.traffic.add(exchange.cost, bf16_cost, compressed=True)
    if async_op:
        return work
    work.wait()
    return None


def _exchange_chunks(
    output: Tensor,
    input: Tensor,
    state: BucketState,
    *,
    op: Any,
    peers: dist.ProcessGroup,
    divisor: int,
    unit: Tensor | None,
    node_groups: NodeGroups | None,
) -> Work | StreamWork:
    layout, chunks, rank = state.layout, state.chunks, peers.rank()
    scratch = state.scratch
    send_bytes, recv_bytes, *partial_bytes = state.scratch_bytes(rank)
    send, recv = scratch.take(send_bytes), scratch.take(recv_bytes)
    sends = send.split([chunk.send_bytes for chunk in chunks])
    recvs = recv.split([chunk.recv_bytes(rank) for chunk in chunks])
    partial_sums = scratch.take(partial_bytes[0]) if partial_bytes else None
    transfers: list[Any] = []

    @torch.no_grad()
    def decode(index: int) -> None:
        state.backend.decode_sum(recvs[index], chunks[index], rank, output, divisor=divisor)

    def finish() -> None:
        scratch.give_back(send)
        scratch.give_back(recv)

    try:
        encoded = input if partial_sums is None else partial_sums.view(input.dtype)
        for chunk, chunk_send, chunk_recv in zip(chunks, sends, recvs, strict=True):
            check_encode(encoded, state.error, chunk, chunk_send)
            check_decode(chunk_recv, chunk, rank, output)
        if node_groups is not None and partial_sums is not None:
            reduce_inside_node(encoded, input, layout.world_size, op=op, group=node_groups.inside_node)
        state.begin_step(unit)
        state.statistics.zero_()
        for chunk, chunk_send, chunk_recv in zip(chunks, sends, recvs, strict=True):
            state.encode(encoded, chunk, chunk_send)
            transfer = dist.all_to_all_single(
                chunk_recv,
                chunk_send,
                output_split_sizes=[chunk.shards[rank].payload_bytes] * chunk.world_size,
                input_split_sizes=chunk.send_splits,
                group=peers,
                async_op=True,
            )
            assert transfer is not None  # async_op, and this rank belongs to the group
            transfers.append(transfer)
        state.end_step()
    except BaseException:
        if not transfers:  # else what is on its way may still write there
            finish()
        raise
    finally:
        if partial_sums is not None:
            scratch.give_back(partial_sums)
    if not output.is_cuda:
        return Work(transfers, decode, finish)
    stream = decode_stream(output.device)
    with torch.cuda.stream(stream):
        for index, transfer in enumerate(transfers):
            transfer.wait()  # the stream, not the CPU
            decode(index)
        done = torch.cuda.Event()
        done.record(stream)
    return StreamWork(done, finish)
