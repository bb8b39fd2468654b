"""The Triton kernels in Triton's interpreter against the plain-torch backend: every byte that is written, bit for bit.

The interpreter runs about 0.1 million elements per second, so buckets are small: all options at one block size each,
all block sizes at one option. ``test_reference.py`` and ``test_options.py`` hold every registered backend to the
literal model as well.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from megatron_loco.config import LoCoConfig
from megatron_loco.core.chunks import split_layout
from megatron_loco.core.error_feedback import step_hash, storage_dither
from megatron_loco.core.wire import BucketLayout, ParamSpan
from megatron_loco.kernels import triton_settings
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import Statistics
from megatron_loco.kernels.triton_backend import TritonBackend, load_kernels
from megatron_loco.kernels.triton_plan import make_plan
from megatron_loco.kernels.triton_settings import ITEM_ELEMENTS, code_unit, tile
from tests._buckets import CPU, layout_of, spans_of
from tests.kernels import test_options as options
from tests.kernels._bucket import DTYPES, Bucket, decode, exchange, gradients
from tests.kernels.test_options import OPTIONS, awkward, poison_padding

REFERENCE = ReferenceBackend()
OPTION_BLOCK_SIZES = (32, 96, 256, 512)
BLOCK_SIZES = (32, 64, 160, 512, 1024, 2016, 2048, 4096)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, on the way to Inf


@pytest.fixture(scope="module")
def interpreted() -> TritonBackend:
    return TritonBackend(CPU, interpret=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, but any NaN equals any other (processors differ in the NaN that an operation returns)."""
    if a.dtype.is_floating_point:
        a, b = (torch.where(x.isnan(), torch.full_like(x, math.nan), x) for x in (a, b))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_step(bucket: Bucket, expected: Bucket) -> None:
    """Equal send buffers, errors and, but for the last bits, statistics."""
    assert torch.equal(bucket.send, expected.send)
    for name, tensor in bucket.error.tensors().items():
        assert same_bits(tensor, expected.error.tensors()[name]), name
    # Of fp32 in a block: a rounding of each square and of each of the at most 12 levels of sums of the kernel, which
    # adds in a tree; 2^-24 each. Twice as much again for the error, whose squares are of numbers that were rounded.
    torch.testing.assert_close(bucket.statistics, expected.statistics, rtol=48 * 2**-24, atol=0.0)


def assert_same_sums(
    backend: TritonBackend, buckets: list[Bucket], rank: int, dtype: torch.dtype, divisor: int = 1
) -> None:
    outputs = [decode(each, buckets, rank, dtype, divisor) for each in (backend, REFERENCE)]
    assert same_bits(*outputs)


@pytest.mark.parametrize(("bits", "error_bits", "fixed_scale"), OPTIONS)
def test_every_option_equals_the_reference(
    interpreted: TritonBackend, bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    # Two ranks, exact ranges, padding with NaN, partial blocks; a step with NaN, and one that resets.
    number = OPTIONS.index((bits, error_bits, fixed_scale))
    dtype, beta = DTYPES[number % 3], (0.0, 0.5, 0.8, 0.95)[number % 4]
    block_size = OPTION_BLOCK_SIZES[number * 5 // 4 % 4]
    numel = 2 * 509
    layout = layout_of(numel, 2, spans_of(numel), LoCoConfig(bits=bits, block_size=block_size), dtype)
    bucket, expected = (Bucket.fresh(layout, error_bits, fixed_scale, beta) for _ in range(2))
    for each in (bucket, expected):
        each.send.fill_(0xAA)
    for step, make in enumerate((awkward, gradients, awkward)):
        grad = poison_padding(layout, make(numel, dtype, number + step))
        if step == 1:
            grad[numel // 3] = math.nan
        before = grad.clone()
        bucket.encode(interpreted, grad, reset=step == 2)
        expected.encode(REFERENCE, grad, reset=step == 2)
        assert same_bits(grad, before)
        assert_same_step(bucket, expected)
    for rank, divisor in ((0, 1), (0, 3), (1, 2)):
        assert_same_sums(interpreted, [bucket, bucket], rank, dtype, divisor)


@pytest.mark.parametrize(
    ("bits", "error_bits", "fixed_scale"), [(1, 8, None), (2, 16, 0.25), (4, 8, None), (8, 32, 0.25)]
)
def test_checks_of_every_backend_hold(
    interpreted: TritonBackend, bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    # A few of what test_options.py holds every backend to, which takes minutes in the interpreter.
    option = (bits, error_bits, fixed_scale)
    options.test_nothing_outside_is_read_or_written(lambda: interpreted, 3 * 32 + 7, *option)
    options.test_nonfinite_block_alone_is_lost_and_keeps_its_error(lambda: interpreted, *option)
    options.test_statistics_are_of_the_elements_of_the_bucket(lambda: interpreted, *option)
    options.test_equals_the_literal_model(lambda: interpreted, 96, *option)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_equals_the_reference(interpreted: TritonBackend, block_size: int) -> None:
    # One long run that ends in a partial block, and a short one at an odd element.
    shard = 2 * block_size + 37 + 29
    numel = 3 * shard
    spans = [ParamSpan(0, 2 * block_size + 37, False), ParamSpan(2 * block_size + 38, shard, False)]
    for bits, dtype in ((4, torch.bfloat16), (8, torch.float32)):
        layout = layout_of(numel, 3, spans, LoCoConfig(bits=bits, block_size=block_size), dtype)
        bucket, expected = Bucket.fresh(layout), Bucket.fresh(layout)
        for step in range(2):
            grad = gradients(numel, dtype, seed=step)
            bucket.encode(interpreted, grad)
            expected.encode(REFERENCE, grad)
            assert_same_step(bucket, expected)
        assert_same_sums(interpreted, [bucket] * 3, 0, dtype, divisor=3)


def test_random_layouts_of_many_runs_equal_the_reference(interpreted: TritonBackend) -> None:
    # Programs with one block of many; empty shards; exact parameters of any length.
    source = random.Random(5)
    for seed in range(4):
        world_size = source.choice((1, 3, 5))
        numel = source.randint(20, 200) * world_size
        spans, start = [], source.choice((0, 7))
        while start < numel:
            stop = min(numel, start + source.choice((1, 32, 64, source.randint(1, 90))))
            spans.append(ParamSpan(start, stop, source.random() < 0.3))
            start = stop + source.choice((0, 0, source.randint(1, 40)))
        dtype, bits = source.choice(DTYPES), source.choice((1, 2, 4, 8))
        layout = layout_of(numel, world_size, spans, LoCoConfig(bits=bits, block_size=32), dtype)
        buckets = [Bucket.fresh(layout) for _ in range(world_size)]
        for rank, bucket in enumerate(buckets):
            grad, expected = gradients(numel, dtype, seed + 100 * rank), Bucket.fresh(layout)
            bucket.encode(interpreted, grad)
            expected.encode(REFERENCE, grad)
            assert_same_step(bucket, expected)
        for rank in range(world_size):
            assert_same_sums(interpreted, buckets, rank, dtype, divisor=source.choice((1, world_size)))


def test_more_blocks_and_items_than_one_program_takes(interpreted: TritonBackend) -> None:
    # 4096 elements of blocks, 2048 of an exact range, 2048 of padding.
    numel = 2 * (9000 + 5000 + 2 * ITEM_ELEMENTS + 100)
    spans = [ParamSpan(0, 9000, False), ParamSpan(9000, 14000, True)]
    layout = layout_of(numel, 2, spans, LoCoConfig(bits=4, block_size=256), torch.bfloat16)
    bucket, expected = Bucket.fresh(layout), Bucket.fresh(layout)
    grad = gradients(numel, torch.bfloat16, seed=2)
    bucket.encode(interpreted, grad)
    expected.encode(REFERENCE, grad)
    assert_same_step(bucket, expected)
    assert_same_sums(interpreted, [bucket] * 2, 0, torch.bfloat16)


@pytest.mark.parametrize("scale", [2.0**-101, 2.0**101, 0.0, -1.0, math.inf, math.nan])
def test_unusable_fixed_scale_is_seen_on_the_device(interpreted: TritonBackend, scale: float) -> None:
    layout = layout_of(70, 1, [ParamSpan(0, 70, False)], LoCoConfig(bits=4, block_size=32))
    bucket, expected = (Bucket.fresh(layout, fixed_scale=scale) for _ in range(2))
    grad = gradients(70, torch.float32, seed=1)
    bucket.encode(interpreted, grad)
    expected.encode(REFERENCE, grad)
    assert decode(interpreted, [bucket], 0, torch.float32).isnan().all()
    assert not bucket.error.codes.any()
    assert bucket.statistics.tolist() == expected.statistics.tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize("error_bits", [8, 16, 32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_reset_clears_the_error_of_a_nonfinite_block(interpreted: TritonBackend, value: float, error_bits: int) -> None:
    layout = layout_of(64, 1, [ParamSpan(0, 64, False)], LoCoConfig(bits=4, block_size=32))
    bucket = Bucket.fresh(layout, error_bits)
    bucket.encode(interpreted, gradients(64, torch.float32, seed=1))
    assert bucket.error.codes[1].any()
    bucket.encode(interpreted, torch.full((64,), value), reset=True)
    for tensor in bucket.error.tensors().values():
        assert not tensor.view(torch.uint8).any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_largest_numbers_equal_the_reference(interpreted: TritonBackend, bits: int) -> None:
    # Scales, residuals and errors at the end of fp32's range, where products overflow.
    layout = layout_of(64, 1, [ParamSpan(0, 64, False)], LoCoConfig(bits=bits, block_size=32))
    bucket, expected = Bucket.fresh(layout), Bucket.fresh(layout)
    largest = torch.finfo(torch.float32).max
    for step in range(3):
        grad = gradients(64, torch.float32, seed=step, scale=largest / 3).clamp(-largest, largest)
        bucket.encode(interpreted, grad)
        expected.encode(REFERENCE, grad)
        assert torch.equal(bucket.send, expected.send)
        assert same_bits(bucket.error.codes, expected.error.codes)
        assert same_bits(bucket.error.scales, expected.error.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_minus_zeros_is_minus_zero(interpreted: TritonBackend, dtype: torch.dtype) -> None:
    layout = layout_of(15, 3, [ParamSpan(0, 15, True)], LoCoConfig(bits=4), dtype)
    bucket = Bucket.fresh(layout)
    bucket.encode(interpreted, -torch.zeros(15, dtype=dtype))
    for divisor in (1, 2, 3):
        output = decode(interpreted, [bucket] * 3, 0, dtype, divisor)
        assert torch.signbit(output).all()
        assert not output.any()


def test_chunks_share_the_error_and_the_output(interpreted: TritonBackend) -> None:
    numel = 1021 * 2
    layout = layout_of(numel, 2, spans_of(numel), LoCoConfig(bits=4, block_size=32), torch.bfloat16)
    whole, parts = Bucket.fresh(layout), Bucket.fresh(layout)
    chunks = split_layout(layout, 3)
    sends = [torch.full((chunk.send_bytes,), 0xAA, dtype=torch.uint8) for chunk in chunks]
    grad = gradients(numel, torch.bfloat16, seed=3)
    whole.encode(REFERENCE, grad)
    for chunk, send in zip(chunks, sends, strict=True):
        parts.encode_chunk(interpreted, grad, chunk, send)
    assert torch.equal(parts.error.codes, whole.error.codes)
    assert torch.equal(parts.error.scales, whole.error.scales)
    for rank in range(2):
        output = torch.full((layout.shard_numel,), math.nan, dtype=torch.bfloat16)
        for chunk, send in zip(chunks, sends, strict=True):
            payload = send[chunk.send_offsets[rank] :][: chunk.send_splits[rank]]
            interpreted.decode_sum(payload.repeat(2), chunk, rank, output, divisor=1)
        assert same_bits(output, decode(REFERENCE, [whole] * 2, rank, torch.bfloat16))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18])
def test_statistics_do_not_underflow(interpreted: TritonBackend, scale: float, bits: int) -> None:
    numel = 500
    layout = layout_of(numel, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=bits, block_size=96))
    bucket, expected = Bucket.fresh(layout), Bucket.fresh(layout)
    for step in range(2):
        grad = gradients(numel, torch.float32, seed=step, scale=scale)
        bucket.encode(interpreted, grad)
        expected.encode(REFERENCE, grad)
    assert bucket.statistics[Statistics.GRAD_SQ] > 0
    torch.testing.assert_close(bucket.statistics, expected.statistics, rtol=48 * 2**-24, atol=0.0)


def test_statistics_of_many_programs(interpreted: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seven runs are seven programs, which are here added up two at a time.
    monkeypatch.setattr(triton_settings, "PARTIALS_AT_A_TIME", 2)
    triton_settings.encode_rest_settings.cache_clear()
    spans = [ParamSpan(start, start + 20, False) for start in range(0, 7 * 40, 40)]
    layout = layout_of(7 * 40, 1, spans, LoCoConfig(bits=4, block_size=32))
    bucket, expected = Bucket.fresh(layout), Bucket.fresh(layout)
    grad = gradients(7 * 40, torch.float32, seed=5)
    bucket.encode(interpreted, grad)
    expected.encode(REFERENCE, grad)
    triton_settings.encode_rest_settings.cache_clear()
    assert len(make_plan(layout, -1, CPU).programs) == 7
    assert_same_step(bucket, expected)


def test_statistics_are_added_to_and_repeat_exactly(interpreted: TritonBackend) -> None:
    layout = layout_of(3000, 1, [ParamSpan(0, 3000, False)], LoCoConfig(bits=4, block_size=32))
    grad = gradients(3000, torch.float32, seed=4)
    first, second = Bucket.fresh(layout), Bucket.fresh(layout)
    first.encode(interpreted, grad)
    second.encode(interpreted, grad)
    assert torch.equal(first.statistics, second.statistics)
    third = Bucket.fresh(layout)
    third.statistics.fill_(2.0**40)
    third.encode(interpreted, grad)
    assert torch.equal(third.statistics, first.statistics + 2.0**40)


@pytest.mark.parametrize("rank", [-1, 0, 2])
@pytest.mark.parametrize("block_size", [32, 96, 4096])
def test_plan_covers_every_block_once(block_size: int, rank: int) -> None:
    numel = 9000 * 3
    layout = layout_of(numel, 3, spans_of(numel), LoCoConfig(bits=4, block_size=block_size), torch.bfloat16)
    plan = make_plan(layout, rank, CPU)
    rows = tile(block_size, 4).rows
    assert 2048 < rows * block_size <= 4096
    origin = max(rank, 0) * layout.shard_numel
    found = []
    unit, of_codes = plan.unit, code_unit(block_size, 4)
    for element, length, row, codes, scales in plan.programs.tolist():
        assert element % unit == length % unit == codes % of_codes == scales % 4 == 0  # what the kernels are told
        assert 0 < length <= rows * block_size
        for index in range(-(-length // block_size)):
            start = index * block_size
            found.append(
                (
                    element + start + origin,
                    min(block_size, length - start),
                    row + index,
                    codes + index * layout.code_block_bytes,
                    scales + index * 4,
                )
            )
    assert found == list(_blocks(layout, rank))
    for element, length, values in plan.exact.tolist():
        assert element % plan.exact_unit == length % plan.exact_unit == values % (2 * plan.exact_unit) == 0
        assert 0 < length <= ITEM_ELEMENTS
    assert plan.exact[:, 1].sum() == sum(
        shard.num_exact for index, shard in enumerate(layout.shards) if rank in (-1, index)
    )


def _blocks(layout: BucketLayout, rank: int) -> Iterator[tuple[int, int, int, int, int]]:
    # Element, number of elements, row, bytes of codes and scale of every block, from the layout itself.
    for index, (shard, base) in enumerate(zip(layout.shards, layout.send_offsets, strict=True)):
        if rank not in (-1, index):
            continue
        base = base if rank < 0 else 0
        block = 0
        for run in shard.runs:
            for start in range(run.start, run.stop, layout.block_size):
                yield (
                    start,
                    min(layout.block_size, run.stop - start),
                    shard.first_block + block,
                    base + block * layout.code_block_bytes,
                    base + shard.scales_offset + block * 4,
                )
                block += 1


@pytest.mark.parametrize(
    ("spans", "unit", "exact_unit"),
    [
        ([ParamSpan(0, 256, False), ParamSpan(512, 768, False)], 16, 16),
        ([ParamSpan(0, 256, False), ParamSpan(520, 776, False)], 8, 16),
        ([ParamSpan(0, 252, False)], 4, 16),
        ([ParamSpan(6, 200, False)], 2, 16),
        ([ParamSpan(0, 256, False), ParamSpan(256, 291, False)], 1, 16),
        ([ParamSpan(1, 1024, True)], 16, 1),
        # Codes and scale of one block fill 32 bytes: the values start at the place of the eighth fp32 number.
        ([ParamSpan(0, 32, False), ParamSpan(32, 1024, True)], 16, 8),
    ],
)
def test_alignment_is_found(spans: list[ParamSpan], unit: int, exact_unit: int) -> None:
    layout = layout_of(1024, 1, spans, LoCoConfig(bits=4, block_size=32))
    for rank in (-1, 0):
        plan = make_plan(layout, rank, CPU)
        assert (plan.unit, plan.exact_unit) == (unit, exact_unit)


def interpret(function: Any) -> Any:
    """A kernel of this file for the interpreter."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        return triton.jit(function)


ENCODE, DECODE = (
    kernel.fn.__globals__ for kernel in (load_kernels(True).encode_blocks, load_kernels(True).decode_blocks)
)
offset_of, place, dither, rounded_to = ENCODE["offset_of"], ENCODE["place"], ENCODE["dither"], DECODE["rounded_to"]


@interpret
def offsets_kernel(programs_ptr, offsets_ptr, rows_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    element, _numel, row, codes, scales = place(programs_ptr, 1, 16)
    block = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    place_of = block * COLUMNS + column
    tl.store(offsets_ptr + place_of, offset_of(element, block, column, 1, 2 * COLUMNS, COLUMNS))
    tl.store(offsets_ptr + ROWS * COLUMNS + place_of, offset_of(codes, block, column, 0, COLUMNS, COLUMNS))
    tl.store(rows_ptr, row * (2 * COLUMNS))
    tl.store(rows_ptr + 1, scales)


def test_offsets_are_of_64_bits() -> None:
    element, row, codes, scales = 2**40 + 12345, 2**31 + 7, 2**39 + 16, 2**41 + 4
    programs = torch.tensor([[element, 256, row, codes, scales]])
    offsets, rows = torch.zeros(2, 4, 32, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    offsets_kernel[(1,)](programs, offsets, rows, ROWS=4, COLUMNS=32)
    block, column = torch.arange(4)[:, None], torch.arange(32)
    assert torch.equal(offsets[0], element + block * 64 + column + 32)
    assert torch.equal(offsets[1], codes + block * 32 + column)
    assert rows.tolist() == [row * 64, scales]


@interpret
def dither_kernel(output_ptr, row, step_hash, BLOCK_SIZE: tl.constexpr):
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    block = tl.arange(0, 2)[:, None]
    offset = block * BLOCK_SIZE + column
    tl.store(output_ptr + offset, dither(row.to(tl.int64), offset, step_hash, BLOCK_SIZE))


@pytest.mark.parametrize("row", [0, 3, 2**24 - 1, 2**31 - 2])
@pytest.mark.parametrize("step", [0, 1, 1000003])
def test_dither_equals_the_reference(row: int, step: int) -> None:
    # The element's index is beyond 2^32 for the last row.
    output = torch.zeros(2, 256)
    number = step_hash(step)
    dither_kernel[(1,)](output, row, number - 2**32 if number >= 2**31 else number, BLOCK_SIZE=256)
    assert torch.equal(output, storage_dither(step, row, 2, 256, CPU))


@interpret
def rounding_kernel(output_ptr, x_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(output_ptr + index, rounded_to(tl.load(x_ptr + index), output_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    # Ties in both directions, the largest numbers, subnormal ones, all signs, Inf, and NaN whose payload would carry.
    exponents = [0x3F800000, 0x00000000, 0x7F000000, 0x38800000, 0x33000000]
    ends = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001, 0x1000, 0x1001, 0x3000, 0x7FFFFF]
    patterns = [e + b for e, b in itertools.product(exponents, ends)] + [0x7F800000, 0x7F7FFFFF, 0x7FFFFFFF]
    patterns += [p - 2**31 for p in patterns]
    x = torch.tensor(patterns, dtype=torch.int32)
    x = torch.cat([x, torch.zeros(128 - len(x), dtype=torch.int32)]).view(torch.float32)
    output = torch.zeros(128, dtype=dtype)
    rounding_kernel[(1,)](output, x, N=128)
    assert same_bits(output, x.to(dtype))


def test_cpu_without_the_interpreter_is_refused() -> None:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        with pytest.raises(ValueError, match=r"--loco-backend triton.*CUDA.*got cpu.*TRITON_INTERPRET=1"):
            TritonBackend(CPU)
        triton.knobs.runtime.interpret = True  # as TRITON_INTERPRET=1 sets it
        assert TritonBackend(CPU).name == "triton"


def test_loading_kernels_leaves_the_settings_of_the_process() -> None:
    before = dict(os.environ)
    load_kernels.cache_clear()
    try:
        assert load_kernels(True) is not load_kernels(False)
    finally:
        load_kernels.cache_clear()
    assert dict(os.environ) == before
    assert not any(name.startswith("megatron_loco.kernels.triton_encode") for name in sys.modules)


def test_missing_triton_is_named() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from megatron_loco.kernels.triton_backend import TritonBackend
try:
    TritonBackend(torch.device("cuda"))
except ValueError as error:
    assert "--loco-backend triton: Triton is not installed" in str(error), error
else:
    raise AssertionError("no error")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_buffers_that_cannot_hold_scales_are_refused(interpreted: TritonBackend) -> None:
    layout = layout_of(64, 1, [ParamSpan(0, 64, False)], LoCoConfig(bits=4, block_size=32))
    bucket = Bucket.fresh(layout)
    bucket.send = torch.zeros(layout.send_bytes + 1, dtype=torch.uint8)[1:]
    with pytest.raises(ValueError, match="send must start at a multiple of 4 bytes"):
        bucket.encode(interpreted, torch.zeros(64))
    with pytest.raises(ValueError, match="recv must start at a multiple of 4 bytes"):
        interpreted.decode_sum(bucket.send, layout, 0, torch.zeros(64), divisor=1)


def test_second_call_with_a_layout_makes_nothing_anew(
    interpreted: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(64, 1, [ParamSpan(0, 64, False)], LoCoConfig(bits=4, block_size=32))
    bucket = Bucket.fresh(layout)
    bucket.encode(interpreted, torch.ones(64))
    decode(interpreted, [bucket], 0, torch.float32)
    monkeypatch.setattr("megatron_loco.kernels.triton_plan.make_plan", None)
    bucket.encode(interpreted, torch.ones(64))
    output = torch.zeros(64)
    interpreted.decode_sum(exchange([bucket], 0), layout, 0, output, divisor=1)
    assert output.all()
