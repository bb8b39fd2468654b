"""Handle of a collective whose result needs a computation after the transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Transfer(Protocol):
    """What is needed of ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Block (CPU) or order the current stream (accelerator) behind the transfer."""

    def is_completed(self) -> bool:
        """Whether the transfer is done."""


class Work:
    """A transfer and what remains to be computed from it; the result exists after :meth:`wait`.

    Args:
        transfer: The asynchronous collective.
        finish: Called once, by the first :meth:`wait`, after the transfer.
    """

    def __init__(self, transfer: Transfer, finish: Callable[[], None]) -> None:
        self._transfer = transfer
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Wait for the transfer and compute the result; later calls do nothing."""
        if self._finish is None:
            return
        self._transfer.wait()
        self._finish()
        # Only now: after a transfer that failed there is no result, and a second wait must not say that there is.
        self._finish = None

    def is_completed(self) -> bool:
        """Whether the result is there, or would be without waiting for the network."""
        return self._finish is None or self._transfer.is_completed()
