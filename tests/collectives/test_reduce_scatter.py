"""The reduce-scatter on real Gloo ranks, against the one-process model of ``tests/_buckets.py``.

Every rank knows the gradients of all ranks (they follow from seeds), so that it can compute the whole result itself.
Functions whose names begin with an underscore run on the ranks; what they assert fails the test that started them.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.work import Work
from megatron_loco.config import LoCoConfig
from megatron_loco.core.error_feedback import load_error
from megatron_loco.core.wire import BucketLayout, ParamSpan
from tests._buckets import CPU, Oracle, layout_of, spans_of
from tests._ranks import RankPool

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=0, reset_interval=0)
IDENTITY = LoCoConfig(bits=32, warmup_steps=0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def new_state(
    numel: int,
    world_size: int,
    config: LoCoConfig = LOCO,
    dtype: torch.dtype = torch.float32,
    *,
    spans: Sequence[ParamSpan] | None = None,
    scratch: ScratchPool | None = None,
) -> BucketState:
    spans = spans_of(numel) if spans is None else spans
    if config.is_identity:
        spans = [ParamSpan(span.start, span.stop, exact=True) for span in spans]
    layout = layout_of(numel, world_size, spans, config, dtype)
    return BucketState("bucket 7", layout, config, CPU, scratch or ScratchPool(CPU))


def gradient(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(numel, generator=generator) * (1 + rank)).to(dtype)


def poison_padding(layout: BucketLayout, grad: Tensor) -> Tensor:
    for shard in layout.shards:
        for start, stop in shard.padding:
            grad[start:stop] = math.nan
    return grad


def empty_output(state: BucketState, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((state.layout.numel // state.layout.world_size,), math.nan, dtype=dtype)


def rank_order_sum(values: Sequence[Tensor]) -> Tensor:
    total = torch.zeros(values[0].shape)
    for value in values:
        total = total + value.float()
    return total


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values of one dtype; NaN equals NaN."""
    return (
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))
    )


class Model:
    """All ranks of a bucket in one process: what each shard must be after each step."""

    def __init__(self, layout: BucketLayout, beta: float, dtype: torch.dtype, first_step: int = 0) -> None:
        self.layout = layout
        self.dtype = dtype
        self.oracles = [Oracle(layout, beta, first_step) for _ in range(layout.world_size)]

    def step(
        self, grads: Sequence[Tensor], op: Any = SUM, *, reset: bool = False, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """The whole result; with ``group`` each rank computes its own part and learns the rest (exact, and quicker)."""
        mine = range(len(grads)) if group is None else [group.rank()]
        sent = {rank: self.oracles[rank].send(grads[rank], reset=reset) for rank in mine}
        values = [sent.get(rank, torch.empty(self.layout.numel)) for rank in range(len(grads))]
        if group is not None:
            dist.all_gather(values, sent[group.rank()], group=group)
        total = rank_order_sum(values)
        if op == AVG:
            total = total / torch.tensor(float(self.layout.world_size))
        return total.to(self.dtype)

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        return whole[self.layout.shards[rank].start : self.layout.shards[rank].stop]

    def check_error(self, state: BucketState, rank: int) -> None:
        values = load_error(state.error)
        for run in (run for shard in self.layout.shards for run in shard.runs):
            rows = values[run.first_block : run.first_block + run.num_blocks].view(-1)
            assert torch.equal(rows[: run.stop - run.start], self.oracles[rank].error[run.start : run.stop])


# ----------------------------------------------------------------------------------------------- values


def _against_model(group: dist.ProcessGroup, numel: int, config: LoCoConfig, dtype: torch.dtype, op: Any) -> None:
    rank, world_size = group.rank(), group.size()
    # A third of the cases ends in padding, some of which fills whole shards.
    spans = [span for span in spans_of(numel) if span.stop <= numel - numel // 3] if numel % 2 else spans_of(numel)
    state = new_state(numel, world_size, config, dtype, spans=spans)
    model = Model(state.layout, config.beta, dtype)
    for step in range(4):
        grads = [poison_padding(state.layout, gradient(r, step, numel, dtype)) for r in range(world_size)]
        whole = model.step(grads, op, group=group)
        given = grads[rank].clone()
        output = empty_output(state, dtype)
        assert reduce_scatter(output, given, state, op=op, group=group) is None
        assert torch.equal(output, model.shard(whole, rank))
        assert same(given, grads[rank])  # not written
        assert state.step == step + 1
        model.check_error(state, rank)


def _all_against_model(group: dist.ProcessGroup, cases: list[tuple[Any, ...]]) -> None:
    # All at once, in few chunks, and in as many as there may be (empty ones among them): the same bits.
    for (numel, block_size, bits, dtype, average), chunk_bytes in zip(
        cases, itertools.cycle((0, 300, 1)), strict=False
    ):
        config = LoCoConfig(bits=bits, block_size=block_size, warmup_steps=0, reset_interval=0, chunk_bytes=chunk_bytes)
        _against_model(group, numel, config, dtype, AVG if average else SUM)


@pytest.mark.kind(17)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_the_model_bitwise(ranks: RankPool, world_size: int) -> None:
    sizes = [n * world_size for n in (1, 2, 127, 1021)] + [-(-n // world_size) * world_size for n in (384, 4224)]
    variants = itertools.cycle(itertools.product((32, 128, 256), (4, 4, 8), DTYPES, (False, True)))
    # 36 variants in steps of 5, which has no factor in common with 36: every size with every dtype and operation.
    cases = [(numel, *next(itertools.islice(variants, 4, None))) for numel in sizes for _ in range(6)]
    ranks.run(_all_against_model, world_size, cases)


def _odd_buckets(group: dist.ProcessGroup) -> None:
    world_size = group.size()
    for numel, spans in (
        (world_size * 128, [ParamSpan(0, 5, False)]),  # the last ranks own padding alone
        (world_size * 128, [ParamSpan(world_size * 128 - 3, world_size * 128, False)]),  # the first ranks do
        (world_size * 64, [ParamSpan(0, 3, True)]),
        (world_size * 64, []),  # nothing but padding
    ):
        state = new_state(numel, world_size, spans=spans)
        model = Model(state.layout, LOCO.beta, torch.float32)
        for step in range(2):
            grads = [poison_padding(state.layout, gradient(r, step, numel)) for r in range(world_size)]
            output = empty_output(state)
            reduce_scatter(output, grads[group.rank()], state, op=SUM, group=group)
            assert torch.equal(output, model.shard(model.step(grads), group.rank()))


@pytest.mark.kind(17, 31)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_own_padding_alone(ranks: RankPool, world_size: int) -> None:
    ranks.run(_odd_buckets, world_size)


def _sum_or_mean(group: dist.ProcessGroup) -> None:
    # Rank r contributes r + 1 everywhere (bug kind 35).
    world_size = group.size()
    numel = 100 * world_size
    wanted = sum(range(1, world_size + 1))
    for dtype, config, (op, value) in itertools.product(
        DTYPES, (LOCO, LoCoConfig(bits=8, warmup_steps=0), IDENTITY), ((SUM, wanted), (AVG, wanted / world_size))
    ):
        state = new_state(numel, world_size, config, dtype, spans=[ParamSpan(0, 90, True), ParamSpan(90, numel, False)])
        output = empty_output(state, dtype)
        given = torch.full((numel,), float(group.rank() + 1), dtype=dtype)
        reduce_scatter(output, given, state, op=op, group=group)
        start = group.rank() * 100
        exact = torch.tensor([i < 90 or config.is_identity for i in range(start, start + 100)])
        assert (output[exact] == value).all()
        # An element that is its block's largest comes back within the three roundings of fp32 of scale and product; the
        # sum and the mean add one each per rank. All of it vanishes in the rounding to 16 bits.
        tolerance = 0.0 if dtype != torch.float32 else (3 + world_size + 1) * 2**-24 * value
        assert ((output - value).abs() <= tolerance).all()


@pytest.mark.kind(35)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sum_is_a_sum_and_mean_is_a_mean(ranks: RankPool, world_size: int) -> None:
    ranks.run(_sum_or_mean, world_size)


def _identity(group: dist.ProcessGroup) -> None:
    world_size = group.size()
    for dtype, op, numel in itertools.product(DTYPES, (SUM, AVG), (127 * world_size, 384 * world_size)):
        state = new_state(numel, world_size, IDENTITY, dtype, spans=[ParamSpan(0, numel, True)])
        assert state.error.num_bytes == 0
        for step, integers in ((0, False), (1, True)):
            grads = [gradient(r, step, numel, dtype) for r in range(world_size)]
            if integers:
                grads = [(grad * 8).round() for grad in grads]
            output, stock = empty_output(state, dtype), empty_output(state, dtype)
            reduce_scatter(output, grads[group.rank()].clone(), state, op=op, group=group)
            total = rank_order_sum(grads)
            if op == AVG:
                total = total / torch.tensor(float(world_size))
            shard = state.layout.shards[group.rank()]
            assert torch.equal(output, total[shard.start : shard.stop].to(dtype))
            # Stock sums in another order than rank order from 3 ranks on, in the bucket's dtype. Two ranks have one
            # order; integers below 2^8 = 256 are exact in any (8 bits of bf16), and so is their mean over 2 or 4.
            dist.reduce_scatter_tensor(stock, grads[group.rank()].clone(), op=op, group=group)
            if world_size == 2 or (integers and (op == SUM or world_size == 4)):
                assert torch.equal(output, stock)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_identity_codec_is_the_exact_sum_in_rank_order(ranks: RankPool, world_size: int) -> None:
    ranks.run(_identity, world_size)


# ----------------------------------------------------------------------------------- steps and schedule


def _one_rank(group: dist.ProcessGroup) -> None:
    state = new_state(381, 1)
    for step in range(3):
        given = gradient(0, step, 381)
        output = empty_output(state)
        reduce_scatter(output, given, state, op=AVG if step else SUM, group=group)
        assert torch.equal(output, given)
        assert state.step == step + 1
    assert not state.error.codes.any()
    assert (state.traffic.sent_bytes, state.traffic.compressed_steps, state.traffic.exact_steps) == (0, 0, 3)
    assert state.scratch.num_allocations == 0


def test_one_rank_passes_the_gradient_unchanged(ranks: RankPool) -> None:
    ranks.run(_one_rank, 1)


def _warmup(group: dist.ProcessGroup) -> None:
    world_size, rank, numel = group.size(), group.rank(), 381 * group.size()
    for dtype, op in itertools.product(DTYPES, (SUM, AVG)):
        config = LoCoConfig(bits=4, block_size=32, warmup_steps=3, reset_interval=0)
        state = new_state(numel, world_size, config, dtype)
        model = Model(state.layout, config.beta, dtype, first_step=3)
        for step in range(5):
            grads = [gradient(r, step, numel, dtype) for r in range(world_size)]
            output, stock = empty_output(state, dtype), empty_output(state, dtype)
            assert state.in_warmup == (step < 3)
            work = reduce_scatter(output, grads[rank].clone(), state, op=op, group=group, async_op=True)
            assert isinstance(work, Work) == (step >= 3)
            work.wait()
            if step < 3:
                dist.reduce_scatter_tensor(stock, grads[rank].clone(), op=op, group=group)
                assert torch.equal(output, stock)
                assert not state.error.codes.any()
                assert not state.statistics.any()
            else:
                assert torch.equal(output, model.shard(model.step(grads, op), rank))
                assert state.statistics[0] > 0
            assert state.step == step + 1
        assert (state.traffic.exact_steps, state.traffic.compressed_steps) == (3, 2)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_warmup_is_the_stock_reduction(ranks: RankPool, world_size: int) -> None:
    ranks.run(_warmup, world_size)


def _exact_function(group: dist.ProcessGroup) -> None:
    state = new_state(64, 2, LoCoConfig(bits=4, warmup_steps=1))
    exact = mock.Mock(return_value="what it returns")
    output, given = empty_output(state), torch.ones(64)
    result = reduce_scatter(output, given, state, op=AVG, group=group, async_op=True, exact=exact)
    assert result == "what it returns"
    exact.assert_called_once_with(output, given, op=AVG, group=group, async_op=True)
    reduce_scatter(output, given, state, op=AVG, group=group, exact=exact)
    exact.assert_called_once()  # not after the warm-up


def test_warmup_calls_the_function_it_is_given(ranks: RankPool) -> None:
    ranks.run(_exact_function, 2)


def _resets(group: dist.ProcessGroup, warmup_steps: int, interval: int) -> list[bool]:
    numel = 300
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=warmup_steps, reset_interval=interval)
    state = new_state(numel, group.size(), config)
    model = Model(state.layout, config.beta, torch.float32, first_step=warmup_steps)
    has_error = []
    for step in range(9):
        grads = [gradient(r, step, numel) for r in range(group.size())]
        output = empty_output(state)
        reduce_scatter(output, grads[group.rank()], state, op=SUM, group=group)
        if step >= warmup_steps:
            compressed = step - warmup_steps + 1
            whole = model.step(grads, reset=interval > 0 and compressed % interval == 0)
            assert torch.equal(output, model.shard(whole, group.rank()))
        assert bool(state.error.codes.any()) == bool(state.error.scales.any())
        has_error.append(bool(state.error.codes.any()))
    return has_error


@pytest.mark.parametrize(
    ("warmup_steps", "interval", "has_error"),
    [
        (0, 0, [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (0, 1, [0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (0, 3, [1, 1, 0, 1, 1, 0, 1, 1, 0]),
        (2, 3, [0, 0, 1, 1, 0, 1, 1, 0, 1]),  # counted from the end of the warm-up
        (3, 2, [0, 0, 0, 1, 0, 1, 0, 1, 0]),
    ],
)
def test_error_is_reset_every_so_many_compressed_steps(
    ranks: RankPool, warmup_steps: int, interval: int, has_error: list[int]
) -> None:
    assert ranks.run(_resets, 2, warmup_steps, interval) == [[bool(value) for value in has_error]] * 2


# ----------------------------------------------------------------------------------- non-finite values


def _nonfinite(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    world_size, rank = group.size(), group.rank()
    shard_numel = 200
    numel = shard_numel * world_size
    # Quantised up to 150 (blocks 0-32-64-96-128-150), exact up to 160, padding up to 170, then quantised to the end but
    # for 7 elements of padding.
    spans = [ParamSpan(0, 150, False), ParamSpan(150, 160, True), ParamSpan(170, numel - 7, False)]
    positions = [0, 15, 31, 32, 149, 150, 159, 170, shard_numel - 1, shard_numel, shard_numel + 50, numel - 8]
    for value, bad_rank in itertools.product((math.nan, math.inf, -math.inf), (0, world_size - 1)):
        state = new_state(numel, world_size, LOCO, dtype, spans=spans)
        model = Model(state.layout, LOCO.beta, dtype)
        for step, position in enumerate([None, *positions, None]):
            grads = [poison_padding(state.layout, gradient(r, step, numel, dtype)) for r in range(world_size)]
            if position is not None:
                grads[bad_rank][position] = value
            output = empty_output(state, dtype)
            reduce_scatter(output, grads[rank], state, op=AVG, group=group)
            # The model loses the block, keeps its error, and has everything else right.
            assert same(output, model.shard(model.step(grads, AVG, group=group), rank))
            lost = ~torch.isfinite(output)
            if position is None or position // shard_numel != rank:
                assert not lost.any()
            else:
                exact = 150 <= position < 160
                assert lost[position % shard_numel]
                assert 1 <= lost.sum() <= (1 if exact else 32)
            assert torch.isfinite(state.error.scales).all()
            model.check_error(state, rank)
            expected_blocks = int(position is not None and not 150 <= position < 160 and rank == bad_rank)
            assert state.statistics[3] == expected_blocks


@pytest.mark.kind(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_nonfinite_value_reaches_its_owner_and_nobody_else(
    ranks: RankPool, world_size: int, dtype: torch.dtype
) -> None:
    ranks.run(_nonfinite, world_size, dtype)


def _nonfinite_everywhere(group: dist.ProcessGroup) -> None:
    numel = 64 * group.size()
    state = new_state(numel, group.size(), spans=[ParamSpan(0, numel, False)])
    output = empty_output(state)
    reduce_scatter(output, torch.full((numel,), math.inf), state, op=SUM, group=group)
    assert output.isnan().all()
    reduce_scatter(output, torch.ones(numel), state, op=SUM, group=group)
    # Within a rounding of scale and product per rank, and of the sum (see _sum_or_mean).
    assert ((output - group.size()).abs() <= 8 * 2**-24 * group.size()).all()


@pytest.mark.kind(1)
def test_step_after_all_were_inf_is_right(ranks: RankPool) -> None:
    ranks.run(_nonfinite_everywhere, 3)


# ------------------------------------------------------------------------------------------ the handle


def _handle(group: dist.ProcessGroup) -> None:
    world_size, rank, numel = group.size(), group.rank(), 1021 * group.size()
    state = new_state(numel, world_size)
    model = Model(state.layout, LOCO.beta, torch.float32)
    for step in range(20):
        grads = [gradient(r, step, numel) for r in range(world_size)]
        output, given = empty_output(state), grads[rank].clone()
        if rank == 1:
            # Calls only after rank 0 has looked at its handle.
            dist.recv(torch.zeros(1), group=group, group_src=0)
        work = reduce_scatter(output, given, state, op=SUM, group=group, async_op=True)
        given.fill_(math.nan)
        if rank == 0:
            assert not work.is_completed()
            assert output.isnan().all()
            dist.send(torch.zeros(1), group=group, group_dst=1)
        work.wait()
        whole = model.step(grads)
        assert work.is_completed()
        assert torch.equal(output, model.shard(whole, rank))
        output.fill_(math.nan)
        work.wait()  # does nothing a second time
        assert output.isnan().all()


@pytest.mark.kind(15)
@pytest.mark.parametrize("world_size", [2, 3])
def test_result_is_there_after_wait_and_not_before(ranks: RankPool, world_size: int) -> None:
    ranks.run(_handle, world_size)


def _late_rank(group: dist.ProcessGroup) -> None:
    numel = 384 * group.size()
    state = new_state(numel, group.size())
    model = Model(state.layout, LOCO.beta, torch.float32)
    for step in range(3):
        grads = [gradient(r, step, numel) for r in range(group.size())]
        output = empty_output(state)
        if group.rank() == 1:
            time.sleep(0.2)
        work = reduce_scatter(output, grads[group.rank()].clone(), state, op=AVG, group=group, async_op=True)
        work.wait()
        assert torch.equal(output, model.shard(model.step(grads, AVG), group.rank()))


@pytest.mark.kind(15)
def test_wait_waits_for_a_late_rank(ranks: RankPool) -> None:
    ranks.run(_late_rank, 3)


def _many_in_flight(group: dist.ProcessGroup) -> None:
    world_size, rank = group.size(), group.rank()
    scratch = ScratchPool(CPU)
    numels = [127 * world_size, 1021 * world_size, 64 * world_size]
    states = [new_state(numel, world_size, scratch=scratch) for numel in numels]
    models = [Model(state.layout, LOCO.beta, torch.float32) for state in states]
    allocations = []
    for step, order in enumerate(itertools.islice(itertools.cycle(itertools.permutations(range(3))), 12)):
        outputs, works, expected = [], [], []
        for number, (state, model) in enumerate(zip(states, models, strict=True)):
            grads = [gradient(r, 10 * step + number, state.layout.numel) for r in range(world_size)]
            outputs.append(empty_output(state))
            given = grads[rank].clone()
            works.append(reduce_scatter(outputs[-1], given, state, op=SUM, group=group, async_op=True))
            given.fill_(math.nan)
            expected.append(model.shard(model.step(grads), rank))
        for number in order:
            works[number].wait()
            assert torch.equal(outputs[number], expected[number])
        assert all(torch.equal(output, right) for output, right in zip(outputs, expected, strict=True))
        allocations.append(scratch.num_allocations)
    # Six buffers, each replaced by a larger one a few times at most; steady within two rounds of the six orders.
    assert allocations[6:] == [allocations[6]] * 6
    largest = max(max(state.layout.send_bytes, state.layout.recv_bytes(rank)) for state in states)
    assert scratch.allocated_bytes <= 6 * largest


@pytest.mark.kind(15)
@pytest.mark.parametrize("world_size", [2, 3])
def test_several_buckets_in_flight_in_any_order_of_waiting(ranks: RankPool, world_size: int) -> None:
    ranks.run(_many_in_flight, world_size)


def _shard_of_the_input(group: dist.ProcessGroup) -> None:
    # As Megatron calls it: the output is this rank's shard of the input itself.
    numel = 300 * group.size()
    state = new_state(numel, group.size())
    model = Model(state.layout, LOCO.beta, torch.float32)
    shard = slice(300 * group.rank(), 300 * (group.rank() + 1))
    for step in range(3):
        grads = [gradient(r, step, numel) for r in range(group.size())]
        given = grads[group.rank()].clone()
        reduce_scatter(given[shard], given, state, op=SUM, group=group, async_op=True).wait()
        assert torch.equal(given[shard], model.shard(model.step(grads), group.rank()))
        given[shard] = grads[group.rank()][shard]
        assert torch.equal(given, grads[group.rank()])  # nothing else was written


@pytest.mark.parametrize("world_size", [2, 4])
def test_output_may_be_a_part_of_the_input(ranks: RankPool, world_size: int) -> None:
    ranks.run(_shard_of_the_input, world_size)


# ------------------------------------------------------------------------- memory, traffic, determinism


def _scratch_use(group: dist.ProcessGroup) -> None:
    scratch = ScratchPool(CPU)
    states = [new_state(n * group.size(), group.size(), scratch=scratch) for n in (64, 1021, 127)]
    allocations = []
    for step in range(6):
        for state in states:
            given = gradient(group.rank(), step, state.layout.numel)
            reduce_scatter(empty_output(state), given, state, op=SUM, group=group)
        allocations.append(scratch.num_allocations)
    assert allocations[1:] == [allocations[1]] * 5
    # One at a time: a pair of buffers serves all buckets.
    largest = max(states, key=lambda state: state.layout.send_bytes)
    assert scratch.allocated_bytes <= 2 * max(largest.layout.send_bytes, largest.layout.recv_bytes(group.rank()))


def test_steady_state_allocates_no_scratch(ranks: RankPool) -> None:
    ranks.run(_scratch_use, 3)


def _traffic(group: dist.ProcessGroup) -> tuple[float, float, int, int]:
    world_size, rank = group.size(), group.rank()
    # An exact parameter in the first shard only and padding at the end: payloads of very different sizes.
    numel = 1024 * world_size
    spans = [ParamSpan(0, 500, True), ParamSpan(500, numel - 900, False)]
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=1)
    state = new_state(numel, world_size, config, torch.bfloat16, spans=spans)
    calls: list[dict[str, Any]] = []
    stock = dist.all_to_all_single

    def counting(output: Tensor, input: Tensor, **kwargs: Any) -> Any:
        assert (output.dtype, input.dtype) == (torch.uint8, torch.uint8)
        calls.append({**kwargs, "sent": input.numel(), "received": output.numel()})
        return stock(output, input, **kwargs)

    ring_bytes = 2 * numel * (world_size - 1) / world_size
    with mock.patch.object(dist, "all_to_all_single", counting):
        for step in range(4):
            reduce_scatter(
                empty_output(state, torch.bfloat16),
                gradient(rank, step, numel, torch.bfloat16),
                state,
                op=SUM,
                group=group,
            )
            if step == 0:
                assert calls == []
                assert state.traffic.sent_bytes == ring_bytes
    assert len(calls) == 3
    mine = 0
    for call in calls:
        assert sum(call["input_split_sizes"]) == call["sent"]
        assert sum(call["output_split_sizes"]) == call["received"]
        mine += sum(size for peer, size in enumerate(call["input_split_sizes"]) if peer != rank)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, (mine, calls[0]["input_split_sizes"], calls[0]["output_split_sizes"]), group=group)
    # Each receives what the others say they send.
    assert [splits[rank] for _, splits, _ in everyone] == everyone[rank][2]
    counted = sum(sent for sent, _, _ in everyone) / world_size
    # Sums of a few integers and quarters or thirds: doubles, three additions.
    assert state.traffic.sent_bytes == pytest.approx(ring_bytes + counted, rel=4 * 2**-53)
    assert state.traffic.bf16_bytes == pytest.approx(4 * ring_bytes, rel=4 * 2**-53)
    traffic = state.traffic
    return traffic.sent_bytes, traffic.bf16_bytes, traffic.compressed_steps, traffic.exact_steps


@pytest.mark.kind(40)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_traffic_is_what_was_given_to_the_all_to_all(ranks: RankPool, world_size: int) -> None:
    counters = ranks.run(_traffic, world_size)
    assert len(set(counters)) == 1
    assert counters[0][2:] == (3, 1)


def _all_reduced(group: dist.ProcessGroup) -> None:
    state = new_state(300, group.size())
    reduce_scatter(empty_output(state), gradient(group.rank(), 0, 300), state, op=SUM, group=group)
    codes, sent = state.error.codes.clone(), state.traffic.sent_bytes
    state.count_all_reduce()
    assert torch.equal(state.error.codes, codes)
    assert state.step == 1
    assert not state.statistics.any()
    # A ring all-reduce moves 2 (W - 1) / W of the fp32 buffer.
    assert state.traffic.sent_bytes - sent == 2 * 300 * 4 * (group.size() - 1) / group.size()


def test_a_step_reduced_by_somebody_else_is_counted_alone(ranks: RankPool) -> None:
    ranks.run(_all_reduced, 3)


def _trace(group: dist.ProcessGroup, sleep_seed: int | None) -> list[Tensor]:
    numels = [127 * group.size(), 381 * group.size()]
    scratch = ScratchPool(CPU)
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=1, reset_interval=3)
    states = [new_state(numel, group.size(), config, scratch=scratch) for numel in numels]
    sleeps = random.Random(None if sleep_seed is None else sleep_seed + group.rank())
    trace = []
    for step in range(6):
        works = []
        for state in states:
            if sleep_seed is not None:
                time.sleep(sleeps.choice((0.0, 0.0, 0.02, 0.05)))
            output = empty_output(state)
            given = gradient(group.rank(), step, state.layout.numel)
            works.append((output, reduce_scatter(output, given, state, op=AVG, group=group, async_op=True)))
        for output, work in works:
            work.wait()
            trace.append(output)
        trace += [tensor.clone() for state in states for tensor in (state.error.codes, state.error.scales)]
    return trace


@pytest.mark.kind(36)
def test_arrival_order_changes_no_bit(ranks: RankPool) -> None:
    quiet = ranks.run(_trace, 3, None)
    for seed in (1, 2):
        for rank, trace in enumerate(ranks.run(_trace, 3, seed)):
            assert all(torch.equal(a, b) for a, b in zip(quiet[rank], trace, strict=True))


# -------------------------------------------------------------------------------------- groups, refusals


def _subgroup(world: dist.ProcessGroup) -> None:
    members = [1, 3]
    group: Any = dist.new_group(members)
    if world.rank() in members:
        rank = members.index(world.rank())
        for op in (SUM, AVG):
            state = new_state(762, 2)
            model = Model(state.layout, LOCO.beta, torch.float32)
            for step in range(3):
                grads = [gradient(r, step, 762) for r in members]
                output = empty_output(state)
                reduce_scatter(output, grads[rank].clone(), state, op=op, group=group)
                assert torch.equal(output, model.shard(model.step(grads, op), rank))
    dist.barrier()


def test_group_of_some_ranks(ranks: RankPool) -> None:
    ranks.run(_subgroup, 4)


def _refusals(group: dist.ProcessGroup) -> None:
    numel = 64 * group.size()
    state = new_state(numel, group.size())
    model = Model(state.layout, LOCO.beta, torch.float32)

    def refused(match: str, **changes: Any) -> None:
        call: dict[str, Any] = {
            "output": empty_output(state),
            "input": torch.ones(numel),
            "state": state,
            "op": SUM,
            "group": group,
        }
        with pytest.raises(ValueError, match=match):
            reduce_scatter(**{**call, **changes})
        assert state.step == 0
        assert not state.error.codes.any()
        assert state.traffic.sent_bytes == 0

    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, "sum", None):
        refused("bucket 7.*SUM or ReduceOp.AVG", op=op)
    refused(f"bucket 7: made for {group.size() + 1} ranks", state=new_state(numel * 3, group.size() + 1))
    refused("grad must have shape", input=torch.ones(numel + 1))
    refused("grad must have shape", input=torch.ones(1, numel))
    refused("grad must be contiguous", input=torch.ones(2 * numel)[::2])
    refused("grad must be torch.float32", input=torch.ones(numel, dtype=torch.float64))
    refused("grad has 2-byte elements", input=torch.ones(numel, dtype=torch.bfloat16))
    refused("output must have shape", output=torch.ones(numel))
    refused("output must be contiguous", output=torch.ones(128)[::2])
    refused("output must be torch.float32", output=empty_output(state, torch.bfloat16))
    # What was refused kept no scratch memory, and the next call is right.
    assert state.scratch.num_allocations <= 2
    grads = [gradient(r, 0, numel) for r in range(group.size())]
    output = empty_output(state)
    reduce_scatter(output, grads[group.rank()], state, op=SUM, group=group)
    assert torch.equal(output, model.shard(model.step(grads), group.rank()))


@pytest.mark.kind(39)
def test_what_does_not_fit_is_refused_before_anything_changes(ranks: RankPool) -> None:
    ranks.run(_refusals, 2)


def _op_refused_in_warmup(group: dist.ProcessGroup) -> None:
    # Also while the stock function, which knows MAX, would be called: the run must not fail at step 10.
    for config in (LoCoConfig(bits=4), LOCO):
        state = new_state(64, group.size(), config)
        with pytest.raises(ValueError, match=r"SUM or ReduceOp\.AVG"):
            reduce_scatter(empty_output(state), torch.ones(64), state, op=dist.ReduceOp.MAX, group=group)
        assert state.step == 0


@pytest.mark.kind(35)
@pytest.mark.parametrize("world_size", [1, 2])
def test_other_operations_are_refused_from_the_first_step(ranks: RankPool, world_size: int) -> None:
    ranks.run(_op_refused_in_warmup, world_size)


def _dtypes_that_differ(group: dist.ProcessGroup) -> None:
    # bf16 and fp16 have one size: the layout cannot tell them apart, but exact values would be misread.
    state = new_state(64, group.size(), LOCO, torch.bfloat16)
    with pytest.raises(ValueError, match="output"):
        reduce_scatter(
            empty_output(state, torch.float16), torch.ones(64, dtype=torch.bfloat16), state, op=SUM, group=group
        )


@pytest.mark.kind(25)
def test_output_of_another_dtype_than_the_input_is_refused(ranks: RankPool) -> None:
    ranks.run(_dtypes_that_differ, 2)


class _Allocations(TorchDispatchMode):
    """Sizes in bytes of the memory that operations allocate: of results that share none with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return result


def _steady_state(group: dist.ProcessGroup) -> None:
    numel = 3 * 10_000
    config = LoCoConfig(bits=4, warmup_steps=0, reset_interval=3, chunk_bytes=4000)
    state = new_state(numel, 3, config, spans=[ParamSpan(0, 20, True), ParamSpan(20, numel, False)])
    assert (state.backend.name, len(state.chunks)) == ("cpu", 4)
    output, given = empty_output(state), gradient(group.rank(), 0, numel)
    allocations = _Allocations()
    for step in range(8):
        with allocations:
            reduce_scatter(output, given, state, op=AVG, group=group, async_op=True, unit=torch.tensor(2.0)).wait()
        if step == 0:
            assert max(allocations.sizes) >= state.layout.send_bytes  # it does see what is allocated
            allocations.sizes.clear()
    # What is left are single numbers: the quotient of two units.
    assert max(allocations.sizes) <= 8
    assert state.scratch.num_allocations == 2


@pytest.mark.kind(23)
def test_steady_state_allocates_no_buffer(ranks: RankPool) -> None:
    ranks.run(_steady_state, 3)
