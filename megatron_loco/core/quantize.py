"""Block-wise symmetric quantisation: scale rules, rounding and packing, in plain torch.

This is the arithmetic that every backend is held to, bit for bit. Order of operations for a block ``h`` of fp32 values,
``L = 2^(bits-1) - 1`` (:func:`max_code`):

1. ``amax``: the largest ``|h|``, taken as the integer maximum of the bit patterns, so that NaN and Inf order above
   every finite value and cannot be dropped (a floating-point maximum may drop NaN).
2. NaN or Inf in the block: ``scale = NaN``. ``amax < MIN_AMAX``: ``scale = 0``. No other floor exists; a block of 1e-9
   keeps full resolution. The codes of such blocks are 0 (1 bit: +1).
3. Else codes and scale follow from one of the rules below, in fp32 without fused multiply-add.
4. Receivers compute ``codes * scale`` in fp32.

2 bits and more (:func:`quantize_blocks`): ``scale = amax * fl32(1 / L)`` and ``codes = round_half_even(h * (L /
amax))``: one correctly rounded division per block, one multiplication per element. An element that is 0 stays 0.

1 bit (:func:`quantize_signs`): codes are signs, ``scale`` is the mean of ``|h|``, which is the sign code's smallest
squared error. No code stands for 0: elements whose gradient is exactly zero are moved by one scale up or down (error
feedback takes it back over the steps); with 2 bits and more they never move.

One scale for everything (:func:`quantize_fixed`): what the range of the codes cannot hold is cut off, and stays in the
residual.

Source: symmetric amax quantisation as in the public LoCo implementations (DeepSpeed PR 6730); sign with the mean as in
1-bit SGD and EF-signSGD (arXiv 1901.09847); one constant scale as in the LoCo authors' first experiment; NaN rule and
packing: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_AMAX = 2.0**-110
"""Blocks whose largest magnitude is below this (8e-34) count as zero. Above it no quotient overflows fp32, and every
scale is a normal number, down to ``amax / 32767`` of stored errors and ``amax / 4096`` of a mean, so that hardware
which flushes subnormal numbers agrees."""

FIXED_SCALE_RANGE = (2.0**-100, 2.0**100)
"""Where a constant scale may lie; its reciprocal, and its products with codes, are normal numbers there."""

_MAGNITUDE_MASK = 0x7FFFFFFF
_MEAN_BITS = 18
# 4096 elements of 2^18 each fit in int32.


def max_code(bits: int) -> int:
    """Largest code of a width: 7 for 4 bits, 127 for 8. Codes are symmetric; those of 1 bit are -1 and 1."""
    return max(1, int(2 ** (bits - 1) - 1))


def block_amax(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each row; NaN or Inf if the row holds one.

    Args:
        blocks: fp32, shape ``[num_blocks, block_size]``, contiguous.

    Returns:
        fp32, shape ``[num_blocks]``.
    """
    magnitudes = blocks.view(torch.int32).bitwise_and(_MAGNITUDE_MASK)
    return magnitudes.amax(dim=1).view(torch.float32)


def quantize_wire(blocks: Tensor, bits: int, numel: int, fixed_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise what travels, by the rule for its width and scale mode.

    Args:
        blocks: fp32, shape ``[num_blocks, block_size]``, contiguous.
        bits: Width of a code: 1, 2, 4 or 8.
        numel: Elements of ``blocks`` that count, in row-major order. Those behind are 0 and fill up the last row; there
            are fewer than ``block_size`` of them.
        fixed_scale: :func:`fixed_scale`; default: a scale per row.

    Returns:
        ``(codes, scales)``: int8 of the shape of ``blocks``; fp32 of shape ``[num_blocks]``, NaN for rows with a
        non-finite value.
    """
    if fixed_scale is not None:
        return quantize_fixed(blocks, bits, fixed_scale)
    if bits == 1:
        return quantize_signs(blocks, numel)
    return quantize_blocks(blocks, bits)


def quantize_blocks(blocks: Tensor, bits: int, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise each row with a scale from its largest magnitude.

    Args:
        blocks: fp32, shape ``[num_blocks, block_size]``, contiguous.
        bits: Width of a code, 2 to 16.
        dither: Round ``x`` to ``floor(fl32(x + dither))``, limited to the range of codes, instead of to the nearest
            code; fp32 of the shape of ``blocks``, in ``(0, 1)``. Codes of 8 bits: integers, 0 among them, stay what
            they are.

    Returns:
        ``(codes, scales)``: int8 (more than 8 bits: int16) of the shape of ``blocks``; fp32 of shape ``[num_blocks]``.
        Rows with a non-finite value have scale NaN and codes 0.
    """
    limit = max_code(bits)
    amax = block_amax(blocks)
    inverse = _quotient(float(limit), amax)
    scaled = torch.where(_is_live(amax)[:, None], blocks, 0.0) * inverse[:, None]
    # Limited because the quotient may be rounded up: 127.00001 + 0.99999 is 128.
    rounded = torch.round(scaled) if dither is None else torch.floor(scaled + dither).clamp(-limit, limit)
    codes = rounded.to(torch.int8 if bits <= 8 else torch.int16)
    return codes, _with_marks(amax * fp32(1.0 / limit), amax)


def quantize_signs(blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Replace each row by its signs and the mean of its magnitudes.

    The mean does not depend on the order of summation: it is taken over whole multiples of ``2^-18 * amax``, in exact
    integer arithmetic. In this order, with ``n`` the number of the row's elements that count::

        m = int32(round_half_even((|h| * fl32(4 / amax)) * 2^16))
        scale = amax * (fl32(fl32(sum(m)) / fl32(n)) * 2^-18)

    Both powers of two are exact, and ``4 / amax`` is a normal number for every amax. The scale is at most ``amax``, and
    off the exact mean by at most ``amax * (2^-19 + 2^-21)``.

    Args:
        blocks: fp32, shape ``[num_blocks, block_size]``, contiguous.
        numel: Elements that count, see :func:`quantize_wire`; the others enter neither sum nor ``n``.

    Returns:
        ``(codes, scales)``: int8 of the shape of ``blocks``, -1 where ``h < 0``, else 1 (0 and -0 among them); fp32 of
        shape ``[num_blocks]``. Rows with a non-finite value have scale NaN and codes 1.
    """
    num_blocks, block_size = blocks.shape
    amax = block_amax(blocks)
    live = torch.where(_is_live(amax)[:, None], blocks, 0.0)
    multiples = live.abs().mul_(_quotient(4.0, amax)[:, None]).mul_(2.0 ** (_MEAN_BITS - 2)).round_()
    counts = torch.full_like(amax, block_size)
    counts[-1:] = numel - (num_blocks - 1) * block_size
    mean = torch.div(multiples.to(torch.int32).sum(dim=1).to(torch.float32), counts) * 2.0**-_MEAN_BITS
    return _signs(live), _with_marks(amax * mean, amax)


def fixed_scale(unit: Tensor, inverse_scale: float) -> Tensor:
    """Return the value of one code step, ``fl32(unit / fl32(inverse_scale))``, fp32 of shape ``[]``.

    Args:
        unit: What the gradients are multiplied by (loss scale, token count), fp32 of shape ``[]``.
        inverse_scale: Code steps per unit of the gradient itself (98304 in the authors' experiment).
    """
    return torch.div(unit, torch.full_like(unit, inverse_scale))


def quantize_fixed(blocks: Tensor, bits: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for all rows: ``codes = clamp(round_half_even(h * fl32(1 / scale)), -L, L)``.

    One correctly rounded division per call. The limits apply before the conversion to integers, so that ``h / scale``
    may overflow. 1 bit: signs as in :func:`quantize_signs`. Rows of zeros (``amax < MIN_AMAX``) have scale 0 as with
    every other rule, which also keeps 1 bit from moving them.

    Args:
        blocks: fp32, shape ``[num_blocks, block_size]``, contiguous.
        bits: Width of a code, 1 to 8.
        scale: :func:`fixed_scale`, on the same device. Outside ``FIXED_SCALE_RANGE`` (or not finite), all rows count as
            non-finite: the step is lost as one with NaN gradients is, and not sent as rubbish.

    Returns:
        ``(codes, scales)`` as :func:`quantize_wire` has them.
    """
    limit = max_code(bits)
    smallest, largest = FIXED_SCALE_RANGE
    usable = (scale >= smallest) & (scale <= largest)
    # NaN in place of amax marks the row.
    amax = torch.where(usable, block_amax(blocks), torch.nan)
    live = torch.where(_is_live(amax)[:, None], blocks, 0.0)
    if bits == 1:
        codes = _signs(live)
    else:
        inverse = torch.div(torch.ones_like(scale), torch.where(usable, scale, 1.0))
        codes = live.mul_(inverse).round_().clamp_(-limit, limit).to(torch.int8)
    return codes, _with_marks(scale.expand_as(amax), amax)


def dequantize_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return ``codes * scales`` in fp32, shape of ``codes`` (``[num_blocks, block_size]``)."""
    return codes.to(torch.float32) * scales[:, None]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of a block into bytes.

    A block of ``B`` codes becomes ``B * bits / 8`` bytes; byte ``i`` holds the codes of elements ``i + k * B * bits /
    8`` at bit ``k * bits`` (for 4 bits: element ``i`` low, element ``i + B/2`` high). Elements of one byte lie half a
    block apart and not side by side, so that vector code needs no shuffle. A code of 1 bit is its sign bit: 0 for +1, 1
    for -1.

    Args:
        codes: int8, shape ``[num_blocks, block_size]``, two's complement within ``bits`` bits (1 bit: -1 or 1).
        bits: 1, 2, 4 or 8.

    Returns:
        uint8, shape ``[num_blocks, block_size * bits // 8]``.
    """
    if bits == 8:
        return codes.view(torch.uint8)
    per_byte = 8 // bits
    fields = codes.view(torch.uint8)
    fields = fields >> 7 if bits == 1 else fields.bitwise_and(2**bits - 1)
    fields = fields.view(codes.shape[0], per_byte, -1)
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
    codes = torch.cat(fields, dim=1)
    return codes.bitwise_or_(1) if bits == 1 else codes  # 0 and -1 to 1 and -1


def fp32(value: float) -> float:
    """Round a Python float to fp32 once, as a compiled kernel receives its constants."""
    return float(torch.tensor(value, dtype=torch.float32))


def _is_live(amax: Tensor) -> Tensor:
    # Neither a zero block nor one with NaN or Inf; comparisons with NaN are false.
    return (amax >= MIN_AMAX) & (amax < torch.inf)


def _quotient(numerator: float, amax: Tensor) -> Tensor:
    # torch.div and not ``numerator / amax``, which torch computes as a rounded reciprocal times numerator. 1.0 stands
    # in for amax where the block is not live: its elements are replaced by 0, and 0 times a finite quotient is 0.
    return torch.div(torch.full_like(amax, numerator), torch.where(_is_live(amax), amax, 1.0))


def _with_marks(scales: Tensor, amax: Tensor) -> Tensor:
    # 0 for zero blocks, NaN for those with a non-finite value.
    scales = torch.where(_is_live(amax), scales, 0.0)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def _signs(blocks: Tensor) -> Tensor:
    return 1 - 2 * (blocks < 0).to(torch.int8)
