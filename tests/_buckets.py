"""Small buckets and a one-process model of what all ranks together must compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import BucketLayout, ParamSpan, bucket_layout
from tests._codec import Block, literal_decode, literal_dither, literal_quantize

CPU = torch.device("cpu")


def spans_of(numel: int, *, exact_every: int = 3) -> list[ParamSpan]:
    """Cut ``numel`` elements into parameters of odd sizes with gaps (padding); every third one is exact."""
    spans = []
    start, index = 0, 0
    while start < numel:
        length = min(numel - start, 37 + 61 * index)
        spans.append(ParamSpan(start, start + length, exact=index % exact_every == exact_every - 1))
        start += length + (5 if index % 2 else 0)
        index += 1
    return spans


def layout_of(
    numel: int, world_size: int, spans: Sequence[ParamSpan], config: LoCoConfig, dtype: torch.dtype = torch.float32
) -> BucketLayout:
    """The layout of a bucket of ``dtype``."""
    return bucket_layout(
        numel, world_size, spans, bits=config.bits, block_size=config.block_size, exact_itemsize=dtype.itemsize
    )


def state_of(
    numel: int, world_size: int, spans: Sequence[ParamSpan], config: LoCoConfig, dtype: torch.dtype = torch.float32
) -> BucketState:
    """A fresh state on the CPU."""
    return BucketState("bucket", layout_of(numel, world_size, spans, config, dtype), config, CPU, ScratchPool(CPU))


class Oracle:
    """What a rank sends, element by element, computed block by block in the most literal way (``tests/_codec.py``).

    Independent of the wire layout's offsets, packing, views and pieces: only the list of blocks is taken from it.

    Args:
        layout: Whose blocks; its ``bits`` are the width of the codes.
        beta: Weight of the old error.
        first_step: Steps that were made before.
        error_bits: Width of the stored error.
        fixed_scale: One scale for all blocks, the value of a code step (fp32); default: a scale per block.
    """

    def __init__(
        self,
        layout: BucketLayout,
        beta: float,
        first_step: int = 0,
        *,
        error_bits: int = 8,
        fixed_scale: float | None = None,
    ) -> None:
        self.layout = layout
        self.beta = np.float32(beta)
        self.one_minus_beta = np.float32(1 - beta)
        self.step = first_step
        self.error_bits = error_bits
        self.fixed_scale = fixed_scale
        self.error = torch.zeros(layout.numel)

    def send(self, grad: Tensor, *, reset: bool = False) -> Tensor:
        """Return what the receivers decode from this gradient, fp32 ``[numel]``; advance the error."""
        sent = torch.zeros(self.layout.numel)
        for shard in self.layout.shards:
            for start, stop in shard.exact:
                sent[start:stop] = grad[start:stop].float()
            for run in shard.runs:
                for row, start in enumerate(range(run.start, run.stop, self.layout.block_size), run.first_block):
                    block = slice(start, min(start + self.layout.block_size, run.stop))
                    sent[block] = torch.from_numpy(self._send_block(grad[block].float().numpy(), block, row, reset))
        self.step += 1
        return sent

    def _send_block(self, grad: Block, block: slice, row: int, reset: bool) -> Block:
        old = self.error[block].numpy().copy()
        with np.errstate(over="ignore", invalid="ignore"):
            compensated = grad + old if self.error_bits else grad
        codes, scale = literal_quantize(compensated, self.layout.bits, fixed_scale=self.fixed_scale)
        decoded = literal_decode(codes, scale)
        if reset:
            self.error[block] = 0
        elif self.error_bits and np.isfinite(scale):
            new = old * self.beta + (compensated - decoded) * self.one_minus_beta
            if self.error_bits < 32:
                first = row * self.layout.block_size
                dither = np.array([literal_dither(self.step, first + i) for i in range(new.size)], dtype=np.float32)
                new = literal_decode(*literal_quantize(new, self.error_bits, dither=dither))
            self.error[block] = torch.from_numpy(new)
        return decoded
