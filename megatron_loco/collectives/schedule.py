"""In what pieces and on which streams a bucket is encoded, sent and decoded. No choice here changes a result."""

from __future__ import annotations

import functools

import torch

from megatron_loco.config import LoCoConfig

AUTO_CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**24}
"""Bytes per all-to-all where ``--loco-chunk-bytes`` leaves it open.

``cpu``: measured with ``python -m megatron_loco.bench.exchange``. ``cuda``: not measured; large enough for the link's
full rate, and for few launches."""


def chunk_bytes(config: LoCoConfig, device: torch.device) -> int:
    """Return how many bytes a rank sends in one all-to-all."""
    return config.chunk_bytes or AUTO_CHUNK_BYTES.get(device.type, AUTO_CHUNK_BYTES["cuda"])


@functools.cache
def decode_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which everything that arrives on ``device`` is decoded, beside the encoding of the rest."""
    return torch.cuda.Stream(device)
