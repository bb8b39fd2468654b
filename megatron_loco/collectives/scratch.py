"""Send and receive buffers shared by all buckets of a job: as many as collectives are in flight, none per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor


class ScratchPool:
    """Byte buffers that are taken for one collective and given back when it is done.

    A request is served by the smallest free buffer that is large enough; without one, the largest free buffer is
    replaced by a larger one. After the first steps, which show the largest sizes, nothing is allocated any more.

    On an accelerator a buffer may be given back once the stream that takes it next is ordered behind its last use; the
    collectives give back after ``wait()``, which orders the current stream behind the transfer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self.allocated_bytes = 0
        """Memory of all buffers, free or taken."""
        self.num_allocations = 0
        """How many times memory was allocated; constant in the steady state."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate now what it takes to lend buffers of these sizes at the same time; what is there is counted in."""
        taken = [self.take(size) for size in sorted(sizes, reverse=True)]
        for buffer in taken:
            self.give_back(buffer)

    def take(self, num_bytes: int) -> Tensor:
        """Return a uint8 tensor of shape ``[num_bytes]`` with undefined contents.

        It is the head of a buffer that may be larger; hand the same tensor to :meth:`give_back`.
        """
        fitting = [buffer for buffer in self._free if buffer.numel() >= num_bytes]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._remove(buffer)
        else:
            if self._free:
                largest = max(self._free, key=Tensor.numel)
                self._remove(largest)
                self.allocated_bytes -= largest.numel()
                del largest
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.allocated_bytes += num_bytes
            self.num_allocations += 1
        return buffer[:num_bytes]

    def give_back(self, taken: Tensor) -> None:
        """Return a tensor of :meth:`take` to the pool; its owner must not touch it afterwards."""
        buffer = taken if taken._base is None else taken._base
        # Twice in the pool, it would be lent to two collectives at once.
        assert not any(free is buffer for free in self._free), "given back twice"
        self._free.append(buffer)

    def _remove(self, buffer: Tensor) -> None:
        self._free = [free for free in self._free if free is not buffer]


def sizes_in_flight(groups: Sequence[Sequence[int]], at_once: int) -> list[int]:
    """Return sizes of buffers that can serve any ``at_once`` consecutive groups of collectives at the same time.

    Args:
        groups: Sizes in bytes of all buffers that each group takes, in the order in which groups start.
        at_once: How many groups are in flight at most.

    Returns:
        Sizes, largest first: the i-th is the largest of what is i-th largest in any such set.
    """
    windows = [
        sorted((size for group in groups[first : first + at_once] for size in group), reverse=True)
        for first in range(max(1, len(groups) - at_once + 1))
    ]
    return [max(sizes) for sizes in zip_longest(*windows, fillvalue=0)]
