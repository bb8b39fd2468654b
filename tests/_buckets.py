"""Small buckets and a one-process model of what all ranks together must compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.quantize import dequantize_blocks, quantize_blocks
from megatron_loco.core.wire import BucketLayout, ParamSpan, bucket_layout

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


def literal_dither(step: int, element: int) -> float:
    """The dither of one element, in Python's whole numbers."""
    phase = (step * 0xC13FA9A9 + element * 0x91E10DA5) % 2**32
    return ((phase >> 16) + 0.5) / 2**16


class Oracle:
    """What a rank sends, element by element, computed block by block in the most literal way.

    Independent of the wire layout's offsets, packing, views and chunks: only the list of blocks is taken from it.
    """

    def __init__(self, layout: BucketLayout, beta: float, first_step: int = 0) -> None:
        self.layout = layout
        self.beta = beta
        self.step = first_step
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
                    sent[block] = self._send_block(grad[block].float(), block, row, reset)
        self.step += 1
        return sent

    def _send_block(self, grad: Tensor, block: slice, row: int, reset: bool) -> Tensor:
        old = self.error[block].clone()
        compensated = (grad + old)[None]
        decoded = dequantize_blocks(*quantize_blocks(compensated, self.layout.bits))[0]
        if reset:
            self.error[block] = 0
        elif torch.isfinite(compensated).all():
            new = old * torch.tensor(self.beta) + (compensated[0] - decoded) * torch.tensor(1 - self.beta)
            first = row * self.layout.block_size
            dither = torch.tensor([literal_dither(self.step, first + i) for i in range(new.numel())])
            self.error[block] = dequantize_blocks(*quantize_blocks(new[None].contiguous(), 8, dither[None]))[0]
        return decoded
