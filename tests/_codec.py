"""The quantisation rules once more, one block at a time in numpy: what the package is compared with, bit for bit.

Shares no code with the package. All arithmetic is fp32, one rounding per operation.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.float32]

MIN_AMAX = 2.0**-110


def literal_dither(step: int, element: int) -> float:
    """The dither of one element, in whole numbers of 32 bits."""
    mask = 0xFFFFFFFF
    shift = step & mask
    shift ^= shift >> 16
    shift = (shift * 0x7FEB352D) & mask
    shift ^= shift >> 15
    shift = (shift * 0x846CA68B) & mask
    shift ^= shift >> 16
    return (((shift + element * 0x91E10DA5) & mask) // 2**16 + 0.5) / 2**16


def literal_quantize(
    block: Block, bits: int, *, dither: Block | None = None, fixed_scale: float | None = None
) -> tuple[NDArray[np.int64], np.float32]:
    """Codes and scale of one block, by the rules of ``megatron_loco/core/quantize.py``.

    Args:
        block: fp32, any length: real elements alone, without what fills up a partial block.
        bits: 1 to 16.
        dither: Added before rounding down, in place of rounding to nearest.
        fixed_scale: The scale of every block (not with dither).
    """
    limit = max(1, 2 ** (bits - 1) - 1)
    no_codes = np.full(block.size, 1 if bits == 1 else 0)
    if not np.isfinite(block).all() or (fixed_scale is not None and not 2.0**-100 <= fixed_scale <= 2.0**100):
        return no_codes, np.float32(np.nan)
    amax = np.abs(block).max()
    if amax < np.float32(MIN_AMAX):
        return no_codes, np.float32(0)
    with np.errstate(over="ignore"):  # only of a constant scale: cut off below
        if fixed_scale is not None:
            scale = np.float32(fixed_scale)
            codes = np.rint(block * (np.float32(1) / scale))
        elif bits == 1:
            scale = _mean_magnitude(block, amax)
        else:
            scale = amax * np.float32(1 / limit)
            scaled = block * (np.float32(limit) / amax)
            codes = np.rint(scaled) if dither is None else np.floor(scaled + dither)
    if bits == 1:
        return np.where(block < 0, -1, 1), scale
    return np.clip(codes, -limit, limit).astype(np.int64), scale


def _mean_magnitude(block: Block, amax: np.float32) -> np.float32:
    inverse = np.float32(4) / amax
    total = sum(int(np.rint(np.abs(x) * inverse * np.float32(2**16))) for x in block)
    return amax * (np.float32(total) / np.float32(block.size) * np.float32(2.0**-18))


def exact_mean_magnitude(block: Block) -> Fraction:
    """The mean of the magnitudes without any rounding."""
    return sum((abs(Fraction(float(x))) for x in block), Fraction(0)) / block.size


def literal_decode(codes: NDArray[np.int64], scale: np.float32) -> Block:
    """What receivers compute."""
    return codes.astype(np.float32) * scale
