"""A ring reduce-scatter of point-to-point messages: the exact reduction that a compressed one is compared with.

Gloo's own ``reduce_scatter_tensor`` is no honest baseline: it is an all-reduce whose result is cut, and moves twice the
bytes. This ring moves ``(W - 1) / W`` of the bucket per rank, the least that an exact reduce-scatter can.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUM_PIECES = 8
"""A shard travels in that many pieces, so that a piece is added and passed on while the next one arrives."""


class RingReduceScatter:
    """Reduce-scatter by a ring; keeps the buffers, so that nothing is allocated in a reduction.

    In step ``s`` of ``W - 1``, rank ``r`` sends shard ``r - s - 1`` to ``r + 1``, and adds its own part to shard
    ``r - s - 2``, which comes from ``r - 1``. Sums are rounded to the dtype of the bucket at every hop, as in NCCL.

    Args:
        numel: Elements of the bucket, divisible by the size of the group.
        dtype: Of the bucket.
        group: Gloo ranks, two or more.
        num_pieces: Pieces of a shard.

    Raises:
        ValueError: ``numel`` is not divisible.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, *, num_pieces: int = NUM_PIECES
    ) -> None:
        self._group = group
        self._rank, self._world_size = group.rank(), group.size()
        if numel % self._world_size:
            raise ValueError(f"a bucket of {numel} elements cannot be sharded over {self._world_size} ranks")
        shard_numel = numel // self._world_size
        self._buffers = torch.zeros(self._world_size - 1, shard_numel, dtype=dtype)
        borders = [shard_numel * index // num_pieces for index in range(num_pieces + 1)]
        self._pieces = [slice(a, b) for a, b in itertools.pairwise(borders) if a < b]

    @torch.no_grad()
    def __call__(self, output: Tensor, input: Tensor) -> None:
        """Sum ``input`` over the group and leave this rank's shard in ``output``.

        Args:
            output: Shape ``[numel / world_size]``; no part of ``input``.
            input: Shape ``[numel]``, contiguous; not written.
        """
        shards = input.view(self._world_size, -1)
        # All receives first: a message that announces one would otherwise wait behind the data on a shared connection.
        receives = [
            [self._receive(self._buffers[step, piece], step, index) for index, piece in enumerate(self._pieces)]
            for step in range(self._world_size - 1)
        ]
        first = shards[(self._rank - 1) % self._world_size]
        sends = [self._send(first[piece], 0, index) for index, piece in enumerate(self._pieces)]
        for step in range(self._world_size - 1):
            own = shards[(self._rank - step - 2) % self._world_size]
            for index, piece in enumerate(self._pieces):
                receives[step][index].wait()
                arrived = self._buffers[step, piece]
                if step == self._world_size - 2:
                    torch.add(arrived, own[piece], out=output[piece])
                else:
                    arrived += own[piece]
                    sends.append(self._send(arrived, step + 1, index))
        for send in sends:
            send.wait()

    def _receive(self, buffer: Tensor, step: int, index: int) -> Any:
        source = (self._rank - 1) % self._world_size
        return dist.irecv(buffer, group_src=source, group=self._group, tag=self._tag(step, index))

    def _send(self, piece: Tensor, step: int, index: int) -> Any:
        target = (self._rank + 1) % self._world_size
        return dist.isend(piece, group_dst=target, group=self._group, tag=self._tag(step, index))

    def _tag(self, step: int, index: int) -> int:
        return step * len(self._pieces) + index
