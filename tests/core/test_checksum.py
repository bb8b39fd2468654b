"""The checksum against Python's whole numbers, and the damage that it must find."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from megatron_loco.core import checksum as checksum_module
from megatron_loco.core.checksum import checksum


def _literal(tensor: Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 4)
    total = sum((i + 1) * word for i, (word,) in enumerate(struct.iter_unpack("<i", data)))
    return (total + 2**63) % 2**64 - 2**63


def _cases() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    integers = [
        torch.randint(-(2**63), 2**63 - 1, (n,), dtype=torch.int64, generator=generator).view(torch.int8)[: 8 * n - cut]
        for n, cut in ((1, 7), (1, 5), (3, 1), (40, 0), (129, 3))
    ]
    floats = torch.randn(7, 33, generator=generator)
    return [
        *integers,
        floats,
        floats.bfloat16(),
        floats.double() * 1e300,
        torch.full((5,), torch.nan),
        torch.zeros(11, dtype=torch.int16),
        torch.empty(0, 32, dtype=torch.int8),
        torch.full((3, 32), -1, dtype=torch.int8),
        torch.tensor(1.5),
    ]


@pytest.mark.parametrize("piece", [1, 7, 1 << 22])
def test_equals_whole_numbers(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(checksum_module, "PIECE_WORDS", piece)
    for tensor in _cases():
        result = checksum(tensor)
        assert result.shape == ()
        assert result.item() == _literal(tensor), (tensor.dtype, tensor.shape)


def test_every_flipped_bit_and_every_exchanged_word_is_found() -> None:
    tensor = torch.randint(-128, 128, (4, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    intact = checksum(tensor).item()
    for position in range(tensor.numel()):
        for bit in range(8):
            damaged = tensor.clone()
            damaged.view(-1).view(torch.uint8)[position] ^= 1 << bit
            assert checksum(damaged).item() != intact
    words = tensor.view(-1).view(torch.int32)
    assert words.unique().numel() == words.numel()
    for i in range(words.numel()):
        for j in range(i):
            damaged = tensor.clone()
            exchanged = damaged.view(-1).view(torch.int32)
            exchanged[i], exchanged[j] = words[j], words[i]
            assert checksum(damaged).item() != intact


def test_lost_pages_are_found() -> None:
    tensor = torch.randint(-128, 128, (8, 4096), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    intact = checksum(tensor).item()
    for row in range(8):
        damaged = tensor.clone()
        damaged[row] = 0
        assert checksum(damaged).item() != intact
    assert checksum(torch.zeros_like(tensor)).item() == 0
