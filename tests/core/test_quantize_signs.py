"""One bit: signs and the mean of the magnitudes, bitwise, whatever the order of the elements."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_loco.core.quantize import MIN_AMAX, dequantize_blocks, pack_codes, quantize_signs, unpack_codes
from tests._codec import exact_mean_magnitude, literal_quantize
from tests.core.test_quantize import LARGEST, NONFINITE, SMALLEST_SUBNORMAL, edge_blocks, random_blocks


def signs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Every element counts."""
    return quantize_signs(blocks, blocks.numel())


@pytest.mark.parametrize("block_size", [32, 96, 256, 4096])
def test_bitwise_equal_to_numpy(block_size: int) -> None:
    count = 200 if block_size < 4096 else 12
    blocks = torch.cat([random_blocks(count, block_size, seed=block_size), edge_blocks(block_size)])
    codes, scales = signs(blocks)
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.float32
    for row, block in enumerate(blocks.numpy()):
        expected_codes, expected_scale = literal_quantize(block, 1)
        assert np.array_equal(codes[row].numpy(), expected_codes)
        assert scales[row].numpy().view(np.int32) == expected_scale.view(np.int32)


@pytest.mark.parametrize("block_size", [32, 4096])
def test_scale_is_the_mean_magnitude(block_size: int) -> None:
    blocks = torch.cat([random_blocks(40, block_size, seed=1), edge_blocks(block_size)])
    scales = signs(blocks)[1]
    for block, scale in zip(blocks, scales, strict=True):
        amax = Fraction(block.abs().max().item())
        if amax >= Fraction(MIN_AMAX):
            assert abs(Fraction(scale.item()) - exact_mean_magnitude(block.numpy())) <= amax * Fraction(5, 2**21)
            assert scale >= 2.0**-126  # a normal number
            assert scale <= block.abs().max()


@pytest.mark.parametrize("block_size", [256, 4096])
def test_scale_does_not_depend_on_the_order_of_the_elements(block_size: int) -> None:
    block = torch.randn(block_size, generator=torch.Generator().manual_seed(2)) ** 3
    generator = torch.Generator().manual_seed(3)
    permuted = torch.stack([block[torch.randperm(block_size, generator=generator)] for _ in range(50)])
    scales = signs(permuted)[1]
    assert scales.unique().numel() == 1
    # What it is for: sums of the same numbers in fp32 differ (here one after the other, as a thread may do it).
    assert len(set(np.cumsum(permuted.abs().numpy(), axis=1)[:, -1].tolist())) > 1


def test_blocks_of_one_magnitude_are_exact() -> None:
    for value in (1.0, 1e-9, 3e-33, 0.1, LARGEST, MIN_AMAX):
        blocks = torch.full((1, 96), value)
        blocks[0, ::3] *= -1
        assert torch.equal(dequantize_blocks(*signs(blocks)), blocks)


def test_zero_counts_as_positive() -> None:
    blocks = torch.ones(1, 32)
    blocks[0, :4] = torch.tensor([0.0, -0.0, -SMALLEST_SUBNORMAL, SMALLEST_SUBNORMAL])
    codes, scales = signs(blocks)
    assert codes[0].tolist() == [1, 1, -1, *[1] * 29]
    assert scales[0] == 28 / 32
    assert torch.equal(unpack_codes(pack_codes(codes, 1), 1), codes)


@pytest.mark.kind(19)
def test_relative_error_does_not_depend_on_the_magnitude() -> None:
    base = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    base_codes, base_scales = signs(base)
    base_error = (dequantize_blocks(base_codes, base_scales) - base).double().norm() / base.double().norm()
    # Of normal numbers, the mean magnitude is sqrt(2 / pi) and the error sqrt(1 - 2 / pi) = 0.603; 16384 elements.
    assert abs(base_error - math.sqrt(1 - 2 / math.pi)) < 0.02
    for exponent in (-100, -20, 1, 20, 100):
        codes, scales = signs(base * 2.0**exponent)
        assert torch.equal(codes, base_codes)
        assert torch.equal(scales, base_scales * 2.0**exponent)
    for power in (-30, *range(-12, 5)):
        blocks = (base.double() * 10.0**power).float()
        error = (dequantize_blocks(*signs(blocks)) - blocks).double().norm() / blocks.double().norm()
        # The same signs; scales within 2^-18 of each block's amax, which is at most 5 times its root mean square, and
        # the error is flat around the mean.
        assert abs(error - base_error) <= 2**-18


@pytest.mark.kind(38)
def test_zero_blocks_are_exactly_zero_without_a_warning() -> None:
    below = float(np.nextafter(np.float32(MIN_AMAX), np.float32(0)))
    blocks = torch.zeros(5, 64)
    blocks[1] = -0.0
    blocks[2] = -below
    blocks[3] = -SMALLEST_SUBNORMAL
    blocks[4, 5] = -MIN_AMAX
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes, scales = signs(blocks)
    assert not scales[:4].view(torch.int32).any()
    assert (codes[:4] == 1).all()  # a bit of 0, and a product of +0
    assert not dequantize_blocks(codes, scales)[:4].view(torch.int32).any()
    assert scales[4] == MIN_AMAX / 64


@pytest.mark.kind(3)
@pytest.mark.parametrize("value", NONFINITE)
@pytest.mark.parametrize("position", [0, 17, 63])
def test_nonfinite_value_marks_its_block_alone(value: float, position: int) -> None:
    blocks = random_blocks(5, 64, seed=3)
    clean_codes, clean_scales = signs(blocks)
    blocks[2, position] = value
    codes, scales = signs(blocks)
    assert scales[2].isnan()
    assert (codes[2] == 1).all()
    others = [0, 1, 3, 4]
    assert torch.equal(codes[others], clean_codes[others])
    assert torch.equal(scales[others], clean_scales[others])


@pytest.mark.parametrize("counting", [1, 2, 31, 95])
def test_what_fills_up_the_last_block_is_not_in_its_mean(counting: int) -> None:
    blocks = random_blocks(3, 96, seed=counting)
    blocks[2, counting:] = 0.0
    codes, scales = quantize_signs(blocks, 2 * 96 + counting)
    expected_codes, expected_scale = literal_quantize(blocks[2, :counting].numpy(), 1)
    assert np.array_equal(codes[2, :counting].numpy(), expected_codes)
    assert (codes[2, counting:] == 1).all()
    assert scales[2].numpy().view(np.int32) == expected_scale.view(np.int32)
    assert torch.equal(scales[:2], signs(blocks)[1][:2])


def test_input_is_not_written() -> None:
    blocks = random_blocks(8, 32, seed=4)
    before = blocks.clone()
    signs(blocks)
    assert torch.equal(blocks, before)
