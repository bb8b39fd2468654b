"""Encode and decode-and-sum in plain torch: the oracle of the fast backends, and a backend that runs anywhere.

Order of operations, per block (all fp32; :mod:`megatron_loco.core.quantize` has the details):

1. ``e = error_code * error_scale`` (32 bits: as stored); ``h = g + e`` (0 bits: ``h = g``); positions behind a partial
   block's end are 0, and count in no mean, no error and no statistics.
2. ``codes, scale = quantize(h)`` by the rule for bits and scale mode; ``d = code * scale``; ``r = h - d``.
3. ``e' = beta * e + (1 - beta) * r``, stored as ``quantize(e', 8 or 16 bits)`` rounded with the dither of step and
   element (32 bits: as it is); kept if the block has NaN or Inf; zero on a reset step.
4. Receivers: ``sum = d_0 + d_1 + ...`` in rank order, then ``/ divisor``, then rounded to the bucket's dtype.

Assert bitwise: codes, scales, stored error, exact values, fp32 sums. Statistics may differ in their last bits (order of
summation). Cost: about 25 passes over memory; runs are worked on in pieces that stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_loco.core.error_feedback import (
    ErrorState,
    load_error,
    reset_error,
    storage_dither,
    update_error,
)
from megatron_loco.core.quantize import dequantize_blocks, pack_codes, quantize_wire, unpack_codes
from megatron_loco.core.wire import SCALE_BYTES, BlockRun, BucketLayout, ShardLayout
from megatron_loco.kernels.schema import Statistics
from megatron_loco.kernels.tables import payload_gaps

PIECE_ELEMENTS = 2**18
"""Elements worked on at a time: fp32 temporaries of 1 MiB stay in a core's L2 cache."""


class ReferenceBackend:
    """See the module's docstring; implements :class:`megatron_loco.kernels.schema.Backend`."""

    name = "reference"

    def encode(
        self,
        grad: Tensor,
        error: ErrorState,
        layout: BucketLayout,
        send: Tensor,
        *,
        step: int,
        beta: float,
        reset: bool,
        statistics: Tensor,
        fixed_scale: Tensor | None = None,
    ) -> None:
        """Write payloads and update the error; arguments as in :meth:`Backend.encode`."""
        for shard, offset in zip(layout.shards, layout.send_offsets, strict=True):
            if not shard.payload_bytes:  # padding alone, as behind a small bucket of a large group
                continue
            payload = send[offset : offset + shard.payload_bytes]
            codes, scales = _code_views(payload[None], layout, shard)
            for run in _pieces(shard.runs, layout.block_size):
                rows = slice(run.first_block - shard.first_block, run.first_block - shard.first_block + run.num_blocks)
                packed, run_scales = _encode_run(grad, error, layout, run, step, beta, reset, statistics, fixed_scale)
                codes[0, rows] = packed
                scales[0, rows] = run_scales
            for start, stop in payload_gaps(layout, shard):
                payload[start:stop] = 0
            exact = _exact_view(payload[None], shard, grad.dtype)
            if shard.exact:
                torch.cat([grad[a:b] for a, b in shard.exact], out=exact[0])

    def decode_sum(self, recv: Tensor, layout: BucketLayout, rank: int, output: Tensor, *, divisor: int) -> None:
        """Sum what arrived; arguments as in :meth:`Backend.decode_sum`."""
        shard = layout.shards[rank]
        origin = rank * layout.shard_numel
        for start, stop in shard.padding:
            output[start - origin : stop - origin].zero_()
        if not shard.payload_bytes:
            return
        payloads = recv.view(layout.world_size, shard.payload_bytes)
        codes, scales = _code_views(payloads, layout, shard)
        for run in _pieces(shard.runs, layout.block_size):
            rows = slice(run.first_block - shard.first_block, run.first_block - shard.first_block + run.num_blocks)
            total = _sum_in_order(
                dequantize_blocks(unpack_codes(codes[source, rows], layout.bits), scales[source, rows])
                for source in range(layout.world_size)
            )
            total = total.view(-1)[: run.stop - run.start]
            _write(output[run.start - origin : run.stop - origin], total, divisor)
        exact = _exact_view(payloads, shard, output.dtype)
        taken = 0
        for start, stop in shard.exact:
            total = _sum_in_order(
                exact[source, taken : taken + stop - start].to(torch.float32) for source in range(layout.world_size)
            )
            taken += stop - start
            _write(output[start - origin : stop - origin], total, divisor)


def _sum_in_order(pieces: Iterator[Tensor]) -> Tensor:
    # Begun with the first piece, not with zero: the sum of -0.0 is -0.0, as in any other reduction.
    total = next(pieces).clone()
    for piece in pieces:
        total += piece
    return total


def _encode_run(
    grad: Tensor,
    error: ErrorState,
    layout: BucketLayout,
    run: BlockRun,
    step: int,
    beta: float,
    reset: bool,
    statistics: Tensor,
    fixed_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    numel = run.stop - run.start
    blocks = torch.zeros(run.num_blocks, layout.block_size, dtype=torch.float32, device=grad.device)
    blocks.view(-1)[:numel] = grad[run.start : run.stop]
    stored = error.rows(run.first_block, run.first_block + run.num_blocks)
    old = load_error(stored)
    compensated = blocks + old if error.bits else blocks
    codes, scales = quantize_wire(compensated, layout.bits, numel, fixed_scale)
    finite = torch.isfinite(scales)
    residual = compensated - dequantize_blocks(codes, scales)
    residual.view(-1)[numel:] = 0  # a sign has no 0
    measured = [(Statistics.GRAD_SQ, blocks), (Statistics.RESIDUAL_SQ, residual)]
    if reset:
        reset_error(stored)
    elif error.bits:
        dither = None
        if error.bits != 32:
            dither = storage_dither(step, run.first_block, run.num_blocks, layout.block_size, grad.device)
        new = update_error(stored, old, residual, finite, beta, dither)
        measured.append((Statistics.ERROR_SQ, new))
    for index, values in measured:
        # In fp64: the square of a gradient of 1e-23 is 0 in fp32.
        squares = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square()
        statistics[index] += torch.where(finite, squares, 0.0).sum()
    statistics[Statistics.NONFINITE_BLOCKS] += (~finite).sum()
    return pack_codes(codes, layout.bits), scales


def _pieces(runs: Sequence[BlockRun], block_size: int) -> Iterator[BlockRun]:
    blocks_per_piece = max(1, PIECE_ELEMENTS // block_size)
    for run in runs:
        for block in range(0, run.num_blocks, blocks_per_piece):
            count = min(blocks_per_piece, run.num_blocks - block)
            start = run.start + block * block_size
            yield BlockRun(start, min(run.stop, start + count * block_size), run.first_block + block, count)


def _code_views(payloads: Tensor, layout: BucketLayout, shard: ShardLayout) -> tuple[Tensor, Tensor]:
    # uint8 [ranks, num_blocks, code_block_bytes] and fp32 [ranks, num_blocks], both views of the payloads.
    codes = payloads[:, : shard.num_blocks * layout.code_block_bytes]
    scales = payloads[:, shard.scales_offset : shard.scales_offset + shard.num_blocks * SCALE_BYTES]
    return codes.unflatten(1, (shard.num_blocks, layout.code_block_bytes)), scales.view(torch.float32)


def _exact_view(payloads: Tensor, shard: ShardLayout, dtype: torch.dtype) -> Tensor:
    num_bytes = shard.num_exact * dtype.itemsize
    return payloads[:, shard.exact_offset : shard.exact_offset + num_bytes].view(dtype)


def _write(output: Tensor, total: Tensor, divisor: int) -> None:
    if divisor != 1:
        # By a tensor: torch may turn a division by a Python number into a product with its rounded reciprocal.
        total = total / torch.full((), divisor, dtype=torch.float32, device=total.device)
    output.copy_(total)
