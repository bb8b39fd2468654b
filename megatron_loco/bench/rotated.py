"""The exchange of LoCo by point-to-point messages instead of all-to-alls: for comparison only, no part of the product.

Same chunks, same payloads, same results. All receives are posted first; then each chunk is encoded and sent to rank
``r + 1``, ``r + 2``, and so on, so that the ranks do not meet at one receiver.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.state import BucketState


@torch.no_grad()
def rotated_reduce_scatter(output: Tensor, input: Tensor, state: BucketState, *, group: dist.ProcessGroup) -> None:
    """Reduce-scatter by a sum, as :func:`megatron_loco.collectives.reduce_scatter.reduce_scatter` with a flat exchange.

    Args:
        output: This rank's shard, shape ``[numel / world_size]``.
        input: The local gradients, shape ``[numel]``, contiguous, same dtype.
        state: State of this bucket, flat; its error and counter advance by one step.
        group: Ranks that hold the other gradients.
    """
    rank, world_size, chunks = group.rank(), group.size(), state.chunks
    send_bytes, recv_bytes = state.scratch_bytes(rank)
    send, recv = state.scratch.take(send_bytes), state.scratch.take(recv_bytes)
    recvs = recv.split([chunk.recv_bytes(rank) for chunk in chunks])
    receives: list[list[Any]] = []
    for index, (chunk, part) in enumerate(zip(chunks, recvs, strict=True)):
        size = chunk.shards[rank].payload_bytes
        sources = [(rank - offset) % world_size for offset in range(1, world_size)] if size else []
        receives.append([_receive(part[k * size : (k + 1) * size], k, group, index) for k in sources])
    sends: list[Any] = []
    state.begin_step()
    state.statistics.zero_()
    for index, (chunk, part) in enumerate(zip(chunks, send.split([chunk.send_bytes for chunk in chunks]), strict=True)):
        state.encode(input, chunk, part)
        payloads = part.split(chunk.send_splits)
        for target in ((rank + offset) % world_size for offset in range(1, world_size)):
            if payloads[target].numel():
                sends.append(dist.isend(payloads[target], group_dst=target, group=group, tag=index))
        own = payloads[rank]
        recvs[index][rank * own.numel() : (rank + 1) * own.numel()].copy_(own)
    state.end_step()
    for chunk, part, pending in zip(chunks, recvs, receives, strict=True):
        for receive in pending:
            receive.wait()
        state.backend.decode_sum(part, chunk, rank, output, divisor=1)
    for transfer in sends:
        transfer.wait()
    state.scratch.give_back(send)
    state.scratch.give_back(recv)


def _receive(buffer: Tensor, source: int, group: dist.ProcessGroup, tag: int) -> Any:
    return dist.irecv(buffer, group_src=source, group=group, tag=tag)
