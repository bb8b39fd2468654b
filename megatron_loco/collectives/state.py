"""What LoCo keeps of one bucket between optimizer steps. Holds no process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.config import LoCoConfig
from megatron_loco.core.error_feedback import ErrorState
from megatron_loco.core.wire import BucketLayout
from megatron_loco.kernels.registry import select_backend
from megatron_loco.kernels.schema import NUM_STATISTICS


@dataclass
class Traffic:
    """Bytes that crossed the network for one bucket since the start, per rank and averaged over the group.

    Derived from layout and group size, hence equal on all ranks of the group.
    """

    sent_bytes: float = 0.0
    bf16_bytes: float = 0.0
    compressed_steps: int = 0
    exact_steps: int = 0

    def add(self, sent_bytes: float, bf16_bytes: float, *, compressed: bool) -> None:
        """Count one reduction: what it moved, and what a ring reduce-scatter in bf16 would have."""
        self.sent_bytes += sent_bytes
        self.bf16_bytes += bf16_bytes
        self.compressed_steps += compressed
        self.exact_steps += not compressed


class BucketState:
    """Layout, error state, step counter, statistics and traffic of one bucket.

    Args:
        name: Shown in messages.
        layout: Byte layout of the bucket.
        config: Settings.
        device: Where gradients and error live.
        scratch: Pool that lends the send and receive buffers.
    """

    def __init__(
        self, name: str, layout: BucketLayout, config: LoCoConfig, device: torch.device, scratch: ScratchPool
    ) -> None:
        self.name = name
        self.layout = layout
        self.config = config
        self.scratch = scratch
        self.backend = select_backend(config.backend, device)
        self.error = ErrorState.zeros(layout.num_blocks, layout.block_size, device)
        self.statistics = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device)
        self.traffic = Traffic()
        self.step = 0
        """Reductions so far, one per optimizer step: counts warm-up and resets."""

    @property
    def in_warmup(self) -> bool:
        """Whether the next reduction is still exact."""
        return self.step < self.config.warmup_steps

    @property
    def resets_now(self) -> bool:
        """Whether the next reduction sets the error to zero: every ``reset_interval``-th one after the warm-up."""
        interval = self.config.reset_interval
        return interval > 0 and (self.step + 1 - self.config.warmup_steps) % interval == 0

    def count_all_reduce(self) -> None:
        """Count a step whose reduction was an exact all-reduce by the caller; error and step stay as they are."""
        sent_bytes = 2 * self.layout.ring_bytes(self.layout.exact_itemsize)
        self.statistics.zero_()
        self.traffic.add(sent_bytes, self.layout.ring_bytes(torch.bfloat16.itemsize), compressed=False)
