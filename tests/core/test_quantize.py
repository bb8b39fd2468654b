"""Quantisation with a scale from amax, and packing, against an independent numpy implementation (``tests/_codec.py``),
bitwise, and what the algorithm needs of it. Signs and constant scales have files of their own."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_loco.core.quantize import (
    MIN_AMAX,
    block_amax,
    dequantize_blocks,
    fp32,
    max_code,
    pack_codes,
    quantize_blocks,
    unpack_codes,
)
from tests._codec import literal_quantize

WIDTHS = (2, 4, 8)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST_SUBNORMAL = 2.0**-149
NONFINITE = (math.nan, math.inf, -math.inf)


def random_blocks(num_blocks: int, block_size: int, seed: int) -> Tensor:
    """Blocks of very different magnitudes and shapes: normal, heavy-tailed, sparse, one spike."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(num_blocks, block_size, generator=generator)
    blocks[1::4] = blocks[1::4] ** 5
    blocks[2::4] *= (torch.rand(blocks[2::4].shape, generator=generator) < 0.1).float()
    blocks[3::4, 0] *= 1000
    exponents = torch.randint(-40, 38, (num_blocks, 1), generator=generator).double()
    # 1e38 times a few would be Inf, which is another test's.
    return (blocks.double() * 10.0**exponents).clamp(-LARGEST, LARGEST).float()


def edge_blocks(block_size: int = 32) -> Tensor:
    """One block per limit of fp32 and of the rule."""
    below = float(np.nextafter(np.float32(MIN_AMAX), np.float32(0)))
    above = float(np.nextafter(np.float32(MIN_AMAX), np.float32(1)))
    rows = [
        [0.0],
        [-0.0],
        [0.0, -0.0, 1.0, -0.0],
        [MIN_AMAX, -MIN_AMAX / 2, MIN_AMAX / 3],
        [below, -below / 2],
        [above, -above / 2, SMALLEST_SUBNORMAL],
        [SMALLEST_SUBNORMAL, -SMALLEST_SUBNORMAL],
        [1e-38, 1e-39, -1e-40],
        [1.0, 1e-38, 1e-42, -SMALLEST_SUBNORMAL],
        [1e38, -1e38, 3e37, 1.0],
        [LARGEST, -LARGEST, LARGEST / 2, LARGEST / 14, LARGEST / 254],
        [-LARGEST],
        [float(np.nextafter(np.float32(LARGEST), np.float32(0)))],
        [65504.0, -65504.0, 2.0**-24],
    ]
    blocks = torch.zeros(len(rows), block_size)
    for row, values in enumerate(rows):
        blocks[row, : len(values)] = torch.tensor(values, dtype=torch.float64).float()
    return blocks


def tie_blocks(bits: int, exponent: int) -> Tensor:
    """Every half-way point between two codes, exactly: amax is max_code * 2^k, so that the scale is 2^k."""
    limit = max_code(bits)
    halves = torch.arange(-2 * limit, 2 * limit + 1).float() / 2
    block = torch.zeros(1, 2048)
    block[0, : halves.numel()] = halves * 2.0**exponent
    return block


def assert_bitwise(blocks: Tensor, bits: int, dither: Tensor | None = None) -> None:
    codes, scales = quantize_blocks(blocks, bits, dither)
    assert codes.dtype == (torch.int8 if bits <= 8 else torch.int16)
    assert scales.dtype == torch.float32
    for row, block in enumerate(blocks.numpy()):
        expected_codes, expected_scale = literal_quantize(
            block, bits, dither=None if dither is None else dither[row].numpy()
        )
        assert np.array_equal(codes[row].numpy(), expected_codes)
        # As bit patterns: +0 and -0 differ, NaN equals itself.
        assert scales[row].numpy().view(np.int32) == expected_scale.view(np.int32)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("block_size", [32, 96, 256, 4096])
def test_bitwise_equal_to_numpy_on_random_blocks(bits: int, block_size: int) -> None:
    assert_bitwise(random_blocks(500, block_size, seed=bits * block_size), bits)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("block_size", [32, 96, 256])
def test_with_dither_bitwise_equal_to_numpy(bits: int, block_size: int) -> None:
    blocks = torch.cat([random_blocks(300, block_size, seed=bits + block_size), edge_blocks(block_size)])
    generator = torch.Generator().manual_seed(3)
    # The values of the stored error's dither, its smallest and largest among them.
    dither = (torch.randint(0, 2**16, blocks.shape, generator=generator) + 0.5) / 2**16
    dither[:, 0], dither[:, 1] = 2.0**-17, 1 - 2.0**-17
    assert_bitwise(blocks, bits, dither)


def test_dither_of_sixteen_bits_shifts_by_a_thousandth_of_a_step_at_most() -> None:
    # The mean over an even dither is x itself, but for the rounding of x + dither in fp32: half the spacing at 32767,
    # 2^-10 steps. x itself carries two roundings, at most 2^-9 there. The scale is 2^-15, so that codes are exact.
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 65534 - 32767
    blocks = (x / 32768).float()
    blocks[:, 0] = 32767 / 32768
    total = torch.zeros(64, 32, dtype=torch.float64)
    for k in range(1024):
        total += quantize_blocks(blocks, 16, torch.full(blocks.shape, (k + 0.5) / 1024))[0].double()
    # 1024 values of the dither leave a mean within half of 1/1024 of x.
    shift = total / 1024 - blocks.double() * 32768
    assert shift.abs().max() <= 2**-10 + 2**-9 + 2**-11


@pytest.mark.parametrize("bits", WIDTHS)
def test_bitwise_equal_to_numpy_at_the_limits(bits: int) -> None:
    assert_bitwise(edge_blocks(), bits)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("exponent", [-109, -30, 0, 5, 100])
def test_ties_go_to_the_even_code(bits: int, exponent: int) -> None:
    blocks = tie_blocks(bits, exponent)
    limit = max_code(bits)
    # limit / (limit * 2^k) is 2^-k exactly, so h / s is the half-way point itself.
    expected = torch.tensor([round(k / 2) for k in range(-2 * limit, 2 * limit + 1)], dtype=torch.int8)  # half-even
    codes, _ = quantize_blocks(blocks, bits)
    assert torch.equal(codes[0, : expected.numel()], expected)
    assert_bitwise(blocks, bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_are_symmetric_and_within_the_limit(bits: int) -> None:
    blocks = random_blocks(2000, 32, seed=5)
    codes, scales = quantize_blocks(blocks, bits)
    negated_codes, negated_scales = quantize_blocks(-blocks, bits)
    assert torch.equal(negated_codes, -codes)
    assert torch.equal(negated_scales, scales)
    # The largest element has the largest code: no clamp is needed, none of the range is given away.
    live = scales > 0
    assert torch.equal(codes[live].abs().amax(dim=1), torch.full((int(live.sum()),), max_code(bits), dtype=torch.int8))


@pytest.mark.parametrize("bits", WIDTHS)
def test_error_is_at_most_half_a_step(bits: int) -> None:
    blocks = torch.cat([random_blocks(2000, 256, seed=7), edge_blocks(256)])
    codes, scales = quantize_blocks(blocks, bits)
    decoded = dequantize_blocks(codes, scales)
    assert torch.isfinite(decoded).all()
    limit = max_code(bits)
    # u = 2^-24 is half a unit of fp32. h * (L / amax) carries two roundings of a number up to L, so the code is off the
    # exact quotient by at most 1/2 + 2 L u; scale and product carry three (1/L, times amax, times code), L u each.
    # Together 1/2 + 5 L u steps of the exact amax / L, which is the scale within 2 u: 1/2 + 6 L u covers the
    # second-order terms. A subnormal scale or product adds up to half a smallest subnormal each, the scale's times L.
    bound = scales.double() * (0.5 + 6 * limit * 2**-24) + (limit + 1) * SMALLEST_SUBNORMAL / 2
    # Blocks that count as zero lose all of their (at most MIN_AMAX) values.
    bound = torch.where(scales > 0, bound, MIN_AMAX)
    assert ((blocks.double() - decoded.double()).abs() <= bound[:, None]).all()


@pytest.mark.kind(19)
@pytest.mark.parametrize("bits", WIDTHS)
def test_relative_error_does_not_depend_on_the_magnitude(bits: int) -> None:
    base = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    base_codes, base_scales = quantize_blocks(base, bits)
    base_error = (dequantize_blocks(base_codes, base_scales) - base).double().norm() / base.double().norm()
    # L codes each side of 0 leave an error of about (amax / L) / sqrt(12): some 12 % and 0.7 % here; not 0 % or 100 %.
    assert 0.3 < base_error * max_code(bits) < 1.5
    for exponent in (-100, -60, -20, -1, 1, 20, 100):
        codes, scales = quantize_blocks(base * 2.0**exponent, bits)
        assert torch.equal(codes, base_codes)
        assert torch.equal(scales, base_scales * 2.0**exponent)
    for power in (-30, *range(-12, 5)):
        blocks = (base.double() * 10.0**power).float()
        error = (dequantize_blocks(*quantize_blocks(blocks, bits)) - blocks).double().norm() / blocks.double().norm()
        # Rounding to fp32 (relative 2^-24) moves few values over the border between two codes, and there both codes
        # err by half a step, equal within L * 2^-23 steps; each element's error moves by that much at most.
        assert abs(error - base_error) <= max_code(bits) * 2**-22 * base_error


@pytest.mark.kind(38)
@pytest.mark.parametrize("bits", WIDTHS)
def test_zero_blocks_are_exactly_zero_without_a_warning(bits: int) -> None:
    blocks = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    blocks[0] = 0.0
    blocks[2] = -0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes, scales = quantize_blocks(blocks, bits)
    decoded = dequantize_blocks(codes, scales)
    for row in (0, 2):
        assert not codes[row].any()
        assert scales[row].view(torch.int32) == 0  # +0, not -0
        assert not decoded[row].view(torch.int32).any()
    assert decoded[[1, 3]].abs().amax() > 0


@pytest.mark.kind(38)
@pytest.mark.parametrize("bits", WIDTHS)
def test_single_element_among_zeros_survives(bits: int) -> None:
    for position in (0, 1, 31, 63):
        blocks = torch.zeros(1, 64)
        blocks[0, position] = -3e-9
        decoded = dequantize_blocks(*quantize_blocks(blocks, bits))
        # The largest element has code -L; scale and product round three times, 2^-24 each.
        assert abs(decoded[0, position].item() / blocks[0, position].item() - 1) <= 4 * 2**-24
        decoded[0, position] = 0
        assert not decoded.any()


@pytest.mark.kind(3)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", NONFINITE)
@pytest.mark.parametrize("position", [0, 17, 63])
def test_nonfinite_value_marks_its_block_alone(bits: int, value: float, position: int) -> None:
    blocks = random_blocks(5, 64, seed=3)
    clean_codes, clean_scales = quantize_blocks(blocks, bits)
    blocks[2, position] = value
    codes, scales = quantize_blocks(blocks, bits)
    assert scales[2].isnan()
    assert not codes[2].any()
    assert dequantize_blocks(codes, scales)[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(codes[others], clean_codes[others])
    assert torch.equal(scales[others], clean_scales[others])


@pytest.mark.kind(3)
@pytest.mark.parametrize("payload", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x400000, -0x7FFFFF])
def test_every_kind_of_nan_is_found(payload: int) -> None:
    # Quiet and signalling, either sign: -1 is 0xFFFFFFFF, -0x400000 is 0xFFC00000, -0x7FFFFF is 0xFF800001.
    blocks = torch.ones(1, 32)
    blocks.view(torch.int32)[0, 5] = payload
    assert blocks[0, 5].isnan()
    assert not torch.isfinite(block_amax(blocks)).any()
    assert quantize_blocks(blocks, 4)[1].isnan().all()


def test_nan_together_with_inf_and_huge_values() -> None:
    blocks = torch.full((1, 32), LARGEST)
    blocks[0, 3], blocks[0, 4] = math.inf, math.nan
    codes, scales = quantize_blocks(blocks, 4)
    assert scales.isnan().all()
    assert not codes.any()


def test_input_is_not_written() -> None:
    blocks = random_blocks(8, 32, seed=4)
    before = blocks.clone()
    quantize_blocks(blocks, 4)
    assert torch.equal(blocks, before)


def random_codes(bits: int, shape: tuple[int, int]) -> Tensor:
    """All of two's complement (-L - 1 is never made, but is representable); 1 bit: -1 and 1."""
    generator = torch.Generator().manual_seed(bits)
    if bits == 1:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("block_size", [32, 96, 256, 4096])
def test_pack_unpack_round_trip(bits: int, block_size: int) -> None:
    codes = random_codes(bits, (50, block_size))
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (50, block_size * bits // 8)
    unpacked = unpack_codes(packed, bits)
    assert unpacked.dtype == torch.int8
    assert torch.equal(unpacked, codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_every_byte_unpacks_and_packs_to_itself(bits: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    assert torch.equal(pack_codes(unpack_codes(packed, bits), bits), packed)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_are_laid_out_as_documented(bits: int) -> None:
    block_size = 32
    codes = random_codes(bits, (3, block_size))
    packed = pack_codes(codes, bits)
    num_bytes = block_size * bits // 8
    for row in range(3):
        for i in range(num_bytes):
            # Byte i holds elements i + k * num_bytes at bit k * bits.
            fields = [int(code < 0) if bits == 1 else int(code) & (2**bits - 1) for code in codes[row, i::num_bytes]]
            assert int(packed[row, i]) == sum(field << (k * bits) for k, field in enumerate(fields))


def test_one_bit_bytes_literally() -> None:
    codes = torch.ones(1, 32, dtype=torch.int8)
    codes[0, [0, 4, 28]] = -1  # byte 0: bits 0, 1 and 7
    codes[0, [7, 11]] = -1  # byte 3: bits 1 and 2
    assert pack_codes(codes, 1).tolist() == [[0x83, 0, 0, 0x06]]


def test_four_bit_bytes_literally() -> None:
    codes = torch.zeros(1, 32, dtype=torch.int8)
    codes[0, 0], codes[0, 16] = 1, -1  # byte 0: low nibble 1, high nibble 15
    codes[0, 1], codes[0, 17] = -7, 7  # byte 1: low nibble 9, high nibble 7
    codes[0, 15], codes[0, 31] = 5, -2  # byte 15: low nibble 5, high nibble 14
    packed = pack_codes(codes, 4)
    assert packed.tolist() == [[0xF1, 0x79, *[0] * 13, 0xE5]]


def test_fp32_rounds_once() -> None:
    # Just above the tie between 1 and its successor in double, but at the tie after a rounding of its own.
    assert fp32(0.1) == float(np.float32(0.1))
    assert fp32(1 + 2**-24 + 2**-50) == 1 + 2**-23
    assert fp32(1 + 2**-24) == 1.0
