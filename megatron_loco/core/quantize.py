"""Block-wise symmetric quantisation: scale rule, rounding and packing, in plain torch.

This is the arithmetic that every backend is held to, bit for bit. Order of operations for a block ``h`` of fp32 values,
``L = 2^(bits-1) - 1``:

1. ``amax``: the largest ``|h|``, taken as the integer maximum of the bit patterns, so that NaN and Inf order above
   every finite value and cannot be dropped (a floating-point maximum may drop NaN).
2. NaN or Inf in the block: ``scale = NaN``, all codes 0.
   ``amax < MIN_AMAX``: ``scale = 0``, all codes 0. No other floor exists; a block of 1e-9 keeps full resolution.
3. ``scale = amax * fl32(1 / L)`` and ``codes = round_half_even(h * (L / amax))``: one correctly rounded division per
   block, one multiplication per element, no fused multiply-add.
4. Receivers compute ``codes * scale`` in fp32.

Source: symmetric amax quantisation as in the public LoCo implementations (DeepSpeed PR 6730); NaN rule and packing:
ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_AMAX = 2.0**-118
"""Blocks whose largest magnitude is below this (3e-36) count as zero: ``127 / amax`` cannot overflow fp32, and
``amax / 127`` is a normal number, so that hardware which flushes subnormal ones agrees."""

_MAGNITUDE_MASK = 0x7FFFFFFF


def max_code(bits: int) -> int:
    """Largest code of a width: 7 for 4 bits, 127 for 8. Codes are symmetric, ``-max_code .. max_code``."""
    return int(2 ** (bits - 1) - 1)


def block_amax(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each row; NaN or Inf if the row holds one.

    Args:
        blocks: fp32, shape ``[num_blocks, block_size]``, contiguous.

    Returns:
        fp32, shape ``[num_blocks]``.
    """
    magnitudes = blocks.view(torch.int32).bitwise_and(_MAGNITUDE_MASK)
    return magnitudes.amax(dim=1).view(torch.float32)


def quantize_blocks(blocks: Tensor, bits: int, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise each row with its own scale.

    Args:
        blocks: fp32, shape ``[num_blocks, block_size]``, contiguous.
        bits: Width of a code, 2 to 8.
        dither: Round ``x`` to ``floor(x + dither)``, limited to the range of codes, instead of to the nearest code;
            fp32 of the shape of ``blocks``, in ``(0, 1)``. Integers, 0 among them, stay what they are.

    Returns:
        ``(codes, scales)``: int8 of the shape of ``blocks``; fp32 of shape ``[num_blocks]``. Rows with a non-finite
        value have scale NaN and codes 0.
    """
    limit = max_code(bits)
    amax = block_amax(blocks)
    finite = torch.isfinite(amax)
    live = finite & (amax >= MIN_AMAX)
    zero = torch.zeros((), dtype=torch.float32, device=blocks.device)
    # torch.div and not ``limit / amax``, which torch computes as a rounded reciprocal times limit. 1.0 stands in for a
    # dead amax: the quotient is thrown away, but must not be Inf or NaN on its way.
    quotient = torch.div(torch.full_like(amax, limit), torch.where(live, amax, 1.0))
    inverse = torch.where(live, quotient, zero)
    scaled = torch.where(live[:, None], blocks, zero) * inverse[:, None]
    # Limited because the quotient may be rounded up: 127.00001 + 0.99999 is 128.
    rounded = torch.round(scaled) if dither is None else torch.floor(scaled + dither).clamp(-limit, limit)
    codes = rounded.to(torch.int8)
    scales = torch.where(live, amax * fp32(1.0 / limit), zero)
    return codes, torch.where(finite, scales, torch.full_like(scales, torch.nan))


def dequantize_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return ``codes * scales`` in fp32, shape of ``codes`` (``[num_blocks, block_size]``)."""
    return codes.to(torch.float32) * scales[:, None]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of a block into bytes.

    A block of ``B`` codes becomes ``B * bits / 8`` bytes; byte ``i`` holds the codes of elements ``i + k * B * bits /
    8`` at bit ``k * bits`` (for 4 bits: element ``i`` low, element ``i + B/2`` high). Elements of one byte lie half a
    block apart and not side by side, so that vector code needs no shuffle.

    Args:
        codes: int8, shape ``[num_blocks, block_size]``, two's complement within ``bits`` bits.
        bits: 2, 4 or 8.

    Returns:
        uint8, shape ``[num_blocks, block_size * bits // 8]``.
    """
    if bits == 8:
        return codes.view(torch.uint8)
    per_byte = 8 // bits
    fields = codes.view(torch.uint8).bitwise_and(2**bits - 1).view(codes.shape[0], per_byte, -1)
    packed = fields[:, 0]
    for k in range(1, per_byte):
        packed = packed | (fields[:, k] << (k * bits))
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack_codes`: uint8 ``[num_blocks, block_size * bits // 8]`` to int8 ``[num_blocks, block_size]``."""
    if bits == 8:
        return packed.view(torch.int8)
    per_byte = 8 // bits
    # Shift each field to the top of its byte, then an arithmetic shift down extends the sign.
    fields = [(packed << (8 - bits * (k + 1))).view(torch.int8) >> (8 - bits) for k in range(per_byte)]
    return torch.cat(fields, dim=1)


def fp32(value: float) -> float:
    """Round a Python float to fp32 once, as a compiled kernel receives its constants."""
    return float(torch.tensor(value, dtype=torch.float32))
