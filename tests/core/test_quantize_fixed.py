"""One scale for all blocks: the authors' first experiment, with what it cuts off."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_loco.core.quantize import (
    FIXED_SCALE_RANGE,
    MIN_AMAX,
    dequantize_blocks,
    fixed_scale,
    max_code,
    quantize_fixed,
)
from tests._codec import literal_quantize
from tests.core.test_quantize import LARGEST, NONFINITE, edge_blocks, random_blocks

BITS = (1, 2, 4, 8)
AUTHORS = 98304.0
SCALES = (1 / AUTHORS, 65536 / AUTHORS, 1.0, 0.1, 1e-9, 3e20, *FIXED_SCALE_RANGE)


def fp32_of(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", SCALES)
def test_bitwise_equal_to_numpy(bits: int, scale: float) -> None:
    tensor = fp32_of(scale)
    # All within the range of codes, many beyond it, and both mixed with zeros and with every limit of fp32.
    near = torch.randn(50, 96, generator=torch.Generator().manual_seed(bits)) * tensor * max_code(bits)
    blocks = torch.cat([near / 8, near, near * 100, random_blocks(50, 96, seed=2), edge_blocks(96)])
    codes, scales = quantize_fixed(blocks, bits, tensor)
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.float32
    for row, block in enumerate(blocks.numpy()):
        expected_codes, expected_scale = literal_quantize(block, bits, fixed_scale=tensor.item())
        assert np.array_equal(codes[row].numpy(), expected_codes)
        assert scales[row].numpy().view(np.int32) == expected_scale.view(np.int32)


def test_literally_with_the_constant_of_the_authors() -> None:
    # 4 bits at 98304: a code is 1.017e-5, and the range ends at 7.12e-5.
    blocks = torch.zeros(1, 32)
    values = [1e-5, -1e-5, 5.0e-6, 5.1e-6, 7e-5, 7.2e-5, -1e-3, 1.0, 1.52e-5, -2.6e-5]
    blocks[0, : len(values)] = torch.tensor(values)
    codes, scales = quantize_fixed(blocks, 4, fixed_scale(torch.ones(()), AUTHORS))
    assert codes[0, : len(values)].tolist() == [1, -1, 0, 1, 7, 7, -7, 7, 1, -3]
    assert not codes[0, len(values) :].any()
    assert scales[0].item() == pytest.approx(1 / AUTHORS, rel=2**-24)


@pytest.mark.parametrize("bits", BITS[1:])
def test_error_is_half_a_step_within_the_range_and_the_excess_beyond(bits: int) -> None:
    limit, scale = max_code(bits), fp32_of(0.01)
    blocks = torch.linspace(-2 * limit, 2 * limit, 32 * 128).view(-1, 32).mul_(scale)
    error = (dequantize_blocks(*quantize_fixed(blocks, bits, scale)) - blocks).double().abs()
    excess = blocks.double().abs() - limit * scale.double()
    # As with amax, test_quantize.py: three roundings of a number up to L (beyond the range: one of a product, 2 L at
    # most).
    assert (error <= torch.where(excess > 0, excess.clamp(min=scale / 2), scale / 2) + 4 * limit * 2**-24 * scale).all()
    assert error.max() >= 0.99 * limit * scale


@pytest.mark.parametrize("bits", BITS)
def test_quotients_beyond_fp32_are_cut_off_too(bits: int) -> None:
    blocks = torch.full((1, 32), LARGEST)
    blocks[0, ::2] *= -1
    for scale in (FIXED_SCALE_RANGE[0], 1e-9):
        codes, scales = quantize_fixed(blocks, bits, fp32_of(scale))
        assert codes[0].tolist() == [-max_code(bits), max_code(bits)] * 16
        assert torch.isfinite(blocks - dequantize_blocks(codes, scales)).all()


@pytest.mark.kind(3)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", NONFINITE)
def test_nonfinite_value_marks_its_block_alone(bits: int, value: float) -> None:
    blocks = random_blocks(3, 32, seed=5)
    blocks[1, 31] = value
    codes, scales = quantize_fixed(blocks, bits, fp32_of(0.5))
    assert scales.isnan().tolist() == [False, True, False]
    assert (codes[1] == (1 if bits == 1 else 0)).all()


@pytest.mark.kind(38)
@pytest.mark.parametrize("bits", BITS)
def test_zero_blocks_are_exactly_zero(bits: int) -> None:
    blocks = torch.zeros(3, 32)
    blocks[1] = -0.0
    blocks[2] = -MIN_AMAX / 2
    codes, scales = quantize_fixed(blocks, bits, fp32_of(0.5))
    assert not scales.view(torch.int32).any()
    assert not dequantize_blocks(codes, scales).view(torch.int32).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-101, 2.0**101, *NONFINITE])
def test_scale_that_is_no_scale_loses_the_step(bits: int, scale: float) -> None:
    # A loss scale of NaN, say. Zero blocks too: nothing of the step may look valid.
    blocks = torch.cat([random_blocks(3, 32, seed=6), torch.zeros(1, 32)])
    codes, scales = quantize_fixed(blocks, bits, fp32_of(scale))
    assert scales.isnan().all()
    assert (codes == (1 if bits == 1 else 0)).all()


def test_scale_follows_the_unit_of_the_gradients() -> None:
    for unit, inverse in ((1.0, AUTHORS), (65536.0, AUTHORS), (1 / 3, 0.1), (1234.5, 7e-3)):
        scale = fixed_scale(fp32_of(unit), inverse)
        assert scale.dtype == torch.float32
        assert scale.shape == ()
        assert scale.item() == float(np.float32(unit) / np.float32(inverse))
    # Gradients and unit times 2^16: the same codes.
    blocks = random_blocks(10, 32, seed=7).clamp(-1, 1)
    for bits in BITS:
        codes, _ = quantize_fixed(blocks, bits, fixed_scale(torch.ones(()), 100.0))
        scaled, _ = quantize_fixed(blocks * 2**16, bits, fixed_scale(fp32_of(2.0**16), 100.0))
        live = blocks.abs().amax(dim=1) >= MIN_AMAX
        assert torch.equal(codes[live], scaled[live])


def test_input_is_not_written() -> None:
    blocks = random_blocks(8, 32, seed=4)
    blocks[3, 3] = math.nan
    before = blocks.clone()
    for bits in BITS:
        quantize_fixed(blocks, bits, fp32_of(0.1))
    assert torch.equal(blocks.view(torch.int32), before.view(torch.int32))
