# mypy: allow-untyped-decorators
# ruff: noqa: RUF005 (Triton has no starred expressions)
"""Triton kernels of encode; :mod:`megatron_loco.kernels.triton_backend` launches them.

``encode_blocks`` handles all blocks of a bucket in one launch, however many runs they lie in: a program takes up to
``ROWS`` consecutive blocks of one run (:mod:`megatron_loco.kernels.triton_plan`). ``encode_rest`` does what is left in
one launch: statistics, exact ranges, and zeros between the regions of the payloads.

A byte holds codes of ``GROUPS = 8 / BITS`` elements that lie ``SEGMENT = BLOCK_SIZE / GROUPS`` apart. A program has one
tile ``[ROWS, COLUMNS]`` per group, all with the same layout of threads, so that packing moves nothing between threads.
``COLUMNS`` is ``SEGMENT`` or the next power of two.

Offsets of elements and bytes are int64. ``UNIT`` is what all starts and lengths of runs are multiples of, in elements:
16 makes loads and stores up to 128 bits wide, 1 is right for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_loco.kernels.triton_numeric import (
    INFINITY_BITS,
    LARGEST_SCALE,
    MAGIC,
    NAN_BITS,
    SMALLEST_SCALE,
    SUM,
    bits_of,
    dither,
    inverse_power,
    is_live,
    magnitude_multiples,
    mean_scale,
    offset_of,
    place,
    power_below,
    quotient,
    row_max,
    row_sum,
    sum_of_squares,
    total_of,
    value_of,
    with_marks,
)


@triton.jit(do_not_specialize=["step_hash", "reset"])
def encode_blocks(
    grad_ptr: tl.tensor,
    error_ptr: tl.tensor,
    error_scale_ptr: tl.tensor,
    send_ptr: tl.tensor,
    fixed_scale_ptr: tl.tensor,
    programs_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    step_hash: tl.tensor,
    beta: tl.tensor,
    one_minus_beta: tl.tensor,
    reset: tl.tensor,
    BITS: tl.constexpr,
    ERROR_BITS: tl.constexpr,
    FIXED: tl.constexpr,
    INVERSE_LIMIT: tl.constexpr,
    INVERSE_ERROR_LIMIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    CODE_UNIT: tl.constexpr,
) -> None:
    """Write codes and scales of ``ROWS`` blocks, and update their error.

    Args:
        grad_ptr: The bucket.
        error_ptr: Codes of the error state, or the error itself; None where no error is kept.
        error_scale_ptr: Scales of the error state; None where it has none.
        send_ptr: The send buffer, uint8.
        fixed_scale_ptr: The scale of all blocks; None for a scale per block.
        programs_ptr: See :func:`place`.
        partial_ptr: Statistics of each program's blocks, fp64 ``[num_programs, 4]``.
        step_hash: :func:`megatron_loco.core.error_feedback.step_hash`, int32.
        beta: Weight of the old error.
        one_minus_beta: ``fl32(1 - beta)``.
        reset: Not 0: set the error to zero.
        BITS: Width of a code.
        ERROR_BITS: Width of the stored error: 0, 8, 16 or 32.
        FIXED: Whether all blocks have one scale.
        INVERSE_LIMIT: ``fl32(1 / L)`` of ``BITS``.
        INVERSE_ERROR_LIMIT: ``fl32(1 / L)`` of ``ERROR_BITS``.
        BLOCK_SIZE: Elements of a block.
        ROWS: Blocks per program.
        COLUMNS: Columns of a tile.
        UNIT: See the module.
        CODE_UNIT: What the bytes at which codes start are multiples of.
    """
    GROUPS: tl.constexpr = 8 // BITS
    SEGMENT: tl.constexpr = BLOCK_SIZE // GROUPS
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    ERROR_LIMIT: tl.constexpr = 2 ** (ERROR_BITS - 1) - 1
    element, numel, first_row, codes, scales = place(programs_ptr, UNIT, CODE_UNIT)
    block = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    count = numel - block * BLOCK_SIZE  # from the block's first element to the end of the program's part of the run
    used = count > 0
    in_segment = used & (column < SEGMENT)
    first_error = first_row * BLOCK_SIZE

    # 1. h = g + e
    grads: tl.tuple = ()
    olds: tl.tuple = ()
    compensated: tl.tuple = ()
    largest = tl.full([ROWS, COLUMNS], 0, tl.float32)
    largest_grad = tl.full([ROWS, COLUMNS], 0, tl.float32)
    if ERROR_BITS == 8 or ERROR_BITS == 16:
        old_scale = tl.load(error_scale_ptr + (first_row + block), mask=used, other=0.0)
    for k in tl.static_range(GROUPS):
        mask = in_segment & (column + k * SEGMENT < count)
        grad_offset = offset_of(element, block, column, k, BLOCK_SIZE, SEGMENT)
        grad = tl.load(grad_ptr + grad_offset, mask=mask, other=0.0).to(tl.float32)
        grads = grads + (grad,)
        if ERROR_BITS == 0:
            compensated = compensated + (grad,)
        else:
            error_offset = offset_of(first_error, block, column, k, BLOCK_SIZE, SEGMENT)
            old = tl.load(error_ptr + error_offset, mask=in_segment, other=0).to(tl.float32)
            if ERROR_BITS != 32:
                old = old * old_scale
            olds = olds + (old,)
            compensated = compensated + (grad + old,)
        largest = tl.maximum(largest, tl.abs(compensated[k]), propagate_nan=tl.PropagateNan.ALL)
        largest_grad = tl.maximum(largest_grad, tl.abs(grad))  # may lose NaN: its block does not count
    amax = value_of(row_max(bits_of(largest)))
    grad_power = power_below(bits_of(row_max(largest_grad)))
    grad_factor = inverse_power(grad_power)
    grad_squares = tl.full([ROWS, COLUMNS], 0, tl.float32)
    for k in tl.static_range(GROUPS):
        grad_squares += (grads[k] * grad_factor) * (grads[k] * grad_factor)
    grad_sum = sum_of_squares(row_sum(grad_squares), grad_power)

    # 2. Scale and codes
    # What is below 2^-60 of its block's largest |h| adds nothing to the statistics: a maximum of the residuals of their
    # own would hold all of them in registers.
    residual_power = power_below(bits_of(amax))
    if FIXED:
        fixed_scale = tl.load(fixed_scale_ptr)
        usable = (fixed_scale >= SMALLEST_SCALE) & (fixed_scale <= LARGEST_SCALE)
        amax = value_of(tl.where(usable, bits_of(amax), NAN_BITS))
        inverse = tl.div_rn(1.0, tl.where(usable, fixed_scale, 1.0))
        scale = with_marks(fixed_scale, amax)
        residual_power = tl.maximum(residual_power, power_below(bits_of(fixed_scale)))
    elif BITS == 1:
        inverse = quotient(4.0, amax)
        multiples = tl.full([ROWS, COLUMNS], 0, tl.int32)
        for k in tl.static_range(GROUPS):
            multiples += magnitude_multiples(compensated[k], inverse)
        num_elements = tl.minimum(count, BLOCK_SIZE)
        scale = with_marks(mean_scale(row_sum(multiples), num_elements, amax), amax)
    else:
        inverse = quotient(LIMIT, amax)
        scale = with_marks(amax * INVERSE_LIMIT, amax)
    finite = used & (bits_of(amax) < INFINITY_BITS)
    field_mask = tl.where(is_live(amax), 2**BITS - 1, 0)
    residual_factor = inverse_power(residual_power)
    residual_squares = tl.full([ROWS, COLUMNS], 0, tl.float32)
    packed = tl.full([ROWS, COLUMNS], 0, tl.int32)
    news: tl.tuple = ()
    largest_new = tl.full([ROWS, COLUMNS], 0, tl.float32)
    for k in tl.static_range(GROUPS):
        if BITS == 1:
            field = (compensated[k] < 0.0).to(tl.int32)
            decoded = value_of(bits_of(scale) ^ (field << 31))
        else:
            scaled = compensated[k] * inverse
            if FIXED:
                scaled = tl.minimum(tl.maximum(scaled, -LIMIT * 1.0), LIMIT * 1.0)
            shifted = scaled + MAGIC
            field = bits_of(shifted)
            decoded = (shifted - MAGIC) * scale
        packed = packed | ((field & field_mask) << (k * BITS))
        residual = compensated[k] - decoded
        if BITS == 1:  # a sign has no 0
            residual = tl.where(in_segment & (column + k * SEGMENT < count), residual, 0.0)
        residual_squares += (residual * residual_factor) * (residual * residual_factor)
        if ERROR_BITS != 0:
            news = news + (olds[k] * beta + residual * one_minus_beta,)
            largest_new = tl.maximum(largest_new, tl.abs(news[k]))  # a block with NaN is not stored
    tl.store(send_ptr + offset_of(codes, block, column, 0, SEGMENT, SEGMENT), packed.to(tl.uint8), mask=in_segment)
    tl.store((send_ptr + scales).to(tl.pointer_type(tl.float32)) + block, scale, mask=used)
    residual_sum = sum_of_squares(row_sum(residual_squares), residual_power)

    # 3. e' = beta * e + (1 - beta) * r
    error_sum = tl.full([ROWS, 1], 0, tl.float64)
    if ERROR_BITS != 0:
        keep = reset == 0
        # Blocks that are not finite keep their old error, bit for bit.
        written = finite | (used & (reset != 0))
        error_amax = row_max(largest_new)
        error_squares = tl.full([ROWS, COLUMNS], 0, tl.float32)
        if ERROR_BITS == 32:
            error_power = power_below(bits_of(error_amax))
            error_factor = inverse_power(error_power)
            for k in tl.static_range(GROUPS):
                error_squares += (news[k] * error_factor) * (news[k] * error_factor)
                error_offset = offset_of(first_error, block, column, k, BLOCK_SIZE, SEGMENT)
                tl.store(error_ptr + error_offset, tl.where(keep, news[k], 0.0), mask=in_segment & written)
            error_sum = sum_of_squares(row_sum(error_squares), error_power)
        else:
            kept = is_live(error_amax) & keep
            inverse_error = quotient(ERROR_LIMIT, error_amax)
            error_limit = tl.where(kept, ERROR_LIMIT * 1.0, 0.0)
            for k in tl.static_range(GROUPS):
                scaled = news[k] * inverse_error
                error_squares += scaled * scaled
                shift = dither(first_row, block * BLOCK_SIZE + (column + k * SEGMENT), step_hash, BLOCK_SIZE)
                rounded = tl.minimum(tl.maximum(tl.floor(scaled + shift), -error_limit), error_limit)
                stored = bits_of(rounded + MAGIC).to(error_ptr.dtype.element_ty)
                error_offset = offset_of(first_error, block, column, k, BLOCK_SIZE, SEGMENT)
                tl.store(error_ptr + error_offset, stored, mask=in_segment & written)
            error_scale = with_marks(error_amax * INVERSE_ERROR_LIMIT, error_amax)
            tl.store(error_scale_ptr + (first_row + block), tl.where(keep, error_scale, 0.0), mask=written)
            code_step = error_scale.to(tl.float64)
            error_sum = row_sum(error_squares).to(tl.float64) * (code_step * code_step)
        error_sum = tl.where(keep, error_sum, 0.0)

    partial_ptr += tl.program_id(0).to(tl.int64) * 4
    tl.store(partial_ptr, total_of(tl.where(finite, grad_sum, 0.0)))
    tl.store(partial_ptr + 1, total_of(tl.where(finite, residual_sum, 0.0)))
    tl.store(partial_ptr + 2, total_of(tl.where(finite, error_sum, 0.0)))
    tl.store(partial_ptr + 3, total_of((used & (bits_of(amax) >= INFINITY_BITS)).to(tl.float64)))


@triton.jit(do_not_specialize=["num_exact", "num_gaps", "num_partials"])
def encode_rest(
    grad_ptr: tl.tensor,
    send_ptr: tl.tensor,
    exact_ptr: tl.tensor,
    gaps_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    num_exact: tl.tensor,
    num_gaps: tl.tensor,
    num_partials: tl.tensor,
    ITEM: tl.constexpr,
    GAPS: tl.constexpr,
    GAP_BYTES: tl.constexpr,
    PARTIALS: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Add up the statistics (program 0), copy exact ranges (one item a program), fill gaps with zeros (``GAPS`` each).

    Args:
        grad_ptr: The bucket.
        send_ptr: The send buffer, uint8.
        exact_ptr: int64 ``[num_exact, 3]``: first element, number of elements (at most ``ITEM``), byte of the values.
        gaps_ptr: int64 ``[num_gaps, 2]``: byte and number of bytes, less than ``GAP_BYTES``.
        partial_ptr: Statistics that the programs of ``encode_blocks`` left, fp64 ``[num_partials, 4]``.
        statistics_ptr: fp64 ``[4]``, added to.
        num_exact: Number of items.
        num_gaps: Number of gaps.
        num_partials: Number of programs of ``encode_blocks``.
        ITEM: Largest number of elements of an item, a power of two.
        GAPS: Gaps per program.
        GAP_BYTES: A power of two.
        PARTIALS: Partial statistics that are added up at a time.
        UNIT: Items start at multiples of this, in elements, both here and there.
    """
    program = tl.program_id(0)
    if program == 0:
        which = tl.arange(0, 4)[None, :]
        total = tl.full([PARTIALS, 4], 0, tl.float64)
        for first in range(0, num_partials, PARTIALS):
            index = first + tl.arange(0, PARTIALS)[:, None]
            total += tl.load(partial_ptr + (index.to(tl.int64) * 4 + which), mask=index < num_partials, other=0.0)
        statistics = statistics_ptr + tl.arange(0, 4)
        tl.store(statistics, tl.load(statistics) + tl.reduce(total, 0, SUM))
    elif program <= num_exact:
        item = exact_ptr + (program - 1).to(tl.int64) * 3
        offset = tl.arange(0, ITEM)
        mask = offset < tl.multiple_of(tl.load(item + 1), UNIT)
        values = tl.load(grad_ptr + (tl.multiple_of(tl.load(item), UNIT) + offset), mask=mask)
        BYTES: tl.constexpr = UNIT * grad_ptr.dtype.element_ty.primitive_bitwidth // 8
        values_ptr = (send_ptr + tl.multiple_of(tl.load(item + 2), BYTES)).to(grad_ptr.dtype)
        tl.store(values_ptr + offset, values, mask=mask)
    else:
        index = (program - 1 - num_exact) * GAPS + tl.arange(0, GAPS)
        byte = tl.load(gaps_ptr + index.to(tl.int64) * 2, mask=index < num_gaps, other=0)[:, None]
        length = tl.load(gaps_ptr + index.to(tl.int64) * 2 + 1, mask=index < num_gaps, other=0)[:, None]
        following = tl.arange(0, GAP_BYTES)[None, :]
        tl.store(send_ptr + (byte + following), tl.full([GAPS, GAP_BYTES], 0, tl.uint8), mask=following < length)
