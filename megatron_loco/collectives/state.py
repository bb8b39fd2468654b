"""What LoCo keeps of one bucket between optimizer steps. Holds no process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_loco.collectives.schedule import chunk_bytes
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.config import LoCoConfig
from megatron_loco.core.chunks import split_layout
from megatron_loco.core.error_feedback import ErrorState, reset_error
from megatron_loco.core.exchange import Cost, Exchange, flat_exchange
from megatron_loco.core.quantize import fixed_scale
from megatron_loco.core.wire import BucketLayout
from megatron_loco.kernels.registry import select_backend
from megatron_loco.kernels.schema import NUM_STATISTICS


@dataclass
class Traffic:
    """What left a rank for one bucket since the start, averaged over the group.

    Derived from layout and placement, hence equal on all ranks of the group. Names as in
    :class:`megatron_loco.core.exchange.Cost`; with ``bf16``, what a ring reduce-scatter in bf16 would have sent.
    """

    sent_bytes: float = 0.0
    inner_bytes: float = 0.0
    internode_bytes: float = 0.0
    elements: float = 0.0
    bf16_bytes: float = 0.0
    bf16_internode_bytes: float = 0.0
    compressed_steps: int = 0
    exact_steps: int = 0

    def add(self, cost: Cost, bf16: Cost, *, compressed: bool) -> None:
        """Count one reduction: what it cost, and what a ring reduce-scatter in bf16 would have."""
        self.add_bytes(cost, bf16)
        self.compressed_steps += compressed
        self.exact_steps += not compressed

    def add_bytes(self, cost: Cost, bf16: Cost) -> None:
        """Count what was sent, but no step."""
        self.sent_bytes += cost.sent_bytes
        self.inner_bytes += cost.inner_bytes
        self.internode_bytes += cost.internode_bytes
        self.elements += cost.elements
        self.bf16_bytes += bf16.sent_bytes
        self.bf16_internode_bytes += bf16.internode_bytes


class BucketState:
    """Layout, error state, step counter, statistics and traffic of one bucket.

    A reduction is one step. It counts unless :meth:`discard` takes it back: when an optimizer step is skipped, or when
    Megatron repeats a step. :meth:`keep` makes it final.

    Args:
        name: Shown in messages.
        layout: Byte layout of what this rank exchanges.
        config: Settings.
        device: Where gradients and error live.
        scratch: Pool that lends the send and receive buffers.
        exchange: How the whole group reduces the bucket; ``layout`` is one of its layouts. Default: flat, with all
            ranks on one node.
    """

    def __init__(
        self,
        name: str,
        layout: BucketLayout,
        config: LoCoConfig,
        device: torch.device,
        scratch: ScratchPool,
        exchange: Exchange | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.exchange = exchange or flat_exchange(layout, chunk_bytes=chunk_bytes(config, device))
        self.chunks = split_layout(layout, self.exchange.num_chunks)
        """What is encoded, sent and decoded one after the other; together the layout."""
        self.config = config
        self.scratch = scratch
        self.backend = select_backend(config.backend, device)
        self.error = self._no_error(device)
        self.statistics = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device)
        self.traffic = Traffic()
        self.step = 0
        """Reductions that count so far, one per optimizer step: counts warm-up and resets."""
        self.unit = torch.ones((), dtype=torch.float32, device=device)
        """What the gradients are multiplied by (loss scale, token count), and so the unit of the stored error."""
        self._previous = self._no_error(device) if config.rollback == "restore" else None
        self._previous_unit = self.unit.clone()
        self._can_discard = False

    def _no_error(self, device: torch.device) -> ErrorState:
        return ErrorState.zeros(self.layout.error_rows, self.layout.block_size, device, self.config.error_bits)

    @property
    def memory_bytes(self) -> int:
        """What the state keeps between steps: the error, and with ``rollback="restore"`` the one before it."""
        return self.error.num_bytes + (self._previous.num_bytes if self._previous is not None else 0)

    def scratch_bytes(self, rank: int) -> list[int]:
        """Sizes of the buffers that one compressed reduction takes from the pool on ``rank`` of those that exchange."""
        sizes = [sum(chunk.send_bytes for chunk in self.chunks), sum(chunk.recv_bytes(rank) for chunk in self.chunks)]
        if self.exchange.is_two_level:
            sizes.append(self.layout.numel * self.layout.exact_itemsize)
        return sizes

    def begin_step(self, unit: Tensor | None = None) -> None:
        """Prepare for a reduction: keep what :meth:`discard` needs, and bring the error to the unit of the gradients.

        Args:
            unit: What the gradients of this step are multiplied by, fp32 of shape ``[]``; default: as in the last step.
        """
        self._can_discard = True
        if self._previous is not None:
            self._previous.copy_(self.error)
            self._previous_unit.copy_(self.unit)
        if unit is not None:
            self.error.multiply_(torch.div(unit, self.unit))
            self.unit.copy_(unit)

    def encode(self, grad: Tensor, chunk: BucketLayout, send: Tensor) -> None:
        """Encode a chunk of the reduction that :meth:`begin_step` announced, and update the error of its blocks.

        Args:
            grad: What is encoded: the bucket, or in two levels the partial sums; shape ``[layout.numel]``.
            chunk: One of :attr:`chunks`, or the whole layout.
            send: uint8, shape ``[chunk.send_bytes]``.
        """
        self.backend.encode(
            grad,
            self.error,
            chunk,
            send,
            step=self.step,
            beta=self.config.beta,
            reset=self.resets_now,
            statistics=self.statistics,
            fixed_scale=self.fixed_scale,
        )

    def end_step(self) -> None:
        """Count the reduction that :meth:`begin_step` announced; its error is stored."""
        self.step += 1

    def keep(self) -> None:
        """Make the last reduction final, since its gradients have reached the weights: :meth:`discard` does nothing."""
        self._can_discard = False

    def discard(self) -> None:
        """Take the last reduction back, as if it had never happened; a second call does nothing.

        With ``rollback="restore"`` the error is bitwise that from before the step, with ``"zero"`` it is zero, as after
        a reset. Bytes were sent, and stay counted.
        """
        if not self._can_discard:
            return
        self._can_discard = False
        self.step -= 1
        if self._previous is not None:
            self.error.copy_(self._previous)
            self.unit.copy_(self._previous_unit)
        else:
            reset_error(self.error)

    def resume(self, step: int, unit: float | None = None) -> None:
        """Continue after ``step`` steps of an earlier run, with the error that the tensors hold now.

        Args:
            step: Reductions that count so far.
            unit: The unit of that error; default: unchanged.
        """
        self.step = step
        if unit is not None:
            self.unit.fill_(unit)
        self._can_discard = False  # the last reduction is not of this life

    @property
    def in_warmup(self) -> bool:
        """Whether the next reduction is still exact."""
        return self.step < self.config.warmup_steps

    @property
    def resets_now(self) -> bool:
        """Whether the next reduction sets the error to zero: every ``reset_interval``-th one after the warm-up."""
        interval = self.config.reset_interval
        return interval > 0 and (self.step + 1 - self.config.warmup_steps) % interval == 0

    @property
    def fixed_scale(self) -> Tensor | None:
        """With ``scale_mode="fixed"`` the value of one code step, in the unit of the last reduction; else ``None``."""
        if self.config.scale_mode == "block":
            return None
        return fixed_scale(self.unit, self.config.fixed_inverse_scale)

    def count_all_reduce(self) -> None:
        """Count a step whose reduction was an exact all-reduce by the caller; error and step stay as they are."""
        self._can_discard = False  # the reduction before it was another step's
        self.statistics.zero_()
        cost = self.exchange.ring_cost(self.layout.exact_itemsize, passes=2)
        self.traffic.add(cost, self.exchange.ring_cost(torch.bfloat16.itemsize), compressed=False)
