# mypy: allow-untyped-decorators
# ruff: noqa: RUF005 (Triton has no starred expressions)
"""Triton kernels of decode-and-sum; programs, tiles and ``UNIT`` are as in :mod:`megatron_loco.kernels.triton_encode`.

``decode_blocks`` handles all blocks of a shard in one launch; ``decode_rest`` what is left: exact ranges and padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_loco.kernels.triton_numeric import (
    bits_of,
    field_value,
    offset_of,
    place,
    rounded_to,
    value_of,
)


@triton.jit
def decoded_group(packed: tl.tensor, scale: tl.tensor, k: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """``code * scale`` of the codes at bit ``k * BITS`` of bytes (int32)."""
    if BITS == 1:
        result = value_of(bits_of(scale) ^ ((packed >> k) << 31))
    else:
        result = field_value(packed >> (k * BITS), BITS) * scale
    return result


@triton.jit
def quotient_of_sum(total: tl.tensor, factor: tl.tensor, DIVIDE: tl.constexpr) -> tl.tensor:
    """The sum (``DIVIDE`` 0), or times ``factor``, a power of two (1), or divided by ``factor`` (2)."""
    if DIVIDE == 0:
        result = total
    elif DIVIDE == 1:
        result = total * factor
    else:
        result = tl.div_rn(total, factor)
    return result


@triton.jit(do_not_specialize=["world_size", "payload_units"])
def decode_blocks(
    recv_ptr: tl.tensor,
    output_ptr: tl.tensor,
    programs_ptr: tl.tensor,
    world_size: tl.tensor,
    payload_units: tl.tensor,
    factor: tl.tensor,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    CODE_UNIT: tl.constexpr,
    DIVIDE: tl.constexpr,
) -> None:
    """Sum ``ROWS`` blocks of all payloads in rank order, divide, and write them.

    Args:
        recv_ptr: Payloads in rank order, uint8.
        output_ptr: The shard.
        programs_ptr: See :func:`place`.
        world_size: Number of payloads.
        payload_units: Size of a payload in units of 16 bytes.
        factor: See :func:`quotient_of_sum`.
        BITS: Width of a code.
        BLOCK_SIZE: Elements of a block.
        ROWS: Blocks per program.
        COLUMNS: Columns of a tile.
        UNIT: What all starts and lengths of runs are multiples of, in elements.
        CODE_UNIT: What the bytes at which codes start are multiples of.
        DIVIDE: See :func:`quotient_of_sum`.
    """
    GROUPS: tl.constexpr = 8 // BITS
    SEGMENT: tl.constexpr = BLOCK_SIZE // GROUPS
    element, numel, _first_row, codes, scales = place(programs_ptr, UNIT, CODE_UNIT)
    block = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    count = numel - block * BLOCK_SIZE
    used = count > 0
    in_segment = used & (column < SEGMENT)
    packed_ptr = recv_ptr + offset_of(codes, block, column, 0, SEGMENT, SEGMENT)
    scale_ptr = recv_ptr + (scales + block * 4)

    # Begun with the first payload, not with zero: the sum of -0.0 is -0.0.
    packed = tl.load(packed_ptr, mask=in_segment, other=0).to(tl.int32)
    scale = tl.load(scale_ptr.to(tl.pointer_type(tl.float32)), mask=used, other=0.0)
    totals: tl.tuple = ()
    for k in tl.static_range(GROUPS):
        totals = totals + (decoded_group(packed, scale, k, BITS),)
    payload_bytes = payload_units.to(tl.int64) * 16
    for source in tl.range(1, world_size, loop_unroll_factor=4):
        start = source * payload_bytes
        packed = tl.load(packed_ptr + start, mask=in_segment, other=0).to(tl.int32)
        scale = tl.load((scale_ptr + start).to(tl.pointer_type(tl.float32)), mask=used, other=0.0)
        sums: tl.tuple = ()
        for k in tl.static_range(GROUPS):
            sums = sums + (totals[k] + decoded_group(packed, scale, k, BITS),)
        totals = sums
    for k in tl.static_range(GROUPS):
        result = rounded_to(quotient_of_sum(totals[k], factor, DIVIDE), output_ptr.dtype.element_ty)
        mask = in_segment & (column + k * SEGMENT < count)
        tl.store(output_ptr + offset_of(element, block, column, k, BLOCK_SIZE, SEGMENT), result, mask=mask)


@triton.jit(do_not_specialize=["num_exact", "world_size", "payload_units"])
def decode_rest(
    recv_ptr: tl.tensor,
    output_ptr: tl.tensor,
    exact_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    num_exact: tl.tensor,
    world_size: tl.tensor,
    payload_units: tl.tensor,
    factor: tl.tensor,
    ITEM: tl.constexpr,
    UNIT: tl.constexpr,
    DIVIDE: tl.constexpr,
) -> None:
    """Sum exact ranges and fill padding with zeros, one item a program.

    Args:
        recv_ptr: Payloads in rank order, uint8.
        output_ptr: The shard.
        exact_ptr: int64 ``[num_exact, 3]``: first element, number of elements (at most ``ITEM``), byte of the values.
        zeros_ptr: int64 ``[num_zeros, 2]``: first element and number of elements (at most ``ITEM``) of padding.
        num_exact: Number of items to sum.
        world_size: Number of payloads.
        payload_units: Size of a payload in units of 16 bytes.
        factor: See :func:`quotient_of_sum`.
        ITEM: Largest number of elements of an item, a power of two.
        UNIT: Items start at multiples of this, in elements.
        DIVIDE: See :func:`quotient_of_sum`.
    """
    program = tl.program_id(0)
    offset = tl.arange(0, ITEM)
    if program < num_exact:
        item = exact_ptr + program.to(tl.int64) * 3
        mask = offset < tl.multiple_of(tl.load(item + 1), UNIT)
        BYTES: tl.constexpr = UNIT * output_ptr.dtype.element_ty.primitive_bitwidth // 8
        values_ptr = recv_ptr + tl.multiple_of(tl.load(item + 2), BYTES)
        total = tl.load(values_ptr.to(output_ptr.dtype) + offset, mask=mask, other=0.0).to(tl.float32)
        payload_bytes = payload_units.to(tl.int64) * 16
        for source in tl.range(1, world_size, loop_unroll_factor=4):
            source_ptr = (values_ptr + source * payload_bytes).to(output_ptr.dtype)
            total += tl.load(source_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        result = rounded_to(quotient_of_sum(total, factor, DIVIDE), output_ptr.dtype.element_ty)
        tl.store(output_ptr + (tl.multiple_of(tl.load(item), UNIT) + offset), result, mask=mask)
    else:
        item = zeros_ptr + (program - num_exact).to(tl.int64) * 2
        zeros = tl.full([ITEM], 0, output_ptr.dtype.element_ty)
        tl.store(output_ptr + (tl.load(item) + offset), zeros, mask=offset < tl.load(item + 1))
