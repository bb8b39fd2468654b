"""Checksum of the bytes of a tensor, computed where the tensor is."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_WORDS = 1 << 22
"""Words that are summed at a time: 32 MiB per int64 temporary, whatever the size of the tensor."""


def checksum(tensor: Tensor) -> Tensor:
    """Return ``sum((i + 1) * word_i)`` modulo ``2^64`` over the 32-bit words of a tensor, the last one filled with 0.

    Integer arithmetic: the same number on every device, in any order of summation. Any change within one word is found
    (below ``2^31`` words the product of a position and a difference cannot be 0), and so are words that changed places;
    other damage is missed by chance only.

    Args:
        tensor: Any dtype of 1, 2, 4 or 8 bytes, any shape, contiguous.

    Returns:
        int64 of shape ``[]`` on the device of ``tensor``.
    """
    data = tensor.detach().view(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS].to(torch.int64)
        positions = torch.arange(start + 1, start + 1 + piece.numel(), dtype=torch.int64, device=tensor.device)
        total += positions.mul_(piece).sum()
    return total
