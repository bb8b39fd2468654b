"""The compiled backend against the plain-torch one, bit for bit, for every kind of machine that this one can play."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_loco.config import LoCoConfig
from megatron_loco.core.chunks import split_layout
from megatron_loco.core.error_feedback import ErrorState
from megatron_loco.core.wire import BucketLayout, ParamSpan
from megatron_loco.kernels import cpu_backend
from megatron_loco.kernels.cpu_backend import CpuBackend
from megatron_loco.kernels.cpu_build import BuildError
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import NUM_STATISTICS, Backend
from tests._buckets import layout_of, spans_of
from tests.kernels._bucket import DTYPES, Bucket, decode

MACHINES: dict[str, tuple[str, ...]] = {"native": ()}
"""Name -> flags: vectors of 16, 8 and 4 elements where the machine has them."""
if "avx2" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split():
    MACHINES |= {"avx2": ("-march=x86-64-v3",), "sse2": ("-march=x86-64",)}

OPTIONS = list(itertools.product((1, 2, 4, 8), (0, 8, 16, 32), (None, 0.25)))


@functools.cache
def backend_for(machine: str) -> CpuBackend:
    return CpuBackend(MACHINES[machine])


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def awkward(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Noise, every 50 elements of another kind; now and then something that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(numel, generator=generator)
    kinds = [1.0, 1e-9, 0.0, -0.0, 1e-40, 1e4, 2.0**-111, 1e-30, 1.0, 1.0]
    for index, start in enumerate(range(0, numel, 50)):
        grad[start : start + 50] *= kinds[(index + seed) % len(kinds)]
    grad[seed % 7 :: 97] = 0.5  # ties
    grad = grad.to(dtype)
    for value in (math.nan, math.inf, -math.inf):
        grad[int(torch.randint(numel, (), generator=generator))] = value
    return grad


def states(bucket: Bucket) -> list[Tensor]:
    return [bucket.send, *bucket.error.tensors().values()]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def without_nan(tensor: Tensor) -> Tensor:
    """Which NaN the sum of several is, is left to the machine."""
    return tensor.masked_fill(tensor.isnan(), 7.0)


def check_steps(
    backend: Backend, layout: BucketLayout, dtype: torch.dtype, error_bits: int, fixed: float | None
) -> None:
    """Four steps, one of them a reset, on both backends; then the sum over ranks that each sent another step."""
    ours, theirs = (Bucket.fresh(layout, error_bits, fixed) for _ in range(2))
    sent: list[tuple[Bucket, Bucket]] = []
    for step in range(4):
        grad = awkward(layout.numel, dtype, seed=step)
        ours.send.fill_(0xAA)
        ours.encode(backend, grad, reset=step == 2)
        theirs.encode(ReferenceBackend(), grad, reset=step == 2)
        for mine, expected in zip(states(ours), states(theirs), strict=True):
            assert torch.equal(as_bytes(mine), as_bytes(expected)), step
        # Within a block squares may be added in fp32: 4096 / 4 lanes at worst, each addition rounds by 2^-24.
        torch.testing.assert_close(ours.statistics, theirs.statistics, rtol=1100 * 2**-24, atol=0.0)
        kept = Bucket.fresh(layout)
        kept.send.copy_(ours.send)
        sent.append((kept, kept))
    for rank, divisor in itertools.product(range(layout.world_size), (1, 3, 4)):
        senders = [sent[(rank + k) % 4][0] for k in range(layout.world_size)]
        mine = decode(backend, senders, rank, dtype, divisor)
        expected = decode(ReferenceBackend(), senders, rank, dtype, divisor)
        assert torch.equal(mine.isnan(), expected.isnan())
        assert torch.equal(as_bytes(without_nan(mine)), as_bytes(without_nan(expected)))


@pytest.mark.kind(36, 38)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("bits", "error_bits", "fixed"), OPTIONS)
def test_equals_the_reference(
    machine: str, bits: int, error_bits: int, fixed: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(f"{bits} {error_bits} {fixed}")  # every option meets other sizes and types, always the same
    for world_size, block_size in ((1, 32), (3, 96), (4, 256)):
        numel = world_size * chosen.choice((517, 1021, 1500))
        dtype = chosen.choice(DTYPES)
        torch.set_num_threads(chosen.choice((1, 2, 3)))
        monkeypatch.setattr(cpu_backend, "STREAM_BYTES", chosen.choice((0, 2**22)))
        layout = layout_of(numel, world_size, spans_of(numel), LoCoConfig(bits=bits, block_size=block_size), dtype)
        check_steps(backend_for(machine), layout, dtype, error_bits, fixed)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("block_size", [32, 64, 160, 1024, 2048, 2080, 4064, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes(machine: str, block_size: int, dtype: torch.dtype) -> None:
    numel = 2 * 5000
    spans = [ParamSpan(0, 4999, False), ParamSpan(5003, 5004, True), ParamSpan(5004, 9990, False)]
    for bits in (4, 1):
        layout = layout_of(numel, 2, spans, LoCoConfig(bits=bits, block_size=block_size), dtype)
        check_steps(backend_for(machine), layout, dtype, 8, None)


@pytest.mark.parametrize("bits", [2, 8])
def test_number_of_threads_changes_nothing(bits: int) -> None:
    backend, numel = CpuBackend(), 3 * 4000
    layout = layout_of(numel, 3, spans_of(numel), LoCoConfig(bits=bits, block_size=32), torch.bfloat16)
    results = []
    for threads in (1, 2, 5, 300):  # more than there are blocks per run, and than the kernels use
        torch.set_num_threads(threads)
        bucket = Bucket.fresh(layout)
        for step in range(2):
            bucket.encode(backend, awkward(numel, torch.bfloat16, seed=step))
        results.append([*states(bucket), decode(backend, [bucket] * 3, 1, torch.bfloat16)])
    for other in results[1:]:
        for mine, expected in zip(other, results[0], strict=True):
            assert torch.equal(as_bytes(mine), as_bytes(expected))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_and_its_rounding(machine: str, dtype: torch.dtype) -> None:
    # Exact values of two ranks: each 16-bit number alone (plus a zero), then sums of random pairs, which have to be
    # rounded: subnormal, halfway and overflowing ones among them.
    backend, numel = backend_for(machine), 2**16
    layout = layout_of(numel, 1, [ParamSpan(0, numel, True)], LoCoConfig(bits=4), dtype)
    bucket = Bucket.fresh(layout)
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for seed in range(4):
        other = everything[torch.randperm(numel, generator=torch.Generator().manual_seed(seed))]
        if seed == 0:
            other = torch.zeros(numel, dtype=dtype)
        bucket.encode(backend, everything)
        assert torch.equal(bucket.send.view(torch.int16), everything.view(torch.int16))
        two = layout_of(2 * numel, 2, [ParamSpan(0, 2 * numel, True)], LoCoConfig(bits=4), dtype)
        recv = torch.cat([everything, other]).view(torch.uint8)
        output = torch.empty(numel, dtype=dtype)
        backend.decode_sum(recv, two, 0, output, divisor=1)
        expected = (everything.float() + other.float()).to(dtype)
        assert torch.equal(output.isnan(), expected.isnan())
        assert torch.equal(without_nan(output).view(torch.int16), without_nan(expected).view(torch.int16))


def test_more_than_two_to_the_31_elements() -> None:
    # 2^31 + 65,536 bf16 elements, of which only the last chunk is touched: the rest of the 4 GiB stays untouched memory
    # that the system never provides. An index in 32 bits would be negative and end the process.
    numel, chunk_numel = 2**31 + 2**16, 2**15
    layout = layout_of(numel, 1, [ParamSpan(0, numel - 5, False)], LoCoConfig(bits=4, block_size=256), torch.bfloat16)
    chunk = split_layout(layout, numel // chunk_numel)[-1]
    start = chunk.shards[0].start
    assert start > 2**31
    grad = torch.empty(numel, dtype=torch.bfloat16)
    grad[start:] = awkward(numel - start, torch.bfloat16, seed=3)
    error = ErrorState(torch.empty(layout.error_rows, 256, dtype=torch.int8), torch.empty(layout.error_rows), bits=8)
    rows = slice(chunk.shards[0].first_block, None)
    results = []
    for backend in (CpuBackend(), ReferenceBackend()):
        error.codes[rows] = 3
        error.scales[rows] = 0.01
        send = torch.full((chunk.send_bytes,), 0xAA, dtype=torch.uint8)
        statistics = torch.zeros(NUM_STATISTICS, dtype=torch.float64)
        backend.encode(grad, error, chunk, send, step=1, beta=0.8, reset=False, statistics=statistics)
        output = torch.empty(numel, dtype=torch.bfloat16)
        backend.decode_sum(send, chunk, 0, output, divisor=1)
        results.append((send, error.codes[rows].clone(), error.scales[rows].clone(), without_nan(output[start:])))
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(as_bytes(mine), as_bytes(expected))


def test_flags_that_no_compiler_knows_are_reported() -> None:
    with pytest.raises(BuildError, match="no-such-machine"):
        CpuBackend(("-march=no-such-machine",))
