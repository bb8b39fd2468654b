"""What error feedback promises: nothing of the gradient is lost, the error stays small, NaN does not get into it.

Notation of the module under test: h = g + e travels as d, r = h - d, e' = beta * e + (1 - beta) * r, stored in 8, 16 or
32 bits. u = 2^-24 is the largest relative rounding error of one fp32 operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_loco.core.error_feedback import ErrorState, load_error, reset_error, storage_dither, update_error
from megatron_loco.core.quantize import dequantize_blocks, max_code, quantize_blocks, quantize_wire
from tests._buckets import CPU
from tests._codec import literal_dither

U = 2.0**-24
BETAS = (0.0, 0.5, 0.8, 0.95)
BITS = (1, 2, 4, 8)
ERROR_BITS = (8, 16, 32)
MAGNITUDES = (1.0, 1e-9, 1e-12, 1e4)


@dataclass
class Step:
    """What one step computed, fp32 ``[num_blocks, block_size]``; ``scales`` are those on the wire.

    ``stored_scales`` are 0 where the error is stored in 32 bits.
    """

    grad: Tensor
    old: Tensor
    sent: Tensor
    scales: Tensor
    residual: Tensor
    updated: Tensor
    stored: Tensor
    stored_scales: Tensor


def run(
    error: ErrorState, grads: Iterator[Tensor], beta: float, bits: int = 4, fixed_scale: Tensor | None = None
) -> Iterator[Step]:
    """The steps of one rank, as a backend composes them."""
    for number, grad in enumerate(grads):
        old = load_error(error).clone()
        compensated = grad + old
        codes, scales = quantize_wire(compensated, bits, grad.numel(), fixed_scale)
        sent = dequantize_blocks(codes, scales)
        residual = compensated - sent
        dither = None if error.bits == 32 else storage_dither(number, 0, grad.shape[0], grad.shape[1], CPU)
        updated = update_error(error, old, residual, torch.isfinite(scales), beta, dither)
        stored_scales = torch.zeros_like(scales) if error.bits == 32 else error.scales.clone()
        yield Step(grad, old, sent, scales, residual, updated, load_error(error).clone(), stored_scales)


def noisy(magnitude: float, steps: int, shape: tuple[int, int] = (16, 64), seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(shape, generator=generator) * magnitude


def constant(grad: Tensor, steps: int) -> Iterator[Tensor]:
    for _ in range(steps):
        yield grad


def decades(steps: int, seed: int = 0, width: int = 64) -> Iterator[Tensor]:
    """Noise in 16 blocks, four of each magnitude."""
    magnitudes = torch.tensor(MAGNITUDES).repeat_interleave(4)[:, None]
    for noise in noisy(1.0, steps, (16, width), seed):
        yield noise * magnitudes


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("bits", BITS)
def test_decode_identity(beta: float, bits: int) -> None:
    for step in run(ErrorState.zeros(16, 64, CPU), decades(20), beta, bits):
        exact = step.grad.double() + step.old.double()
        error = (step.sent.double() + step.residual.double() - exact).abs()
        # g + e is rounded once; h - d once more, and |h - d| is at most half a step (1 bit: amax): u * amax each.
        bound = 2 * U * exact.abs().amax(dim=1, keepdim=True)
        assert (error <= bound).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("error_bits", ERROR_BITS)
@pytest.mark.parametrize("bits", BITS)
def test_conservation_over_time(bits: int, error_bits: int, beta: float) -> None:
    steps = 100
    error = ErrorState.zeros(16, 64, CPU, error_bits)
    # A start that is not zero, so that e_0 is seen in the balance.
    start = next(decades(1, seed=1))
    if error_bits < 32:
        codes, scales = quantize_blocks(start, error_bits)
        error.scales.copy_(scales)
    error.codes.copy_(start if error_bits == 32 else codes)
    check_conservation(error, decades(steps), beta, bits)


@pytest.mark.parametrize("bits", BITS)
def test_conservation_with_one_scale_and_what_it_cuts_off(bits: int) -> None:
    error = ErrorState.zeros(16, 64, CPU)
    # Codes reach to a tenth of a standard deviation in every width: nearly all is cut off, and waits in the error.
    scale = torch.tensor(0.1 / max_code(bits))
    check_conservation(error, noisy(1.0, 100, seed=6), 0.8, bits, scale)
    assert load_error(error).abs().mean() > 0.5


def check_conservation(
    error: ErrorState, grads: Iterator[Tensor], beta: float, bits: int, fixed_scale: Tensor | None = None
) -> None:
    first = load_error(error).double()
    assert first.any() or fixed_scale is not None
    sent, wanted = torch.zeros(16, 64, dtype=torch.float64), torch.zeros(16, 64, dtype=torch.float64)
    storage, variance, arithmetic = (torch.zeros(16, 1, dtype=torch.float64) for _ in range(3))
    # What a code is off by the arithmetic of the quantiser (test_quantize.py): 1e-4 steps for 8 bits, 1 % for 16.
    of_a_code = 1 + (6 * max_code(error.bits) * U if error.bits < 32 else 0)
    for step in run(error, grads, beta, bits, fixed_scale):
        sent += step.sent.double()
        wanted += step.grad.double()
        # Storage in codes moves the error by a step of its own scale at most; fp32 moves h, h - d and the average by a
        # few u of what they are made of, and beta and 1 - beta, rounded to fp32, add up to 1 within u. All of it weighs
        # 1 / (1 - beta) in what is sent.
        storage_step = of_a_code * step.stored_scales.double()[:, None] / (1 - beta)
        storage += storage_step
        variance += (storage_step / 2).square()
        arithmetic += 8 * U * (step.grad.abs() + step.old.abs()).double().amax(dim=1, keepdim=True) / (1 - beta)
    last = load_error(error).double()
    lost = (sent - (wanted + (first - last) / (1 - beta))).abs()
    assert (lost <= storage + arithmetic).all()
    # The roundings of storage are zero-mean: they add up like the root of their number. One rounding with dither has a
    # standard deviation of at most 1/2 step; 6 standard deviations of 1024 elements' walks (chance 2e-6). 8 u more: an
    # integer code of 16 bits carries four roundings of the error in fp32, and its dither another (module's docstring).
    assert (lost <= 6 * variance.sqrt() + 2 * arithmetic).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("error_bits", ERROR_BITS)
@pytest.mark.parametrize("bits", BITS)
def test_error_is_bounded_by_the_largest_residual(bits: int, error_bits: int, beta: float) -> None:
    steps = 80
    largest_residual, largest_grad = torch.zeros(16), torch.zeros(16)
    error = ErrorState.zeros(16, 64, CPU, error_bits)
    for number, step in enumerate(run(error, decades(steps, seed=3), beta, bits), start=1):
        largest_residual = torch.maximum(largest_residual, step.residual.abs().amax(dim=1))
        largest_grad = torch.maximum(largest_grad, step.grad.abs().amax(dim=1))
        # An average of old error and residual is no larger than the larger of them. Storage keeps a block's amax within
        # 3 u (scale rule: test_quantize.py) and the average adds 3 u, per step.
        assert (step.stored.abs().amax(dim=1) <= largest_residual * (1 + 6 * U * number)).all()
        if bits > 1:
            limit = max_code(bits)
            # Half a step: 1/2 + 6 L u, and one more u * amax = L u steps for the rounding of h.
            assert (step.residual.abs().amax(dim=1) <= step.scales * (0.5 + 7 * limit * U)).all()
            # r <= (G + E) / 2L and E <= max r give E <= G / (2L - 1), whatever beta.
            assert (step.stored.abs().amax(dim=1) <= largest_grad / (2 * limit - 1) * (1 + 1e-4)).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("error_bits", ERROR_BITS)
def test_error_of_signs_is_bounded_by_what_they_keep(error_bits: int, beta: float) -> None:
    # With s the mean of |h| over n elements, r^2 summed is h^2 - n s^2: a share p^2 of h^2, p < 1. Then E <= p (G + E)
    # gives E <= G p / (1 - p) for the root of the sum, whatever beta.
    largest_share, largest_grad, largest_error = (torch.zeros(16, dtype=torch.float64) for _ in range(3))
    for step in run(ErrorState.zeros(16, 64, CPU, error_bits), decades(80, seed=3), beta, bits=1):
        compensated = (step.grad + step.old).double()
        squares = compensated.square().sum(dim=1)
        kept = compensated.abs().mean(dim=1).square() * 64
        # The sum is smallest at the mean, and the scale within 2^-18 amax of it: 64 * (2^-18 amax)^2 more, where h^2 is
        # amax^2 at least. The rounding of r is u of each element.
        assert ((step.residual.double().square().sum(dim=1) - (squares - kept)).abs() <= 1e-6 * squares).all()
        largest_share = torch.maximum(largest_share, (1 - kept / squares).sqrt())
        largest_grad = torch.maximum(largest_grad, step.grad.double().norm(dim=1))
        largest_error = torch.maximum(largest_error, step.stored.double().norm(dim=1))
    # Storage in 8 bits adds the variance of its dither, 64 elements of a quarter (1/127 amax)^2 each: 0.1 % of the
    # squares at every step, of which the loop keeps p^2 at least every 1 / (1 - beta) steps. A tenth is room enough.
    assert (
        largest_error <= largest_grad * largest_share / (1 - largest_share) * (1.1 if error_bits == 8 else 1.001)
    ).all()


def spread(smallest: float, largest: float) -> Tensor:
    """A block of one element of 1 and 127 constant ones, from ``smallest`` to ``largest``, of both signs."""
    grad = torch.ones(1, 128)
    grad[0, 1:] = torch.logspace(math.log10(smallest), math.log10(largest), 127)
    grad[0, 2::2] *= -1
    return grad


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
CONSTANT_GRADS = torch.cat([block * magnitude for block in CONSTANTS.values() for magnitude in CONSTANT_MAGNITUDES])
# Every width of code and error, and every beta.
CONSTANT_RUNS = [(4, 8, 2000, beta) for beta in BETAS] + [
    (bits, error_bits, 800, 0.8) for bits in BITS for error_bits in ERROR_BITS if (bits, error_bits) != (4, 8)
]


@pytest.mark.kind(19)
@pytest.mark.parametrize(("bits", "error_bits", "steps", "beta"), CONSTANT_RUNS)
def test_constant_tiny_gradient_arrives(bits: int, error_bits: int, steps: int, beta: float) -> None:
    grad = CONSTANT_GRADS
    sent = torch.zeros(grad.shape, dtype=torch.float64)
    all_scales, all_stored_scales, largest_error = [], [], torch.zeros(grad.shape)
    for step in run(ErrorState.zeros(*grad.shape, CPU, error_bits), constant(grad, steps), beta, bits):
        sent += step.sent
        all_scales.append(step.scales)
        all_stored_scales.append(step.stored_scales)
        largest_error = torch.maximum(largest_error, step.stored.abs())
    smallest_scales, scales = torch.stack(all_scales).aminmax(dim=0)
    smallest_scales, scales = smallest_scales[:, None], scales[:, None]
    stored_scales = torch.stack(all_stored_scales).amax(dim=0)[:, None]
    largest = (grad.abs() + largest_error).amax(dim=1, keepdim=True)
    # Storage adds the sum of its roundings over 1 - beta. They must be zero-mean (or a constant gradient is lost at a
    # constant rate): then they add up like the root of their number. One is at most a whole step of storage wide, of
    # standard deviation at most 1/2; 6 deviations.
    walk = 6 * math.sqrt(steps) * 0.5 * stored_scales
    if bits > 1:
        # Not sent yet is e / (1 - beta) with |e| at most half a step: 0.5, 1, 2.5 and 10 steps for the four betas.
        late = 0.5 * scales
        # So a step of storage is at most 1/254 of one on the wire (16 bits: 1/65534), and the walk is narrow.
        if error_bits < 32:
            assert (stored_scales <= scales / (2 * max_code(error_bits)) * (1 + 1e-4)).all()
        bounded = torch.ones(grad.shape, dtype=torch.bool)
    else:
        # |r| is |h| - s or s - |h|. Where |g| <= s always, neither is above the largest of s and the old |e|: |e| stays
        # below the largest s, but for the walk of its own roundings. The others: the bound of all squares, above.
        late = scales + walk
        bounded = grad.abs() <= smallest_scales
    # fp32 moves h by u, r by u, the average by 3 u, its codes by 4 u (linearly at worst, as gradients are constant).
    arithmetic = steps * 9 * U * largest
    allowed = (late + walk + arithmetic) / (1 - beta)
    behind = (sent - steps * grad.double()).abs()
    assert (behind <= allowed)[bounded].all(), (
        f"{(behind / scales).view(len(CONSTANTS), -1).amax(dim=1).tolist()} steps behind after {steps}"
    )
    # Of signs, the smaller half of each block at least.
    assert bounded.sum(dim=1).min() >= (128 if bits > 1 else 50)


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_storage_is_unbiased_inside_the_loop(beta: float) -> None:
    # The hardest loop: signs, whose error is large beside what it changes by in a step, so that what is stored decides
    # what is sent next. A dither that follows a pattern over the steps meets the loop's own (6 to 10 deviations).
    grad = torch.cat([CONSTANTS["normal"], spread(1e-2, 0.07), torch.randn(4, 128, generator=generator_of(9))])
    lost, variance = torch.zeros(grad.shape, dtype=torch.float64), torch.zeros(grad.shape[0], 1, dtype=torch.float64)
    for step in run(ErrorState.zeros(*grad.shape, CPU), constant(grad, 1500), beta, bits=1):
        lost += step.stored.double() - step.updated.double()
        variance += (step.stored_scales[:, None].double() / 2).square()
    # A rounding with dither has a standard deviation of at most 1/2 step; 768 walks.
    assert (lost.abs() / variance.sqrt()).max() <= 5


@pytest.mark.parametrize("bits", BITS)
def test_without_error_a_constant_tiny_gradient_is_lost(bits: int) -> None:
    # What error feedback is for. 100 steps of 1e-3 beside 1: below half a step in every width but 8 bits (1/254).
    steps, tiny = 100, 1e-3
    grad = equal_but_one(tiny)
    codes, scales = quantize_wire(grad, bits, grad.numel())
    sent = steps * dequantize_blocks(codes, scales).double()
    if bits > 1:
        assert not sent[0, 1:].any()
        assert sent[0, 0] == pytest.approx(steps)
    else:
        # A sign has no 0: all arrive as the mean, (1 + 127 * 1e-3) / 128, nine times too large for ever.
        assert torch.allclose(sent / steps, torch.tensor((1 + 127 * tiny) / 128, dtype=torch.float64), rtol=1e-3)


@pytest.mark.parametrize("error_bits", ERROR_BITS)
@pytest.mark.parametrize("bits", BITS)
def test_gradients_that_are_always_zero(bits: int, error_bits: int) -> None:
    # Embedding rows of tokens that do not occur, in blocks with rows of those that do.
    steps, beta = 100, 0.8
    dead = torch.rand(16, 64, generator=torch.Generator().manual_seed(12)) < 0.7
    grads = (torch.where(dead, -0.0 if number % 2 else 0.0, grad) for number, grad in enumerate(decades(steps)))
    moved, scales, stored_scales = torch.zeros(16, 64), torch.zeros(16, 1), torch.zeros(16, 1)
    for step in run(ErrorState.zeros(16, 64, CPU, error_bits), grads, beta, bits):
        moved += step.sent
        if bits > 1:
            assert not step.sent[dead].view(torch.int32).any()  # +0
            assert not step.stored[dead].any()
        else:
            assert (step.sent.abs() == step.scales[:, None]).all()
        scales = torch.maximum(scales, step.scales[:, None])
        stored_scales = torch.maximum(stored_scales, step.stored_scales[:, None])
    assert moved[~dead].abs().min() > 0
    # A sign moves each of them at every step, but back and forth: the bound of small constant gradients, above.
    walk = 6 * math.sqrt(steps) * 0.5 * stored_scales
    assert (moved.abs() <= (scales * (1 + 1e-4) + 2 * walk) / (1 - beta))[dead].all()


@pytest.mark.kind(1)
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


@pytest.mark.kind(1)
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


@pytest.mark.kind(29, 38)
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


def test_dither_is_the_documented_sequence() -> None:
    for step, element in ((0, 0), (1, 5), (511, 63)):
        dither = storage_dither(step, 3, 2, 32, CPU)
        assert dither.shape == (2, 32)
        assert dither.view(-1)[element].item() == literal_dither(step, 3 * 32 + element)


def test_dither_is_uniform_over_the_elements_and_unforeseeable_over_the_steps() -> None:
    steps = 2048
    dither = torch.stack([storage_dither(step, 3, 8, 32, CPU) for step in range(steps)]).view(steps, -1).double()
    assert dither.min() > 0
    assert dither.max() < 1
    # Of one step: a lattice of 256 points, whose share below a threshold is off by its discrepancy, below (2 + log2(N))
    # / N for this stride.
    for threshold in (0.01, 0.1, 0.5, 0.9):
        assert ((dither < threshold).double().mean(dim=1) - threshold).abs().max() <= (2 + 8) / 256
    # Of one element, as independent numbers: averages of N steps have a standard deviation of 1 / sqrt(12 N), and
    # of products of deviations from 1/2 some steps apart 1 / (12 sqrt(N)). 5 deviations, for 256 elements.
    assert (dither.mean(dim=0) - 0.5).abs().max() <= 5 / math.sqrt(12 * steps)
    for lag in range(1, 9):
        products = (dither[lag:] - 0.5) * (dither[:-lag] - 0.5)
        assert products.mean(dim=0).abs().max() <= 5 / 12 / math.sqrt(steps - lag)


def test_dither_of_large_buckets_and_late_steps() -> None:
    # Beyond 2^31 elements and 2^31 steps: the arithmetic is modulo 2^32.
    first_block = 2**33 // 32
    for step in (2**31 + 5, 2**40 + 1):
        dither = storage_dither(step, first_block, 1, 32, CPU)[0]
        assert dither[7].item() == literal_dither(step, 2**33 + 7)
