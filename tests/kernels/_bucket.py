"""One rank's side of a bucket, by hand: the tensors of encode and decode without process groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_loco.core.error_feedback import ErrorState, load_error
from megatron_loco.core.wire import BucketLayout
from megatron_loco.kernels.cpu_backend import CpuBackend
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import NUM_STATISTICS, Backend, check_decode, check_encode
from tests._buckets import CPU

BACKENDS: list[Callable[[], Backend]] = [ReferenceBackend, CpuBackend]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BETA = 0.8


@dataclass
class Bucket:
    """One rank's side of a bucket."""

    layout: BucketLayout
    error: ErrorState
    send: Tensor
    statistics: Tensor
    fixed_scale: Tensor | None = None
    beta: float = BETA
    step: int = 0

    @classmethod
    def fresh(
        cls, layout: BucketLayout, error_bits: int = 8, fixed_scale: float | None = None, beta: float = BETA
    ) -> Bucket:
        return cls(
            layout,
            ErrorState.zeros(layout.error_rows, layout.block_size, CPU, error_bits),
            torch.zeros(layout.send_bytes, dtype=torch.uint8),
            torch.zeros(NUM_STATISTICS, dtype=torch.float64),
            None if fixed_scale is None else torch.tensor(fixed_scale),
            beta,
        )

    def encode(self, backend: Backend, grad: Tensor, *, reset: bool = False) -> Tensor:
        self.encode_chunk(backend, grad, self.layout, self.send, reset=reset)
        self.step += 1
        return self.send

    def encode_chunk(
        self, backend: Backend, grad: Tensor, chunk: BucketLayout, send: Tensor, *, reset: bool = False
    ) -> None:
        check_encode(grad, self.error, chunk, send)
        backend.encode(
            grad,
            self.error,
            chunk,
            send,
            step=self.step,
            beta=self.beta,
            reset=reset,
            statistics=self.statistics,
            fixed_scale=self.fixed_scale,
        )

    def payload(self, rank: int) -> Tensor:
        start = self.layout.send_offsets[rank]
        return self.send[start : start + self.layout.send_splits[rank]]


def exchange(buckets: Sequence[Bucket], rank: int) -> Tensor:
    """What the all-to-all delivers to ``rank``."""
    return torch.cat([bucket.payload(rank) for bucket in buckets])


def decode(backend: Backend, buckets: Sequence[Bucket], rank: int, dtype: torch.dtype, divisor: int = 1) -> Tensor:
    layout = buckets[0].layout
    output = torch.full((layout.numel // layout.world_size,), math.nan, dtype=dtype)
    recv = exchange(buckets, rank)
    check_decode(recv, layout, rank, output)
    backend.decode_sum(recv, layout, rank, output, divisor=divisor)
    return output


def gradients(numel: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def stored_error(layout: BucketLayout, error: ErrorState) -> Tensor:
    """The stored error by element of the bucket; the tails of partial blocks must be 0. Zeros if none is stored."""
    values = load_error(error) if error.bits else torch.zeros(layout.num_blocks, layout.block_size)
    flat = torch.zeros(layout.numel)
    for shard in layout.shards:
        for run in shard.runs:
            rows = values[run.first_block : run.first_block + run.num_blocks].view(-1)
            flat[run.start : run.stop] = rows[: run.stop - run.start]
            assert not rows[run.stop - run.start :].any()
    return flat


class Arena:
    """Memory around a tensor, filled with ``fill`` and checked afterwards."""

    def __init__(self, numel: int, dtype: torch.dtype, fill: float) -> None:
        margin = 64  # elements: wider than any vector
        self.memory = torch.full((numel + 2 * margin,), fill, dtype=dtype)
        self.inside = self.memory[margin : margin + numel]
        self._outside = torch.ones(numel + 2 * margin, dtype=torch.bool)
        self._outside[margin : margin + numel] = False
        self._before = self.memory.view(torch.uint8).clone()

    def untouched(self) -> bool:
        outside = self._outside.repeat_interleave(self.memory.itemsize)
        return torch.equal(self.memory.view(torch.uint8)[outside], self._before[outside])
