"""The Triton kernels on a GPU: every byte as in the plain-torch backend on the CPU; no synchronisation; CUDA graphs.

All are skipped without a GPU. In the interpreter, ``test_triton.py`` covers the same and more of small buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from megatron_loco.config import LoCoConfig
from megatron_loco.core.error_feedback import ErrorState
from megatron_loco.core.wire import BucketLayout, ParamSpan
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import NUM_STATISTICS
from megatron_loco.kernels.triton_backend import TritonBackend
from tests._buckets import layout_of, spans_of
from tests.kernels._bucket import BETA, DTYPES, Bucket, decode, gradients
from tests.kernels.test_options import OPTIONS, awkward, poison_padding

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

REFERENCE = ReferenceBackend()
GPU = torch.device("cuda")
LARGE_BUCKET_BYTES = 16 * 2**30


class DeviceBucket:
    """One rank's side of a bucket on the GPU; :class:`tests.kernels._bucket.Bucket` has the CPU's."""

    def __init__(self, layout: BucketLayout, error_bits: int = 8, fixed_scale: float | None = None) -> None:
        self.layout = layout
        self.error = ErrorState.zeros(layout.error_rows, layout.block_size, GPU, error_bits)
        self.send = torch.full((layout.send_bytes,), 0xAA, dtype=torch.uint8, device=GPU)
        self.statistics = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=GPU)
        self.fixed_scale = None if fixed_scale is None else torch.tensor(fixed_scale, device=GPU)
        self.step = 0

    def encode(self, backend: TritonBackend, grad: Tensor, *, reset: bool = False) -> None:
        backend.encode(
            grad,
            self.error,
            self.layout,
            self.send,
            step=self.step,
            beta=BETA,
            reset=reset,
            statistics=self.statistics,
            fixed_scale=self.fixed_scale,
        )
        self.step += 1

    def payload(self, rank: int) -> Tensor:
        start = self.layout.send_offsets[rank]
        return self.send[start : start + self.layout.send_splits[rank]]

    def decode(self, backend: TritonBackend, rank: int, dtype: torch.dtype, divisor: int) -> Tensor:
        recv = self.payload(rank).repeat(self.layout.world_size)
        output = torch.full((self.layout.shard_numel,), math.nan, dtype=dtype, device=GPU)
        backend.decode_sum(recv, self.layout, rank, output, divisor=divisor)
        return output


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, but any NaN equals any other."""
    a, b = a.cpu(), b.cpu()
    if a.dtype.is_floating_point:
        a, b = (torch.where(x.isnan(), torch.full_like(x, math.nan), x) for x in (a, b))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def backend() -> TritonBackend:
    return TritonBackend(GPU)


@pytest.mark.parametrize(
    ("block_size", "bits", "error_bits", "fixed_scale"),
    [
        *((block_size, *option) for block_size in (96, 256, 4096) for option in OPTIONS),
        *((block_size, 4, 8, None) for block_size in (32, 64, 128, 512, 1024, 2016, 2048)),
    ],
)
def test_every_option_equals_the_reference(
    backend: TritonBackend, block_size: int, bits: int, error_bits: int, fixed_scale: float | None
) -> None:
    number = OPTIONS.index((bits, error_bits, fixed_scale)) + block_size // 32
    dtype = DTYPES[number % 3]
    numel = 3 * 40960  # of a shard and, below, of an odd one: runs at any element
    for numel_, spans in (
        (numel, [ParamSpan(0, numel - 4096, False), ParamSpan(numel - 4096, numel - 64, True)]),
        (3 * 10007, spans_of(3 * 10007)),
    ):
        layout = layout_of(numel_, 3, spans, LoCoConfig(bits=bits, block_size=block_size), dtype)
        expected, bucket = Bucket.fresh(layout, error_bits, fixed_scale), DeviceBucket(layout, error_bits, fixed_scale)
        for step, make in enumerate((gradients, awkward, awkward)):
            grad = poison_padding(layout, make(numel_, dtype, number + step))
            if step == 1:
                grad[numel_ // 3] = math.nan
            expected.encode(REFERENCE, grad, reset=step == 2)
            bucket.encode(backend, grad.to(GPU), reset=step == 2)
            assert same_bits(bucket.send, expected.send)
            for name, tensor in bucket.error.tensors().items():
                assert same_bits(tensor, expected.error.tensors()[name]), name
            # As in test_triton.py.
            torch.testing.assert_close(bucket.statistics.cpu(), expected.statistics, rtol=48 * 2**-24, atol=0.0)
        for rank, divisor in ((0, 1), (1, 2), (2, 3)):
            output = bucket.decode(backend, rank, dtype, divisor)
            assert same_bits(output, decode(REFERENCE, [expected] * 3, rank, dtype, divisor))


def test_unaligned_tensors_equal_the_reference(backend: TritonBackend) -> None:
    # Slices of buffers: gradients at an odd element, the send buffer at 4 bytes.
    numel, dtype = 4099, torch.bfloat16
    layout = layout_of(numel, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=4, block_size=256), dtype)
    expected, bucket = Bucket.fresh(layout), DeviceBucket(layout)
    grad = gradients(numel, dtype, seed=1)
    expected.encode(REFERENCE, grad)
    memory = torch.zeros(numel + 3, dtype=dtype, device=GPU)
    memory[3:] = grad.to(GPU)
    bucket.send = torch.zeros(layout.send_bytes + 4, dtype=torch.uint8, device=GPU)[4:]
    bucket.encode(backend, memory[3:])
    assert same_bits(bucket.send, expected.send)
    assert same_bits(bucket.error.codes, expected.error.codes)


def warm_bucket(backend: TritonBackend) -> tuple[DeviceBucket, Tensor, Tensor, Tensor]:
    """A bucket that was encoded and decoded once, its gradients, and buffers for another decode."""
    numel = 4 * 65536
    layout = layout_of(numel, 4, spans_of(numel), LoCoConfig(bits=4, block_size=256), torch.bfloat16)
    bucket = DeviceBucket(layout, fixed_scale=None)
    grad = poison_padding(layout, gradients(numel, torch.bfloat16, seed=2)).to(GPU)
    bucket.encode(backend, grad)
    recv = bucket.payload(1).repeat(4)
    output = torch.full((layout.shard_numel,), math.nan, dtype=torch.bfloat16, device=GPU)
    backend.decode_sum(recv, layout, 1, output, divisor=4)
    return bucket, grad, recv, output


def test_a_step_neither_synchronises_nor_allocates(backend: TritonBackend) -> None:
    bucket, grad, recv, output = warm_bucket(backend)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        for reset in (False, True):
            bucket.encode(backend, grad, reset=reset)
            backend.decode_sum(recv, bucket.layout, 1, output, divisor=4)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


def test_fixed_scale_is_read_on_the_device(backend: TritonBackend) -> None:
    layout = layout_of(4096, 1, [ParamSpan(0, 4096, False)], LoCoConfig(bits=4, block_size=256))
    bucket, grad = DeviceBucket(layout, fixed_scale=0.25), gradients(4096, torch.float32, seed=1).to(GPU)
    bucket.encode(backend, grad)
    with no_synchronisation():
        bucket.encode(backend, grad)


def test_captured_graph_repeats_the_step(backend: TritonBackend) -> None:
    bucket, grad, recv, output = warm_bucket(backend)
    other, _, _, _ = warm_bucket(backend)
    # Capture runs nothing: afterwards the state is that of the step before.
    step, graph = bucket.step, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bucket.encode(backend, grad)
        recv.copy_(bucket.payload(1).repeat(4))
        backend.decode_sum(recv, bucket.layout, 1, output, divisor=4)
    for seed in (3, 4):
        grad.copy_(poison_padding(bucket.layout, gradients(bucket.layout.numel, torch.bfloat16, seed=seed)))
        graph.replay()
        other.step = step  # a graph repeats the number of the step too
        other.encode(backend, grad)
        assert same_bits(bucket.send, other.send)
        assert same_bits(bucket.error.codes, other.error.codes)
        assert same_bits(bucket.statistics, other.statistics)
        assert same_bits(output, other.decode(backend, 1, torch.bfloat16, 4))


def test_current_stream_is_used(backend: TritonBackend) -> None:
    bucket, grad, _, _ = warm_bucket(backend)
    other, _, _, _ = warm_bucket(backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles, tens of milliseconds: an encode elsewhere would overtake the copy
        grad.mul_(2)
        bucket.encode(backend, grad)
    torch.cuda.current_stream().wait_stream(stream)
    other.encode(backend, grad)
    assert same_bits(bucket.send, other.send)


def test_elements_beyond_32_bits(backend: TritonBackend) -> None:
    # The last blocks of a bucket of more than 2^31 elements; all other gradients are 0.
    if torch.cuda.mem_get_info()[0] < LARGE_BUCKET_BYTES:
        pytest.skip("needs 16 GiB of GPU memory")
    numel, tail = 2**31 + 2**20, 5000
    layout = layout_of(numel, 1, [ParamSpan(0, numel, False)], LoCoConfig(bits=4, block_size=256), torch.bfloat16)
    bucket = DeviceBucket(layout)
    grad = torch.zeros(numel, dtype=torch.bfloat16, device=GPU)
    values = gradients(tail, torch.bfloat16, seed=6)
    grad[-tail:] = values.to(GPU)
    bucket.encode(backend, grad)
    output = bucket.decode(backend, 0, torch.bfloat16, 1)
    aligned = 5120  # elements of whole blocks that hold the tail
    small = layout_of(aligned, 1, [ParamSpan(0, aligned, False)], LoCoConfig(bits=4, block_size=256), torch.bfloat16)
    expected = Bucket.fresh(small)
    expected.encode(REFERENCE, torch.cat([torch.zeros(aligned - tail, dtype=torch.bfloat16), values]))
    assert same_bits(output[-aligned:], decode(REFERENCE, [expected], 0, torch.bfloat16))
    assert not output[:-aligned].any()
    # Scales alone: the dither of the codes depends on the place in the bucket.
    assert same_bits(bucket.error.scales[-aligned // 256 :], expected.error.scales)
