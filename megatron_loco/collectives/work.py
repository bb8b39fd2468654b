"""Handles of collectives whose results need a computation after the transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Transfer(Protocol):
    """What is needed of ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Block (CPU) or order the current stream (accelerator) behind the transfer."""

    def is_completed(self) -> bool:
        """Whether the transfer is done."""


class Work:
    """Transfers, and what remains to be computed from each; the result exists after :meth:`wait`.

    Args:
        transfers: Asynchronous collectives, in the order in which they were started.
        decode: Called with the index of each transfer, once and in order, after it.
        finish: Called once, after everything.
    """

    def __init__(
        self, transfers: Sequence[Transfer], decode: Callable[[int], None], finish: Callable[[], None]
    ) -> None:
        self._transfers = transfers
        self._decode = decode
        self._finish = finish
        self._num_decoded = 0
        self._is_done = False

    def wait(self) -> None:
        """Wait for each transfer and compute its part of the result while the others go on; later calls do nothing."""
        if self._is_done:
            return
        while self._num_decoded < len(self._transfers):
            self._transfers[self._num_decoded].wait()
            self._decode(self._num_decoded)
            # Only now: after a transfer that failed there is no result, and a second wait must not say that there is.
            self._num_decoded += 1
        self._finish()
        self._is_done = True

    def is_completed(self) -> bool:
        """Whether the result is there, or would be without waiting for the network."""
        return self._is_done or all(transfer.is_completed() for transfer in self._transfers[self._num_decoded :])


class StreamWork:
    """A result that is computed on a stream of its own; :meth:`wait` orders the current stream behind it.

    Args:
        done: Recorded on that stream after everything.
        finish: Called once, by the first :meth:`wait`.
    """

    def __init__(self, done: torch.cuda.Event, finish: Callable[[], None]) -> None:
        self._done = done
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Order the current stream behind the result, without blocking the CPU."""
        torch.cuda.current_stream().wait_event(self._done)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_completed(self) -> bool:
        """Whether the result is there."""
        return bool(self._done.query())
