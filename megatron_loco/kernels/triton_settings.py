"""Compile-time arguments and launch options of the Triton kernels: a fixed table; imports no Triton.

Fixed and not tuned at run time: what depends on timing would differ from run to run, and tuning cannot run inside a
CUDA graph. Each function returns keyword arguments of a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_loco.core.quantize import fp32, max_code
from megatron_loco.core.wire import ALIGNMENT_BYTES

ELEMENTS_PER_PROGRAM = 4096
"""The largest block size: a program has at least one whole block."""
ITEM_ELEMENTS = 2048
"""Most elements of an exact range or of padding that one program handles."""
GAPS_PER_PROGRAM = 64
GAP_BYTES = 16
"""Gaps in a payload are shorter: its regions start at multiples of 16 bytes."""
PARTIALS_AT_A_TIME = 512

OPTIONS = {"num_stages": 1, "enable_fp_fusion": False}
"""No fused multiply-add: a product that is not rounded gives other codes than the reference at borders."""


@dataclass(frozen=True)
class Tile:
    """Shape of the programs of ``encode_blocks`` and ``decode_blocks``.

    Attributes:
        rows: Blocks per program.
        columns: Bytes of codes per block, or the next power of two.
    """

    rows: int
    columns: int


@cache
def tile(block_size: int, bits: int) -> Tile:
    """Programs of ``ELEMENTS_PER_PROGRAM`` elements, fewer if the block size is no power of two."""
    padded = 1 << (block_size - 1).bit_length()
    return Tile(rows=ELEMENTS_PER_PROGRAM // padded, columns=padded * bits // 8)


def code_unit(block_size: int, bits: int) -> int:
    """What the byte at which a block's codes start is a multiple of, up to ``ALIGNMENT_BYTES``."""
    return math.gcd(ALIGNMENT_BYTES, block_size * bits // 8)


@cache
def encode_settings(block_size: int, bits: int, error_bits: int, fixed: bool, unit: int) -> dict[str, Any]:
    """Of ``encode_blocks``.

    With 4 warps a thread has 32 elements, and a quarter fewer instructions per element than with 16; 128 registers are
    enough for it, but for an error in fp32, some of which would spill two of them. Codes of 8 bits would need more, as
    all 32 elements are then of one tile.
    """
    return {
        "BITS": bits,
        "ERROR_BITS": error_bits,
        "FIXED": fixed,
        "INVERSE_LIMIT": fp32(1.0 / max_code(bits)),
        "INVERSE_ERROR_LIMIT": fp32(1.0 / max_code(error_bits or 8)),
        "BLOCK_SIZE": block_size,
        "ROWS": tile(block_size, bits).rows,
        "COLUMNS": tile(block_size, bits).columns,
        "UNIT": unit,
        "CODE_UNIT": code_unit(block_size, bits),
        "num_warps": 8 if bits == 8 else 4,
        "maxnreg": None if error_bits == 32 else 128,
        **OPTIONS,
    }


@cache
def decode_settings(block_size: int, bits: int, unit: int, divide: int) -> dict[str, Any]:
    """Of ``decode_blocks``; 16 elements per thread, so that a warp's stores of bf16 leave no gaps."""
    return {
        "BITS": bits,
        "BLOCK_SIZE": block_size,
        "ROWS": tile(block_size, bits).rows,
        "COLUMNS": tile(block_size, bits).columns,
        "UNIT": unit,
        "CODE_UNIT": code_unit(block_size, bits),
        "DIVIDE": divide,
        "num_warps": 8,
        **OPTIONS,
    }


@cache
def encode_rest_settings(unit: int) -> dict[str, Any]:
    """Of ``encode_rest``."""
    return {
        "ITEM": ITEM_ELEMENTS,
        "GAPS": GAPS_PER_PROGRAM,
        "GAP_BYTES": GAP_BYTES,
        "PARTIALS": PARTIALS_AT_A_TIME,
        "UNIT": unit,
        "num_warps": 4,
        **OPTIONS,
    }


@cache
def decode_rest_settings(unit: int, divide: int) -> dict[str, Any]:
    """Of ``decode_rest``."""
    return {"ITEM": ITEM_ELEMENTS, "UNIT": unit, "DIVIDE": divide, "num_warps": 4, **OPTIONS}


def division(divisor: int) -> tuple[int, float]:
    """How a sum is divided, ``(DIVIDE, factor)``: not at all, by the exact inverse of a power of two, or truly."""
    if divisor == 1:
        return 0, 1.0
    if divisor & (divisor - 1) == 0:
        return 1, 1.0 / divisor
    return 2, float(divisor)
