# mypy: allow-untyped-decorators
"""What the Triton kernels share: the arithmetic of :mod:`megatron_loco.core` for tiles in registers, and offsets.

A tile is fp32 ``[ROWS, COLUMNS]``; each row is a block, or one of the groups of a block whose codes share bytes. What
is said once per block is ``[ROWS, 1]``. Rules that keep the results equal to the reference, bit for bit:

* no fused multiply-add (the launches pass ``enable_fp_fusion=False``), divisions by ``tl.div_rn`` only;
* ``amax`` is the maximum of bit patterns, which keeps NaN;
* rounding half to even by adding ``1.5 * 2^23``, for magnitudes below 2^22. The sum's low bits are the code in two's
  complement, so no conversion to an integer is needed, and subtracting it again gives the code, of which 0 is ``+0``;
* bf16 is converted before any arithmetic, and rounded by hand: Triton's interpreter truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_loco.core.quantize import FIXED_SCALE_RANGE
from megatron_loco.core.quantize import MIN_AMAX as CORE_MIN_AMAX

MAGIC = tl.constexpr(1.5 * 2.0**23)
MAGIC_BITS = tl.constexpr(0x4B400000)
UNSIGNED_MAGIC_BITS = tl.constexpr(0x4B000000)
"""Of ``2^23``, whose lowest mantissa bit is worth 1."""
MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
EXPONENT_MASK = tl.constexpr(0x7F800000)
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
MIN_AMAX = tl.constexpr(CORE_MIN_AMAX)
SMALLEST_SCALE = tl.constexpr(FIXED_SCALE_RANGE[0])
LARGEST_SCALE = tl.constexpr(FIXED_SCALE_RANGE[1])
MAXIMUM = tl.standard._elementwise_max
SUM = tl.standard._sum_combine
"""For ``tl.reduce``. In the interpreter, ``tl.max`` and ``tl.sum`` fail unless Triton was imported for it; functions of
our own would be called there once per element."""
ELEMENT_STRIDE = tl.constexpr(0x91E10DA5)


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """The bit patterns of fp32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def value_of(bits: tl.tensor) -> tl.tensor:
    """The fp32 values of bit patterns."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Bit patterns of ``|x|``; as integers they are in the order of the magnitudes, NaN above all."""
    return bits_of(x) & MAGNITUDE_MASK


@triton.jit
def is_live(amax: tl.tensor) -> tl.tensor:
    """Neither a zero block nor one with NaN or Inf."""
    return (amax >= MIN_AMAX) & (bits_of(amax) < INFINITY_BITS)


@triton.jit
def row_max(x: tl.tensor) -> tl.tensor:
    """The largest of each row, ``[ROWS, 1]``."""
    return tl.reduce(x, 1, MAXIMUM, keep_dims=True)


@triton.jit
def row_sum(x: tl.tensor) -> tl.tensor:
    """The sum of each row, ``[ROWS, 1]``."""
    return tl.reduce(x, 1, SUM, keep_dims=True)


@triton.jit
def total_of(x: tl.tensor) -> tl.tensor:
    """The sum of everything, a scalar."""
    return tl.reduce(x, None, SUM)


@triton.jit
def with_marks(scale: tl.tensor, amax: tl.tensor) -> tl.tensor:
    """Scales, but 0 for zero blocks and NaN for those with a non-finite value."""
    marked = tl.where(is_live(amax), scale, 0.0)
    return value_of(tl.where(magnitude_bits(amax) < INFINITY_BITS, bits_of(marked), NAN_BITS))


@triton.jit
def quotient(numerator: tl.constexpr, amax: tl.tensor) -> tl.tensor:
    """``fl32(numerator / amax)``, with 1 in place of amax where the block is not live."""
    divisor = tl.where(is_live(amax), amax, 1.0)
    return tl.div_rn(numerator * 1.0, divisor)


@triton.jit
def field_value(field: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The fp32 value of the low ``BITS`` (2 to 8) bits of ``field``, in two's complement.

    Put into the mantissa of 2^23, with the sign bit inverted, which adds ``2^(BITS - 1)``: conversions of integers run
    at a quarter of the rate of everything else.
    """
    half: tl.constexpr = 2 ** (BITS - 1)
    biased = (field & (2 * half - 1)) ^ (UNSIGNED_MAGIC_BITS | half)
    return value_of(biased) - (8388608.0 + half)


@triton.jit
def mean_scale(total: tl.tensor, count: tl.tensor, amax: tl.tensor) -> tl.tensor:
    """The mean magnitude from the sum of :func:`magnitude_multiples` of ``count`` elements."""
    mean = tl.div_rn(total.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    return amax * (mean * (2.0**-18))


@triton.jit
def magnitude_multiples(x: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """``|x|`` in whole multiples of ``2^-18 amax``, int32; ``inverse`` is ``fl32(4 / amax)``. At most 2^18."""
    scaled = value_of(magnitude_bits(x)) * inverse * (2.0**16)
    return bits_of(scaled + MAGIC) - MAGIC_BITS


@triton.jit
def dither(first_row: tl.tensor, offset: tl.tensor, step_hash: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """:func:`megatron_loco.core.error_feedback.storage_dither` of the elements ``offset`` behind a row's first.

    ``(top + 0.5) * 2^-16`` is made of the top 16 bits of the phase without a conversion: as the mantissa of a number
    in ``[1, 2)``.
    """
    # The element's index modulo 2^32 is enough, as all of it is 32-bit arithmetic.
    start = first_row.to(tl.uint32) * ((BLOCK_SIZE * ELEMENT_STRIDE) & 0xFFFFFFFF) + step_hash.to(tl.uint32)
    phase = start + offset.to(tl.uint32) * ELEMENT_STRIDE
    mantissa = ((phase >> 9) & 0x7FFF80) | 0x3F800040
    return value_of(mantissa) - 1.0


@triton.jit
def power_below(bits: tl.tensor) -> tl.tensor:
    """Bit patterns of powers of two of about the given magnitudes (bit patterns of ``|x|``), exponents -126 to 126."""
    return tl.minimum(tl.maximum(bits & EXPONENT_MASK, 1 << 23), 253 << 23)


@triton.jit
def inverse_power(power: tl.tensor) -> tl.tensor:
    """The inverse, fp32, of powers of two that are given by their bit patterns."""
    return value_of((254 << 23) - power)


@triton.jit
def sum_of_squares(scaled_sum: tl.tensor, power: tl.tensor) -> tl.tensor:
    """fp64 sums of squares, from fp32 sums of squares of values that were multiplied by :func:`inverse_power`."""
    factor = value_of(power).to(tl.float64)
    return scaled_sum.to(tl.float64) * (factor * factor)


@triton.jit
def rounded_to(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 values in ``DTYPE`` (fp32, fp16 or bf16), rounded half to even."""
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, bits, 0x7FC0)
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(DTYPE)
    return result


@triton.jit
def place(programs_ptr: tl.tensor, UNIT: tl.constexpr, CODE_UNIT: tl.constexpr) -> tl.tuple:
    """Where the blocks of this program lie: ``(element, numel, row, codes, scales)``, int64 but for ``numel``.

    Args:
        programs_ptr: int64 ``[num_programs, 5]``, :class:`megatron_loco.kernels.triton_plan.Plan`.
        UNIT: What elements and their numbers are multiples of.
        CODE_UNIT: What the bytes of codes are multiples of.
    """
    item = programs_ptr + tl.program_id(0).to(tl.int64) * 5
    element = tl.multiple_of(tl.load(item), UNIT)
    numel = tl.multiple_of(tl.load(item + 1).to(tl.int32), UNIT)
    codes = tl.multiple_of(tl.load(item + 3), CODE_UNIT)
    return element, numel, tl.load(item + 2), codes, tl.load(item + 4)


@triton.jit
def offset_of(
    first: tl.tensor, block: tl.tensor, column: tl.tensor, k: tl.constexpr, STRIDE: tl.constexpr, SEGMENT: tl.constexpr
) -> tl.tensor:
    """Offsets of the columns of group ``k`` of blocks that lie ``STRIDE`` apart, int64 ``[ROWS, COLUMNS]``.

    What is added to ``first``, int64, stays below the size of a program.
    """
    return first.to(tl.int64) + (block * STRIDE + column + k * SEGMENT)
