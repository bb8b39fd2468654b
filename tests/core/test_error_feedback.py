"""What error feedback promises: nothing of the gradient is lost, the error stays small, NaN does not get into it.

Notation of the module under test: h = g + e travels as d, r = h - d, e' = beta * e + (1 - beta) * r, stored in 8 bits.
u = 2^-24 is the largest relative rounding error of one fp32 operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_loco.core.error_feedback import ErrorState, load_error, reset_error, storage_dither, update_error
from megatron_loco.core.quantize import dequantize_blocks, quantize_blocks
from tests._buckets import CPU, literal_dither

U = 2.0**-24
BETAS = (0.0, 0.5, 0.8, 0.95)
MAGNITUDES = (1.0, 1e-9, 1e-12, 1e4)


@dataclass
class Step:
    """What one step computed, fp32 ``[num_blocks, block_size]``; ``scales`` are those on the wire."""

    grad: Tensor
    old: Tensor
    sent: Tensor
    scales: Tensor
    residual: Tensor
    updated: Tensor
    stored: Tensor
    stored_scales: Tensor


def run(error: ErrorState, grads: Iterator[Tensor], beta: float, bits: int = 4) -> Iterator[Step]:
    """The steps of one rank, as a backend composes them."""
    for number, grad in enumerate(grads):
        old = load_error(error)
        compensated = grad + old
        codes, scales = quantize_blocks(compensated, bits)
        sent = dequantize_blocks(codes, scales)
        residual = compensated - sent
        dither = storage_dither(number, 0, grad.shape[0], grad.shape[1], CPU)
        updated = update_error(error, old, residual, torch.isfinite(scales), beta, dither)
        yield Step(grad, old, sent, scales, residual, updated, load_error(error), error.scales.clone())


def noisy(magnitude: float, steps: int, shape: tuple[int, int] = (16, 64), seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(shape, generator=generator) * magnitude


def constant(grad: Tensor, steps: int) -> Iterator[Tensor]:
    for _ in range(steps):
        yield grad


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("bits", [4, 8])
def test_decode_identity(beta: float, magnitude: float, bits: int) -> None:
    for step in run(ErrorState.zeros(16, 64, CPU), noisy(magnitude, 20), beta, bits):
        exact = step.grad.double() + step.old.double()
        error = (step.sent.double() + step.residual.double() - exact).abs()
        # g + e is rounded once; h - d once more, and |h - d| is at most half a step, less than amax: u * amax each.
        bound = 2 * U * exact.abs().amax(dim=1, keepdim=True)
        assert (error <= bound).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_conservation_over_time(beta: float, magnitude: float) -> None:
    steps = 200
    error = ErrorState.zeros(16, 64, CPU)
    # A start that is not zero, so that e_0 is seen in the balance.
    error.codes.copy_(torch.randint(-127, 128, (16, 64), generator=torch.Generator().manual_seed(1), dtype=torch.int8))
    error.scales.fill_(magnitude * 1e-3)
    first = load_error(error).double()
    sent, wanted = torch.zeros(16, 64, dtype=torch.float64), torch.zeros(16, 64, dtype=torch.float64)
    bound = torch.zeros(16, 1, dtype=torch.float64)
    for step in run(error, noisy(magnitude, steps), beta):
        sent += step.sent.double()
        wanted += step.grad.double()
        # Storage in 8 bits moves the error by a step of its own scale at most (1e-4: arithmetic of the quantiser, see
        # test_quantize.py); fp32 moves h, h - d and the average by a few u of what they are made of, and beta and
        # 1 - beta, rounded to fp32, add up to 1 within u. All of it weighs 1 / (1 - beta) in what is sent.
        storage = (1 + 1e-4) * step.stored_scales.double()[:, None]
        arithmetic = 8 * U * (step.grad.abs() + step.old.abs()).double().amax(dim=1, keepdim=True)
        bound += (storage + arithmetic) / (1 - beta)
    last = load_error(error).double()
    lost = (sent - (wanted + (first - last) / (1 - beta))).abs()
    assert (lost <= bound).all()
    # The roundings of storage are zero-mean: they add up like the root of their number. One rounding with dither has a
    # standard deviation of at most 1/2 step; 6 standard deviations of 1024 elements' walks (chance 2e-6).
    deviation = step.stored_scales.double().amax() * math.sqrt(steps) / 2 / (1 - beta)
    assert lost.max() <= 6 * deviation


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_error_is_bounded_by_the_largest_residual(beta: float, magnitude: float) -> None:
    steps = 300
    largest_residual = torch.zeros(16)
    largest_grad = 0.0
    for number, step in enumerate(run(ErrorState.zeros(16, 64, CPU), noisy(magnitude, steps, seed=3), beta), start=1):
        largest_residual = torch.maximum(largest_residual, step.residual.abs().amax(dim=1))
        largest_grad = max(largest_grad, step.grad.abs().max().item())
        # An average of old error and residual is no larger than the larger of them. Storage keeps a block's amax within
        # 3 u (scale rule: test_quantize.py) and the average adds 3 u, per step.
        assert (step.stored.abs().amax(dim=1) <= largest_residual * (1 + 6 * U * number)).all()
        # Half a step: 1/2 + 6 * 7 u, and one more u * amax = 7 u steps for the rounding of h.
        assert (step.residual.abs().amax(dim=1) <= step.scales * (0.5 + 50 * U)).all()
        # r <= (G + E) / 14 and E <= max r give E <= G / 13, whatever beta.
        assert step.stored.abs().max().item() <= largest_grad / 13 * (1 + 1e-4)


def spread(smallest: float, largest: float) -> Tensor:
    """A block of one element of 1 and 127 constant ones, from ``smallest`` to ``largest``, of both signs."""
    grad = torch.ones(1, 128)
    grad[0, 1:] = torch.logspace(math.log10(smallest), math.log10(largest), 127)
    grad[0, 2::2] *= -1
    return grad


def equal_but_one(value: float) -> Tensor:
    grad = torch.full((1, 128), value)
    grad[0, 0] = 1.0
    return grad


CONSTANTS: dict[str, Tensor] = {
    "all of one size": torch.rand(1, 128, generator=torch.Generator().manual_seed(4)) + 0.5,
    "normal": torch.randn(1, 128, generator=torch.Generator().manual_seed(5)),
    # Half a step is 1/14: no element but the first is ever sent without its error.
    "below half a step, equal": equal_but_one(1e-3),
    "below half a step, 1e-2 to 0.07": spread(1e-2, 0.07),
    "below half a step, 1e-3 to 0.07": spread(1e-3, 0.07),
    "below half a step, 1e-4 to 0.07": spread(1e-4, 0.07),
}
CONSTANT_MAGNITUDES = (1.0, 1e-9, 1e-12)
CONSTANT_STEPS = 2000


@functools.cache
def steps_behind(beta: float) -> Tensor:
    """How far the sum that was sent is behind the sum of constant gradients, ``[cases, magnitudes]``.

    In quantisation steps, the worst element of each block; every case and magnitude is a block of its own.
    """
    grad = torch.cat([block * magnitude for block in CONSTANTS.values() for magnitude in CONSTANT_MAGNITUDES])
    sent = torch.zeros(grad.shape, dtype=torch.float64)
    largest_scale = torch.zeros(grad.shape[0])
    for step in run(ErrorState.zeros(grad.shape[0], grad.shape[1], CPU), constant(grad, CONSTANT_STEPS), beta):
        sent += step.sent.double()
        largest_scale = torch.maximum(largest_scale, step.scales)
    behind = (sent - CONSTANT_STEPS * grad.double()).abs().amax(dim=1) / largest_scale
    return behind.view(len(CONSTANTS), len(CONSTANT_MAGNITUDES))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", CONSTANTS)
def test_constant_tiny_gradient_arrives(case: str, beta: float) -> None:
    # Not sent yet is e / (1 - beta) with |e| <= half a step: 0.5, 1, 2.5 and 10 steps for the four betas.
    late = 0.5 / (1 - beta)
    # Storage adds the sum of its roundings over 1 - beta. They must be zero-mean (or a constant gradient is lost at a
    # constant rate): then they add up like the root of their number. One is at most a whole step of storage wide, of
    # standard deviation at most 1/2, and a step of storage is at most 1/254 of a quantisation step; 6 deviations.
    walk = 6 * math.sqrt(CONSTANT_STEPS) * 0.5 / 254 / (1 - beta)
    behind = steps_behind(beta)[list(CONSTANTS).index(case)]
    assert (behind <= late + walk).all(), (
        f"{behind.tolist()} quantisation steps behind after {CONSTANT_STEPS} steps, {late + walk:.1f} allowed"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beta", BETAS)
def test_nonfinite_block_keeps_the_stored_error(value: float, beta: float) -> None:
    error = ErrorState.zeros(4, 64, CPU)
    for _ in run(error, noisy(1.0, 3, (4, 64)), beta):
        pass
    twin = ErrorState(error.codes.clone(), error.scales.clone())
    grad = next(noisy(1.0, 1, (4, 64), seed=8))
    next(run(twin, constant(grad, 1), beta))
    before = ErrorState(error.codes.clone(), error.scales.clone())
    poisoned = grad.clone()
    poisoned[2, 63] = value
    step = next(run(error, constant(poisoned, 1), beta))
    assert step.scales.isnan().tolist() == [False, False, True, False]
    assert torch.equal(error.codes[2], before.codes[2])
    assert torch.equal(error.scales[2], before.scales[2])
    assert torch.equal(step.updated[2], step.old[2])
    assert torch.isfinite(step.updated).all()
    # The neighbours advance as if nothing had happened.
    for row in (0, 1, 3):
        assert torch.equal(error.codes[row], twin.codes[row])
        assert torch.equal(error.scales[row], twin.scales[row])
    # The step after it is a normal one.
    after = next(run(error, constant(grad, 1), beta))
    assert torch.isfinite(after.sent).all()


def test_overflow_of_gradient_plus_error_is_a_nonfinite_block() -> None:
    # Neither is Inf, their sum is. The stored codes do not use the whole width, so that storing anew would change them.
    error = ErrorState.zeros(1, 32, CPU)
    error.codes.fill_(100)
    error.scales.fill_(2.0**120)
    before = ErrorState(error.codes.clone(), error.scales.clone())
    step = next(run(error, constant(torch.full((1, 32), torch.finfo(torch.float32).max), 1), 0.8))
    assert step.scales.isnan().all()
    assert torch.equal(error.codes, before.codes)
    assert torch.equal(error.scales, before.scales)


@pytest.mark.parametrize("beta", BETAS)
def test_largest_finite_gradients_leave_a_finite_error(beta: float) -> None:
    grad = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    grad *= torch.finfo(torch.float32).max / grad.abs().max() * (1 - 2**-20)
    error = ErrorState.zeros(1, 32, CPU)
    # Opposite signs: g + e does not overflow, and the largest element is met at both ends of the range.
    for sign in (1, -1, 1):
        step = next(run(error, constant(grad * sign * 0.9, 1), beta))
        assert torch.isfinite(step.sent).all()
        assert torch.isfinite(error.scales).all()


def test_zero_gradients_leave_zero_error() -> None:
    error = ErrorState.zeros(2, 32, CPU)
    for step in run(error, constant(torch.zeros(2, 32), 5), 0.8):
        assert not step.sent.any()
    assert not error.codes.any()
    assert not error.scales.any()


def test_error_left_over_is_sent_when_gradients_stop() -> None:
    # beta = 0: a leftover becomes its block's largest and is sent, or is smaller and shrinks 14 times each step.
    error = ErrorState.zeros(2, 64, CPU)
    for _ in run(error, noisy(1.0, 10, (2, 64)), 0.0):
        pass
    left = load_error(error).double()
    sent = sum(step.sent.double() for step in run(error, constant(torch.zeros(2, 64), 12), 0.0))
    # 14^-12 is below fp32; per-step storage rounding is at most 1/127 of a leftover, 1/14 of the one before.
    assert (sent - left).abs().max() <= left.abs().max() * (1 / 14 / 127) * 14 / 13 * (1 + 1e-3)


def test_scales_are_never_negative_and_codes_use_the_whole_width() -> None:
    error = ErrorState.zeros(16, 64, CPU)
    for step in run(error, noisy(1e-9, 5), 0.8):
        assert (step.stored_scales > 0).all()
        assert torch.equal(error.codes.abs().amax(dim=1), torch.full((16,), 127, dtype=torch.int8))


def test_reset_and_rows_write_through() -> None:
    error = ErrorState.zeros(4, 64, CPU)
    for _ in run(error, noisy(1.0, 2, (4, 64)), 0.5):
        pass
    part = error.rows(1, 3)
    assert part.codes.shape == (2, 64)
    kept = load_error(error)[[0, 3]]
    reset_error(part)
    assert not load_error(error)[1:3].any()
    assert torch.equal(load_error(error)[[0, 3]], kept)
    assert kept.any()
    reset_error(error)
    assert not error.codes.any()
    assert not error.scales.any()


def test_memory_is_a_byte_per_element_and_a_scale_per_block() -> None:
    error = ErrorState.zeros(10, 256, CPU)
    assert error.num_bytes == 10 * (256 + 4)
    assert error.num_bytes == error.codes.nbytes + error.scales.nbytes


def test_dither_is_the_documented_sequence_and_even_over_the_steps() -> None:
    steps = 512
    dither = torch.stack([storage_dither(step, 3, 2, 32, CPU) for step in range(steps)]).view(steps, -1)
    for step, column in ((0, 0), (1, 5), (511, 63)):
        assert dither[step, column].item() == literal_dither(step, 3 * 32 + column)
    assert dither.min() > 0
    assert dither.max() < 1
    # Evenly: of N consecutive steps, the share below any threshold is off by the discrepancy of a Kronecker sequence,
    # below (2 + log2(N)) / N for this stride (seen: 0.6 of it).
    for threshold in (0.01, 0.1, 0.5, 0.9):
        share = (dither < threshold).double().mean(dim=0)
        assert (share - threshold).abs().max() <= (2 + math.log2(steps)) / steps


def test_dither_of_large_buckets_and_late_steps() -> None:
    # Beyond 2^31 elements and 2^31 steps: the arithmetic is modulo 2^32.
    first_block = 2**33 // 32
    for step in (2**31 + 5, 2**40 + 1):
        dither = storage_dither(step, first_block, 1, 32, CPU)[0]
        assert dither[7].item() == literal_dither(step, 2**33 + 7)
