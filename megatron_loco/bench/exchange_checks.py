"""What ranks of :mod:`megatron_loco.bench.exchange` report, and the checks before and after anything is timed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

WIRE_TOLERANCE = 0.02
"""Of packets of 9,000 bytes, 66 are headers: 0.7 %. As much again if every packet is acknowledged by one of its own,
which depends on timing; and Gloo's own messages."""


@dataclass
class Round:
    """One timed call of every arm on one rank.

    Attributes:
        seconds: By arm, from the barrier to the end.
        cpu_seconds: By arm, of the whole process, user and system.
        user_seconds: Of the round.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    user_seconds: float = 0.0


@dataclass
class Check:
    """What one rank found before anything was timed.

    Attributes:
        sent_bytes: Counted at the interface, by arm.
        wire_bytes: What each arm should send, ``None`` if that is Gloo's affair.
        num_chunks: All-to-alls, by arm.
        relative_error: Of the sum, by arm, against the ring in fp32.
        backend: Which implementation encodes and decodes.
    """

    sent_bytes: dict[str, float]
    wire_bytes: dict[str, float | None]
    num_chunks: dict[str, int]
    relative_error: dict[str, float]
    backend: str


def check_equal(results: dict[str, Tensor]) -> None:
    """Compare results bit for bit.

    Raises:
        RuntimeError: one differs from the first, in how many elements.
    """
    (first, expected), *others = results.items()
    for name, result in others:
        differs = result.view(torch.uint8) != expected.view(torch.uint8)
        if wrong := int(differs.view(-1, result.element_size()).any(1).sum()):
            raise RuntimeError(f"{name}: differs from '{first}' in {wrong} elements; nothing is reported")


def check_sent(sent: dict[str, float], wire_bytes: dict[str, float | None]) -> None:
    """Compare what was counted with what should have been sent.

    Raises:
        RuntimeError: they differ by more than :data:`WIRE_TOLERANCE`.
    """
    for name, expected in wire_bytes.items():
        if expected and abs(sent[name] / expected - 1) > WIRE_TOLERANCE:
            raise RuntimeError(f"{name}: sent {sent[name]:.0f} bytes, not {expected:.0f}; nothing is reported")
