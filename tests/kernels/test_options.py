"""Every width of code and error, both scale modes, all block sizes: against the literal model, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_loco.config import LoCoConfig
from megatron_loco.core.error_feedback import ErrorState
from megatron_loco.core.quantize import max_code
from megatron_loco.core.wire import BucketLayout, ParamSpan
from megatron_loco.kernels import reference
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import NUM_STATISTICS, Backend, Statistics, check_encode
from tests._buckets import CPU, Oracle, layout_of, spans_of
from tests.kernels._bucket import BACKENDS, BETA, DTYPES, Arena, Bucket, decode, gradients, stored_error

BITS = (1, 2, 4, 8)
ERROR_BITS = (0, 8, 16, 32)
FIXED_SCALES = (None, 0.25)
"""A scale per block, and one at which unit noise meets all of the range and more of it in every width but 8 bits."""

OPTIONS = list(itertools.product(BITS, ERROR_BITS, FIXED_SCALES))
each_option = pytest.mark.parametrize(("bits", "error_bits", "fixed_scale"), OPTIONS)
each_backend = pytest.mark.parametrize("backend_class", BACKENDS)


def awkward(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Noise, every 40 elements of another kind: usual, tiny, zero, minus zero, subnormal, huge."""
    noise = gradients(numel, torch.float32, seed)
    largest = torch.finfo(dtype).max
    factors = (1.0, 1e-9, 0.0, -0.0, 1e-30, 1e4, 1e-42, largest / 3, 2.0**-24)
    for index, start in enumerate(range(0, numel, 40)):
        noise[start : start + 40] *= factors[(index + seed) % len(factors)]
    return noise.clamp(-largest, largest).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values; NaN equals NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))


def poison_padding(layout: BucketLayout, grad: Tensor) -> Tensor:
    for shard in layout.shards:
        for start, stop in shard.padding:
            grad[start:stop] = math.nan
    return grad


@each_backend
@each_option
@pytest.mark.parametrize("block_size", [32, 96, 256, 4096])
def test_equals_the_literal_model(
    backend_class: Callable[[], Backend], block_size: int, bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    backend = backend_class()
    number = OPTIONS.index((bits, error_bits, fixed_scale)) + block_size // 32
    dtype, beta = DTYPES[number % 3], (0.0, 0.5, 0.8, 0.95)[number % 4]
    numel = 2 * (4096 + 137) if block_size == 4096 else 2 * 509
    spans = [ParamSpan(3, numel - 5, False)] if block_size == 4096 else spans_of(numel)
    layout = layout_of(numel, 2, spans, LoCoConfig(bits=bits, block_size=block_size), dtype)
    bucket = Bucket.fresh(layout, error_bits, fixed_scale, beta)
    oracle = Oracle(layout, beta, error_bits=error_bits, fixed_scale=fixed_scale)
    for step, make in enumerate((awkward, gradients, awkward, gradients)):
        grad = poison_padding(layout, make(numel, dtype, number + step))
        if step == 1:
            grad[numel // 3] = math.nan
        bucket.encode(backend, grad, reset=step == 2)
        sent = oracle.send(grad, reset=step == 2)
        assert torch.equal(stored_error(layout, bucket.error), oracle.error)
        assert torch.isfinite(oracle.error).all()
        for rank, shard in enumerate(layout.shards):
            output = decode(backend, [bucket, bucket], rank, dtype)
            part = sent[shard.start : shard.stop]
            assert same(output, (part + part).to(dtype))


@each_backend
@each_option
def test_error_of_a_step_is_bounded(
    backend_class: Callable[[], Backend], bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    # Every accepted value, by what it says: half a step of its own scale; a sign errs by its scale or the rest.
    backend = backend_class()
    numel = 96 * 5
    layout = layout_of(numel, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=bits, block_size=96))
    bucket = Bucket.fresh(layout, error_bits, fixed_scale)
    limit = max_code(bits)
    for step in range(4):
        grad = gradients(numel, torch.float32, seed=step)
        compensated = (grad + stored_error(layout, bucket.error)).view(5, 96).double()
        bucket.encode(backend, grad)
        sent = decode(backend, [bucket], 0, torch.float32).view(5, 96).double()
        amax = compensated.abs().amax(dim=1, keepdim=True)
        mean = compensated.abs().mean(dim=1, keepdim=True)
        if bits == 1:
            scale = mean if fixed_scale is None else torch.tensor(fixed_scale)
            bound = (compensated.abs() - scale).abs()
        else:
            scale = amax / limit if fixed_scale is None else torch.tensor(fixed_scale)
            bound = torch.maximum(scale / 2, compensated.abs() - limit * scale)
        # fp32: at most 7 L u steps (tests/core/test_quantize.py), or 2^-18 amax for the mean.
        assert ((sent - compensated).abs() <= bound + torch.maximum(7 * 2**-24 * limit * scale, 2**-18 * amax)).all()


@pytest.mark.kind(31)
@each_backend
@each_option
@pytest.mark.parametrize("numel", [1, 3 * 32 + 7])
def test_nothing_outside_is_read_or_written(
    backend_class: Callable[[], Backend], numel: int, bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    # As in test_reference.py: a partial block with rubbish behind it; here in bf16, without exact elements.
    backend, total = backend_class(), numel + 11
    layout = layout_of(total, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=bits, block_size=32), torch.bfloat16)
    empty = ErrorState.zeros(layout.error_rows, 32, CPU, error_bits)
    results = []
    for fill, byte in ((math.nan, 0xFF), (0.0, 0x00)):
        grad = Arena(total, torch.bfloat16, fill)
        grad.inside[:numel] = gradients(numel, torch.bfloat16, seed=1)
        send = Arena(layout.send_bytes, torch.uint8, byte)
        code_fill = fill if error_bits == 32 else -1 if byte else 0
        codes = Arena(empty.codes.numel(), empty.codes.dtype, code_fill)
        scales = Arena(empty.scales.numel(), torch.float32, fill)
        statistics = Arena(NUM_STATISTICS, torch.float64, fill)
        output = Arena(total, torch.bfloat16, fill)
        for arena in (codes, scales, statistics):
            arena.inside.zero_()
        bucket = Bucket(
            layout,
            ErrorState(codes.inside.view(-1, 32), scales.inside, error_bits),
            send.inside,
            statistics.inside,
            None if fixed_scale is None else torch.tensor(fixed_scale),
        )
        for _ in range(3):
            bucket.encode(backend, grad.inside)
        backend.decode_sum(send.inside, layout, 0, output.inside, divisor=1)
        assert all(arena.untouched() for arena in (grad, send, codes, scales, statistics, output))
        assert torch.isfinite(output.inside).all()
        assert not output.inside[numel:].any()
        results.append((send.inside, codes.inside, scales.inside, statistics.inside, output.inside))
    for with_nan, with_zeros in zip(*results, strict=True):
        assert torch.equal(with_nan, with_zeros)


@pytest.mark.kind(1, 3)
@each_backend
@each_option
def test_nonfinite_block_alone_is_lost_and_keeps_its_error(
    backend_class: Callable[[], Backend], bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    backend, numel = backend_class(), 200
    value = (math.nan, math.inf, -math.inf)[OPTIONS.index((bits, error_bits, fixed_scale)) % 3]
    layout = layout_of(numel, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=bits, block_size=64))
    bucket, twin = (Bucket.fresh(layout, error_bits, fixed_scale) for _ in range(2))
    for each in (bucket, twin):
        each.encode(backend, gradients(numel, torch.float32, seed=7))
    if error_bits == 32:  # bit for bit: also what a sum would turn into +0
        for each in (bucket, twin):
            each.error.codes[3, 2] = -0.0
    kept = {name: tensor.clone() for name, tensor in bucket.error.tensors().items()}
    grad = gradients(numel, torch.float32, seed=8)
    twin.encode(backend, grad)
    grad[199] = value  # in the last block, of 8 elements
    bucket.statistics.zero_()
    bucket.encode(backend, grad)
    output, expected = (decode(backend, [each], 0, torch.float32) for each in (bucket, twin))
    assert output[192:].isnan().all()
    assert torch.equal(output[:192], expected[:192])
    for name, tensor in bucket.error.tensors().items():
        if tensor.numel():
            assert torch.equal(tensor[3:].view(torch.uint8), kept[name][3:].view(torch.uint8))
            assert torch.equal(tensor[:3], twin.error.tensors()[name][:3])
    assert bucket.statistics[Statistics.NONFINITE_BLOCKS] == 1
    assert torch.isfinite(bucket.statistics).all()
    bucket.encode(backend, grad, reset=True)
    assert not any(tensor.any() for tensor in bucket.error.tensors().values())


@each_backend
@each_option
def test_statistics_are_of_the_elements_of_the_bucket(
    backend_class: Callable[[], Backend], bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    backend, numel = backend_class(), 1021
    spans = [span for span in spans_of(numel) if not span.exact]
    layout = layout_of(numel, 1, spans, LoCoConfig(bits=bits, block_size=96))
    bucket = Bucket.fresh(layout, error_bits, fixed_scale)
    oracle = Oracle(layout, BETA, error_bits=error_bits, fixed_scale=fixed_scale)
    inside = torch.zeros(numel, dtype=torch.bool)
    for span in spans:
        inside[span.start : span.stop] = True
    totals = torch.zeros(3, dtype=torch.float64)
    for step in range(3):
        grad = torch.where(inside, gradients(numel, torch.float32, seed=step), 0.0)
        old = oracle.error.clone()
        residual = grad + old - oracle.send(grad, reset=step == 1)
        new = old * torch.tensor(BETA) + residual * torch.tensor(1 - BETA)
        totals += torch.stack([values.double().square().sum() for values in (grad, residual, new * (step != 1))])
        bucket.encode(backend, grad, reset=step == 1)
    if not error_bits:
        assert bucket.statistics[Statistics.ERROR_SQ] == 0
        totals[Statistics.ERROR_SQ] = 0
    # As in test_reference.py: sums of a block may be in fp32, and e' may be rounded by its storage or not.
    torch.testing.assert_close(bucket.statistics[:2], totals[:2], rtol=97 * 2**-24, atol=0.0)
    torch.testing.assert_close(bucket.statistics[2], totals[2], rtol=0.02, atol=0.0)
    assert bucket.statistics[Statistics.NONFINITE_BLOCKS] == 0


@pytest.mark.kind(19)
@each_backend
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("error_bits", ERROR_BITS)
def test_relative_error_does_not_depend_on_the_magnitude(
    backend_class: Callable[[], Backend], bits: int, error_bits: int
) -> None:
    backend, numel = backend_class(), 64 * 16
    layout = layout_of(numel, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=bits, block_size=64))

    def relative_error(factor: float) -> float:
        bucket = Bucket.fresh(layout, error_bits)
        for step in range(3):
            bucket.statistics.zero_()
            bucket.encode(backend, gradients(numel, torch.float32, seed=step, scale=factor))
        return math.sqrt(bucket.statistics[Statistics.RESIDUAL_SQ] / bucket.statistics[Statistics.GRAD_SQ])

    usual = relative_error(1.0)
    assert 0.2 < usual * max_code(bits) < 2
    # A compiled backend may add the squares of a block in fp32 where that is safe: at most 20 roundings per lane of 4,
    # of positive terms, in numerator and denominator; the root halves them.
    tolerance = 1e-12 if backend_class is ReferenceBackend else 20 * 2**-24
    for exponent in (-99, -40, 13):  # powers of two change nothing but exponents
        assert relative_error(2.0**exponent) == pytest.approx(usual, rel=tolerance)
    for power in (-29.9, *range(-12, 5)):
        # Rounding to fp32 and to the stored error's codes moves values over a border between two codes here and there,
        # where both err by half a step; a changed code of the stored error moves one element by 1/127 of its error.
        assert relative_error(10.0**power) == pytest.approx(usual, rel=2e-3)


@each_backend
@each_option
@pytest.mark.parametrize("piece_elements", [1, 64 * 7])
def test_size_of_the_pieces_changes_nothing(
    backend_class: Callable[[], Backend],
    piece_elements: int,
    bits: int,
    error_bits: int,
    fixed_scale: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend_class is not ReferenceBackend:
        pytest.skip("pieces are the reference's")
    numel = 32 * 40 + 2
    layout = layout_of(numel, 1, [ParamSpan(0, numel - 5, False)], LoCoConfig(bits=bits, block_size=32))
    whole, pieces = (Bucket.fresh(layout, error_bits, fixed_scale) for _ in range(2))
    grad = gradients(numel, torch.float32, seed=5)
    for _ in range(2):
        whole.encode(ReferenceBackend(), grad)
    monkeypatch.setattr(reference, "PIECE_ELEMENTS", piece_elements)
    for _ in range(2):
        pieces.encode(ReferenceBackend(), grad)
    assert torch.equal(pieces.send, whole.send)
    for name, tensor in pieces.error.tensors().items():
        assert torch.equal(tensor, whole.error.tensors()[name])


@each_backend
@pytest.mark.parametrize("error_bits", ERROR_BITS[1:])
@pytest.mark.parametrize("bits", BITS)
def test_conservation_through_the_wire(backend_class: Callable[[], Backend], bits: int, error_bits: int) -> None:
    # What arrives in 30 steps is what was given, but for the error that is left; with one constant scale, of which
    # 4 bits reach to 1.75: the excess arrives later.
    backend, numel, steps = backend_class(), 64 * 5 + 9, 30
    layout = layout_of(numel, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=bits, block_size=64))
    grads = [gradients(numel, torch.float32, seed=step) for step in range(steps)]
    for fixed_scale in FIXED_SCALES:
        bucket = Bucket.fresh(layout, error_bits, fixed_scale)
        missing = torch.zeros(numel, dtype=torch.float64)
        storage_step = largest = 0.0
        for grad in grads:
            largest = max(largest, (grad + stored_error(layout, bucket.error)).abs().max().item())
            bucket.encode(backend, grad)
            missing += grad.double() - decode(backend, [bucket], 0, torch.float32).double()
            if error_bits < 32:
                storage_step = max(storage_step, bucket.error.scales.max().item())
        lost = (missing - stored_error(layout, bucket.error).double() / (1 - BETA)).abs().max().item()
        # tests/core/test_error_feedback.py has the reasons: 6 deviations of the walk of the storage's roundings, and 16
        # roundings of fp32 per step at worst.
        assert lost <= (6 * math.sqrt(steps) / 2 * storage_step + steps * 16 * 2**-24 * largest) / (1 - BETA)


@pytest.mark.parametrize("error_bits", ERROR_BITS)
def test_check_knows_the_tensors_of_every_width(error_bits: int) -> None:
    layout = layout_of(512, 2, [ParamSpan(0, 512, False)], LoCoConfig(bits=1, block_size=64))
    bucket = Bucket.fresh(layout, error_bits)
    error, grad = bucket.error, torch.zeros(512)
    check_encode(grad, error, layout, bucket.send)
    for other in set(ERROR_BITS) - {error_bits}:
        wrong = ErrorState(error.codes, error.scales, other)
        with pytest.raises(ValueError, match=r"error\.(codes|scales) must "):
            check_encode(grad, wrong, layout, bucket.send)
    other_rows = error.codes[:3] if error_bits else torch.zeros(8, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"error\.codes must have shape"):
        check_encode(grad, ErrorState(other_rows, error.scales, error_bits), layout, bucket.send)
    if error_bits in (8, 16):
        with pytest.raises(ValueError, match=r"error\.scales must have shape \[8\]"):
            check_encode(grad, ErrorState(error.codes, error.scales[:7], error_bits), layout, bucket.send)
    assert error.rows(2, 5).codes.shape == (3 if error_bits else 0, 64)
    assert error.num_bytes == {0: 0, 8: 8 * 68, 16: 8 * 132, 32: 8 * 256}[error_bits]
