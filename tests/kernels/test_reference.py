"""The plain-torch backend against a literal model, and what it may read and write.

``tests/_buckets.py`` has the model: block by block, without offsets, packing, views or pieces. Here with 4 and 8 bits,
a scale per block and an error of 8 bits; ``test_options.py`` has the other settings.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_loco.config import LoCoConfig
from megatron_loco.core.chunks import split_layout
from megatron_loco.core.error_feedback import ErrorState
from megatron_loco.core.quantize import quantize_blocks
from megatron_loco.core.wire import BucketLayout, ParamSpan
from megatron_loco.kernels import reference
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.registry import select_backend
from megatron_loco.kernels.schema import NUM_STATISTICS, Backend, Statistics, check_decode, check_encode
from tests._buckets import CPU, Oracle, layout_of, spans_of
from tests.kernels._bucket import BACKENDS, BETA, DTYPES, Arena, Bucket, decode, gradients, stored_error

CASES = [
    # (elements, ranks, block size, bits): odd shards, shards smaller than a block, one rank, Megatron's padding.
    (1021 * 3, 3, 32, 4),
    (127 * 2, 2, 128, 4),
    (2 * 4, 4, 256, 4),
    (384, 1, 32, 8),
    (4224, 2, 256, 4),
    (4224, 3, 96, 8),
]


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "world_size", "block_size", "bits"), CASES)
def test_equals_the_literal_model(
    backend_class: Callable[[], Backend], dtype: torch.dtype, numel: int, world_size: int, block_size: int, bits: int
) -> None:
    backend = backend_class()
    spans = spans_of(numel)
    layout = layout_of(numel, world_size, spans, LoCoConfig(bits=bits, block_size=block_size), dtype)
    buckets = [Bucket.fresh(layout) for _ in range(world_size)]
    oracles = [Oracle(layout, BETA) for _ in range(world_size)]
    for step in range(4):
        reset = step == 2
        grads = [gradients(numel, dtype, seed=10 * step + rank) for rank in range(world_size)]
        for bucket, grad in zip(buckets, grads, strict=True):
            bucket.encode(backend, grad, reset=reset)
        sent = [oracle.send(grad, reset=reset) for oracle, grad in zip(oracles, grads, strict=True)]
        for bucket, oracle in zip(buckets, oracles, strict=True):
            assert torch.equal(stored_error(layout, bucket.error), oracle.error)
        total = torch.zeros(numel)
        for values in sent:  # in rank order
            total = total + values
        for rank, shard in enumerate(layout.shards):
            assert torch.equal(decode(backend, buckets, rank, dtype), total[shard.start : shard.stop].to(dtype))
            mean = (total[shard.start : shard.stop] / torch.tensor(float(world_size))).to(dtype)
            assert torch.equal(decode(backend, buckets, rank, dtype, divisor=world_size), mean)


@pytest.mark.kind(31)
@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("numel", [1, 31, 33, 3 * 32 + 7, 1021])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_is_read_or_written(
    backend_class: Callable[[], Backend], dtype: torch.dtype, numel: int
) -> None:
    # The last block is partial, and rubbish follows it (bug kind 31).
    backend = backend_class()
    total = numel + 11
    spans = [ParamSpan(0, numel - numel // 3, False), ParamSpan(numel - numel // 3, numel, True)]
    layout = layout_of(total, 1, spans, LoCoConfig(bits=4, block_size=32), dtype)
    results = []
    for fill, byte in ((math.nan, 0xFF), (0.0, 0x00)):
        grad = Arena(total, dtype, fill)
        grad.inside[:numel] = gradients(numel, dtype, seed=1)  # the bucket's padding keeps the fill
        grad_before = grad.memory.view(torch.uint8).clone()
        send = Arena(layout.send_bytes, torch.uint8, byte)
        codes = Arena(layout.num_blocks * 32, torch.int8, -1 if byte else 0)
        scales = Arena(layout.num_blocks, torch.float32, fill)
        statistics = Arena(NUM_STATISTICS, torch.float64, fill)
        output = Arena(total, dtype, fill)
        codes.inside.zero_()
        scales.inside.zero_()
        statistics.inside.zero_()
        error = ErrorState(codes.inside.view(-1, 32), scales.inside)
        for step in range(2):
            backend.encode(
                grad.inside,
                error,
                layout,
                send.inside,
                step=step,
                beta=BETA,
                reset=False,
                statistics=statistics.inside,
            )
        recv = Arena(layout.send_bytes, torch.uint8, byte)
        recv.inside.copy_(send.inside)
        backend.decode_sum(recv.inside, layout, 0, output.inside, divisor=1)
        assert all(arena.untouched() for arena in (send, codes, scales, statistics, output, recv))
        assert torch.equal(grad.memory.view(torch.uint8), grad_before)
        assert torch.equal(recv.inside, send.inside)
        assert torch.isfinite(output.inside).all()
        assert not output.inside[numel:].any()
        results.append((send.inside, codes.inside, scales.inside, statistics.inside, output.inside))
    for with_nan, with_zeros in zip(*results, strict=True):
        assert torch.equal(with_nan, with_zeros)


@pytest.mark.kind(31)
@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_the_payload_is_written(backend_class: Callable[[], Backend], dtype: torch.dtype) -> None:
    backend = backend_class()
    numel, world_size = 1021 * 3, 3
    layout = layout_of(numel, world_size, spans_of(numel), LoCoConfig(bits=4, block_size=32), dtype)
    grad = gradients(numel, dtype, seed=3)
    sends = []
    for poison in (0xAA, 0x55):
        bucket = Bucket.fresh(layout)
        bucket.send.fill_(poison)
        sends.append(bucket.encode(backend, grad))
    assert torch.equal(*sends)


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", [2, 3, 40])
def test_chunks_in_any_order_equal_the_whole_bucket(
    backend_class: Callable[[], Backend], dtype: torch.dtype, num_chunks: int
) -> None:
    backend = backend_class()
    numel, world_size = 1021 * 4, 4
    layout = layout_of(numel, world_size, spans_of(numel), LoCoConfig(bits=4, block_size=32), dtype)
    chunks = split_layout(layout, num_chunks)
    sends = [torch.full((chunk.send_bytes,), 0xAA, dtype=torch.uint8) for chunk in chunks]
    whole, parts = Bucket.fresh(layout), Bucket.fresh(layout)
    for step in range(3):
        grad = gradients(numel, dtype, seed=step)
        whole.encode(backend, grad)
        for index in torch.randperm(num_chunks, generator=torch.Generator().manual_seed(step)).tolist():
            parts.encode_chunk(backend, grad, chunks[index], sends[index])
        parts.step += 1
    assert torch.equal(parts.error.codes, whole.error.codes)
    assert torch.equal(parts.error.scales, whole.error.scales)
    # Sums of the same positive terms in another order: fp64 (or fp32 inside a block, which is not cut) of few terms.
    torch.testing.assert_close(parts.statistics, whole.statistics, rtol=1000 * 2**-53, atol=0.0)
    for rank in range(world_size):
        expected = decode(backend, [whole] * world_size, rank, dtype)
        output = torch.full((layout.shard_numel,), math.nan, dtype=dtype)
        for chunk, send in zip(chunks, sends, strict=True):
            payload = send[chunk.send_offsets[rank] :][: chunk.send_splits[rank]]
            recv = payload.repeat(world_size)
            check_decode(recv, chunk, rank, output)
            backend.decode_sum(recv, chunk, rank, output, divisor=1)
        assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("piece_elements", [1, 32, 100, 64 * 7])
def test_size_of_the_pieces_changes_nothing(piece_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numel, world_size = 5 * 1024 + 2, 2
    layout = layout_of(numel, world_size, [ParamSpan(0, numel - 5, False)], LoCoConfig(bits=4, block_size=32))
    grad = gradients(numel, torch.float32, seed=5)
    backend = ReferenceBackend()
    whole = Bucket.fresh(layout)
    whole.encode(backend, grad)
    expected = [decode(backend, [whole, whole], rank, torch.float32) for rank in range(2)]
    monkeypatch.setattr(reference, "PIECE_ELEMENTS", piece_elements)
    pieces = Bucket.fresh(layout)
    pieces.encode(backend, grad)
    assert torch.equal(pieces.send, whole.send)
    assert torch.equal(pieces.error.codes, whole.error.codes)
    assert torch.equal(pieces.error.scales, whole.error.scales)
    for rank in range(2):
        assert torch.equal(decode(backend, [pieces, pieces], rank, torch.float32), expected[rank])


@pytest.mark.parametrize("backend_class", BACKENDS)
def test_more_elements_than_a_piece(backend_class: Callable[[], Backend]) -> None:
    # A run longer than a piece, which ends in a partial block; blocks of 96 do not divide a piece.
    backend = backend_class()
    numel = 2 * reference.PIECE_ELEMENTS + 96 * 5 + 17
    layout = layout_of(numel, 1, [ParamSpan(0, numel - 3, False)], LoCoConfig(bits=4, block_size=96))
    grad = gradients(numel, torch.float32, seed=6)
    bucket = Bucket.fresh(layout)
    bucket.encode(backend, grad)
    padded = torch.zeros(layout.num_blocks * 96)
    padded[: numel - 3] = grad[: numel - 3]
    codes, scales = quantize_blocks(padded.view(-1, 96), 4)
    decoded = (codes.float() * scales[:, None]).view(-1)[:numel]
    decoded[numel - 3 :] = 0
    assert torch.equal(decode(backend, [bucket], 0, torch.float32), decoded)


@pytest.mark.kind(1, 3)
@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_block_alone_is_lost_and_keeps_its_error(
    backend_class: Callable[[], Backend], dtype: torch.dtype, value: float
) -> None:
    backend = backend_class()
    numel = 400
    layout = layout_of(numel, 2, [ParamSpan(0, 390, False)], LoCoConfig(bits=4, block_size=64), dtype)
    # 200 elements per shard: blocks 0..3 with the last partial (8), then 4..6 with the last partial (190 - 128 = 62).
    for position, (start, stop), block in ((0, (0, 64), 0), (199, (192, 200), 3), (389, (328, 390), 6)):
        bucket, twin = Bucket.fresh(layout), Bucket.fresh(layout)
        for each in (bucket, twin):
            each.encode(backend, gradients(numel, dtype, seed=7))
            each.statistics.zero_()
        kept = ErrorState(bucket.error.codes.clone(), bucket.error.scales.clone())
        grad = gradients(numel, dtype, seed=8)
        twin.encode(backend, grad)
        grad[position] = value
        bucket.encode(backend, grad)
        result = torch.cat([decode(backend, [bucket, twin], rank, dtype) for rank in range(2)])
        expected = torch.cat([decode(backend, [twin, twin], rank, dtype) for rank in range(2)])
        assert result[start:stop].isnan().all()
        result[start:stop] = expected[start:stop]
        assert torch.equal(result, expected)
        assert torch.equal(bucket.error.codes[block], kept.codes[block])
        assert torch.equal(bucket.error.scales[block], kept.scales[block])
        others = [row for row in range(layout.num_blocks) if row != block]
        assert torch.equal(bucket.error.codes[others], twin.error.codes[others])
        assert torch.equal(bucket.error.scales[others], twin.error.scales[others])
        assert bucket.statistics[Statistics.NONFINITE_BLOCKS] == 1
        assert torch.isfinite(bucket.statistics).all()
        # On a reset step the block's error is set to zero like all others.
        bucket.encode(backend, grad, reset=True)
        assert not bucket.error.codes.any()
        assert not bucket.error.scales.any()


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-21, 1e-30, 1e21])
def test_statistics_are_the_sums_they_say(backend_class: Callable[[], Backend], scale: float) -> None:
    backend = backend_class()
    numel = 1021
    spans = spans_of(numel)
    layout = layout_of(numel, 1, spans, LoCoConfig(bits=4, block_size=32))
    bucket, oracle = Bucket.fresh(layout), Oracle(layout, BETA)
    quantised = torch.zeros(numel, dtype=torch.bool)
    for span in spans:
        quantised[span.start : span.stop] = not span.exact
    totals = torch.zeros(NUM_STATISTICS, dtype=torch.float64)
    for step in range(3):
        grad = gradients(numel, torch.float32, seed=step, scale=scale)
        old = oracle.error.clone()
        sent = oracle.send(grad)
        residual = (grad + old) - sent
        new = old * torch.tensor(BETA) + residual * torch.tensor(1 - BETA)
        for index, values in ((0, grad), (1, residual), (2, new)):
            totals[index] += values[quantised].double().square().sum()
        bucket.encode(backend, grad)
    # Added to, step after step. Squares and the sum of a block may be computed in fp32 where that has the range: 32
    # additions of positive terms and a rounding of each square, 2^-24 each. e' may be rounded by its 8-bit storage or
    # not, which moves an element by half of 1/127 of its block's largest: 1 % of a block's norm, 2 % of the squares.
    torch.testing.assert_close(bucket.statistics[:2], totals[:2], rtol=33 * 2**-24, atol=0.0)
    torch.testing.assert_close(bucket.statistics[2], totals[2], rtol=0.02, atol=0.0)
    assert bucket.statistics[Statistics.NONFINITE_BLOCKS] == 0


@pytest.mark.kind(38)
@pytest.mark.parametrize("backend_class", BACKENDS)
def test_all_zero_gradients_send_zeros(backend_class: Callable[[], Backend]) -> None:
    backend = backend_class()
    layout = layout_of(512, 2, [ParamSpan(0, 500, False)], LoCoConfig(bits=4, block_size=64))
    bucket = Bucket.fresh(layout)
    bucket.send.fill_(0xAA)
    for zeros in (torch.zeros(512), -torch.zeros(512)):
        bucket.encode(backend, zeros)
        assert not bucket.send.any()
        assert not bucket.error.codes.any()
        for rank in range(2):
            assert not decode(backend, [bucket, bucket], rank, torch.float32).view(torch.int32).any()


@pytest.mark.parametrize("backend_class", BACKENDS)
def test_fp16_sum_beyond_its_range_is_inf(backend_class: Callable[[], Backend]) -> None:
    # So that the overflow is seen and the step skipped, as with the stock reduction; the mean fits and is kept.
    backend = backend_class()
    layout = layout_of(64, 2, [ParamSpan(0, 32, False), ParamSpan(32, 64, True)], LoCoConfig(bits=8), torch.float16)
    bucket = Bucket.fresh(layout)
    bucket.encode(backend, torch.full((64,), 40000.0, dtype=torch.float16))
    for rank in range(2):
        assert decode(backend, [bucket, bucket], rank, torch.float16).isinf().all()
        assert torch.equal(
            decode(backend, [bucket, bucket], rank, torch.float16, divisor=2),
            torch.full((32,), 40000.0, dtype=torch.float16),
        )


@pytest.mark.parametrize("backend_class", BACKENDS)
def test_sum_is_in_rank_order_in_fp32(backend_class: Callable[[], Backend]) -> None:
    backend = backend_class()
    layout = layout_of(3, 3, [ParamSpan(0, 3, True)], LoCoConfig(bits=4))
    for values in itertools.permutations((2.0**25, 1.0, -(2.0**25))):
        buckets = [Bucket.fresh(layout) for _ in range(3)]
        for bucket, value in zip(buckets, values, strict=True):
            bucket.encode(backend, torch.full((3,), value))
        a, b, c = (torch.tensor(value) for value in values)
        assert decode(backend, buckets, 0, torch.float32).item() == ((a + b) + c).item()


@pytest.mark.parametrize("backend_class", BACKENDS)
def test_random_layouts(backend_class: Callable[[], Backend]) -> None:
    backend = backend_class()
    source = random.Random(0)
    for seed in range(40):
        world_size = source.choice((1, 2, 3, 5))
        numel = source.randint(1, 300) * world_size
        spans, start = [], source.choice((0, source.randrange(numel)))
        while start < numel:
            stop = min(numel, start + source.choice((1, 32, 64, source.randint(1, 200))))
            spans.append(ParamSpan(start, stop, source.random() < 0.3))
            start = stop + source.choice((0, 0, source.randint(1, 40)))
        dtype = source.choice(DTYPES)
        layout = layout_of(numel, world_size, spans, LoCoConfig(bits=source.choice((4, 8)), block_size=32), dtype)
        bucket, oracle = Bucket.fresh(layout), Oracle(layout, BETA)
        for step in range(2):
            grad = gradients(numel, dtype, seed=seed + 100 * step)
            for shard in layout.shards:
                for a, b in shard.padding:
                    grad[a:b] = math.nan
            bucket.encode(backend, grad)
            sent = oracle.send(grad)
            total = sum((sent for _ in range(world_size)), torch.zeros(numel)).to(dtype)
            for rank, shard in enumerate(layout.shards):
                output = decode(backend, [bucket] * world_size, rank, dtype)
                assert torch.equal(output, total[shard.start : shard.stop])


def good_tensors() -> tuple[BucketLayout, Tensor, ErrorState, Tensor, Tensor, Tensor]:
    layout = layout_of(512, 2, [ParamSpan(0, 512, False)], LoCoConfig(bits=4, block_size=64))
    bucket = Bucket.fresh(layout)
    recv = torch.zeros(layout.recv_bytes(0), dtype=torch.uint8)
    return layout, torch.zeros(512), bucket.error, bucket.send, recv, torch.zeros(256)


def strided(tensor: Tensor) -> Tensor:
    """The same shape, every other element of a larger tensor."""
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype)[..., ::2]


BREAKAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": strided,
    "expanded": lambda tensor: tensor.flatten()[:1].expand(tensor.shape),
    "too long": lambda tensor: torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:], dtype=tensor.dtype),
    "too short": lambda tensor: tensor[1:],
    "other rank": lambda tensor: tensor[None],
    "fp64": lambda tensor: tensor.double(),
    "int32": lambda tensor: tensor.int(),
    "other device": lambda tensor: tensor.to("meta"),
}


@pytest.mark.kind(39)
@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("name", ["grad", "send", "error.codes", "error.scales"])
def test_encode_check_names_the_tensor(name: str, breakage: str) -> None:
    layout, grad, error, send, _, _ = good_tensors()
    check_encode(grad, error, layout, send)
    tensors = {"grad": grad, "send": send, "error.codes": error.codes, "error.scales": error.scales}
    tensors[name] = BREAKAGES[breakage](tensors[name])
    error = ErrorState(tensors["error.codes"], tensors["error.scales"])
    with pytest.raises(ValueError, match=name.split(".")[0]):
        check_encode(tensors["grad"], error, layout, tensors["send"])


@pytest.mark.kind(39)
@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("name", ["recv", "output"])
def test_decode_check_names_the_tensor(name: str, breakage: str) -> None:
    layout, _, _, _, recv, output = good_tensors()
    check_decode(recv, layout, 0, output)
    tensors = {"recv": recv, "output": output}
    tensors[name] = BREAKAGES[breakage](tensors[name])
    with pytest.raises(ValueError, match=name):
        check_decode(tensors["recv"], layout, 0, tensors["output"])


def test_dtype_of_another_width_than_the_layout_is_refused() -> None:
    layout, grad, error, send, recv, output = good_tensors()
    with pytest.raises(ValueError, match="grad has 2-byte elements"):
        check_encode(grad.bfloat16(), error, layout, send)
    with pytest.raises(ValueError, match="output has 2-byte elements"):
        check_decode(recv, layout, 0, output.half())


def test_selection_of_a_backend() -> None:
    assert isinstance(select_backend("reference", CPU), ReferenceBackend)
    assert select_backend("auto", CPU).name in ("reference", "cpu")
    with pytest.raises(ValueError, match=r"--loco-backend.*reference.*'none'"):
        select_backend("none", CPU)
    with pytest.raises(ValueError, match="--loco-backend auto: no backend for device meta"):
        select_backend("auto", torch.device("meta"))
