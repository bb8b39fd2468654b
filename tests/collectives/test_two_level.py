"""Two-level reduction on real Gloo ranks, against the one-process model of ``tests/_buckets.py``.

Nodes are emulated: consecutive ranks. Gradients are multiples of 1/8 of few bits, so that sums inside a node are exact
in every dtype and order, as is their mean over two ranks; what a node sends then follows from the model bit for bit.
Functions whose names begin with an underscore run on the ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store

from megatron_loco.collectives import two_level
from megatron_loco.collectives.placement import choose_topology
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.two_level import NodeGroups, keep_in_step, new_node_groups
from megatron_loco.collectives.work import Work
from megatron_loco.config import LoCoConfig
from megatron_loco.core.exchange import plan_exchange
from megatron_loco.core.wire import ParamSpan
from tests._buckets import CPU, Oracle, spans_of
from tests._ranks import RankPool

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=0, reset_interval=0)
IDENTITY = LoCoConfig(bits=32, warmup_steps=0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def node_groups(group: dist.ProcessGroup, ranks_per_node: int = 2) -> NodeGroups:
    nodes = [rank // ranks_per_node for rank in range(group.size())]
    return new_node_groups(choose_topology(nodes, "two-level"), group)


def new_state(
    numel: int,
    rank: int,
    world_size: int = 4,
    ranks_per_node: int = 2,
    config: LoCoConfig = LOCO,
    dtype: torch.dtype = torch.float32,
    *,
    spans: Sequence[ParamSpan] | None = None,
    two_level: bool = True,
    scratch: ScratchPool | None = None,
) -> BucketState:
    exchange = plan_exchange(
        numel,
        [k // ranks_per_node for k in range(world_size)],
        [
            ParamSpan(s.start, s.stop, s.exact or config.is_identity)
            for s in (spans_of(numel) if spans is None else spans)
        ],
        two_level=two_level,
        bits=config.bits,
        block_size=config.block_size,
        exact_itemsize=dtype.itemsize,
    )
    return BucketState("bucket 3", exchange.layout(rank), config, CPU, scratch or ScratchPool(CPU), exchange)


def gradient(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    # At most 6 bits: the sum of up to 4 has 8, as many as bf16.
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))
    return ((16 * values).round().clamp(-63, 63) / 8).to(dtype)


def empty_output(state: BucketState, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((state.exchange.numel // state.exchange.world_size,), math.nan, dtype=dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values of one dtype; NaN equals NaN."""
    return (
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))
    )


class Model:
    """All ranks in one process. Each knows all gradients; it computes what itself sends, and learns the rest."""

    def __init__(self, state: BucketState, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> None:
        self.exchange = state.exchange
        self.group = group
        self.dtype = dtype
        self.oracle = Oracle(state.layout, state.config.beta, state.config.warmup_steps)

    def shard(self, grads: Sequence[Tensor], op: Any = SUM) -> Tensor:
        """What this rank's shard must be; advances the error."""
        rank, size = self.group.rank(), self.exchange.inner_size
        num_nodes = self.exchange.num_nodes
        node, position = divmod(rank, size)
        # Exact in the dtype of the bucket, hence also in fp32.
        partial = torch.stack([grad.float() for grad in grads[node * size : (node + 1) * size]]).sum(0)
        if op == AVG:
            partial /= size
        held = partial.view(num_nodes, size, -1)[:, position].flatten()
        sent = self.oracle.send(held)
        everyone = [torch.empty_like(sent) for _ in grads]
        dist.all_gather(everyone, sent, group=self.group)
        total = torch.zeros_like(sent)
        for peer in range(position, len(grads), size):
            total = total + everyone[peer]
        if op == AVG:
            total = total / torch.tensor(float(num_nodes))
        return total.view(num_nodes, -1)[node].to(self.dtype)


# ----------------------------------------------------------------------------------------------- values


def _against_model(group: dist.ProcessGroup, ranks_per_node: int, cases: list[tuple[Any, ...]]) -> None:
    rank, world_size = group.rank(), group.size()
    groups = node_groups(group, ranks_per_node)
    for shard_numel, block_size, bits, dtype, op in cases:
        numel = shard_numel * world_size
        config = LoCoConfig(bits=bits, block_size=block_size, warmup_steps=0, reset_interval=0)
        # Every other bucket ends in padding that fills whole shards; padding holds NaN.
        spans = [s for s in spans_of(numel) if shard_numel % 2 or s.stop < numel // 2]
        state = new_state(numel, rank, world_size, ranks_per_node, config, dtype, spans=spans)
        model = Model(state, group, dtype)
        is_param = torch.zeros(numel, dtype=torch.bool)
        for span in spans:
            is_param[span.start : span.stop] = True
        for step in range(3):
            grads = [gradient(r, step, numel, dtype).where(is_param, torch.nan) for r in range(world_size)]
            given, output = grads[rank].clone(), empty_output(state, dtype)
            assert reduce_scatter(output, given, state, op=op, group=group, node_groups=groups) is None
            assert torch.equal(output, model.shard(grads, op)), (shard_numel, block_size, bits, dtype, op, step)
            assert same(given, grads[rank])  # not written
            assert state.step == step + 1
            assert not output[~is_param[rank * shard_numel : (rank + 1) * shard_numel]].any()


@pytest.mark.kind(17)
def test_equals_the_model_bitwise(ranks: RankPool) -> None:
    variants = itertools.cycle(itertools.product((32, 128), (4, 8), DTYPES, (SUM, AVG)))
    # 24 variants in steps of 5, which has no factor in common with 24.
    cases = [(n, *next(itertools.islice(variants, 4, None))) for n in (1, 2, 127, 512, 1021) for _ in range(5)]
    ranks.run(_against_model, 4, 2, cases)


def _identity(group: dist.ProcessGroup) -> None:
    groups = node_groups(group)
    for dtype, op, shard_numel in itertools.product(DTYPES, (SUM, AVG), (1, 127, 384)):
        state = new_state(
            4 * shard_numel, group.rank(), 4, 2, IDENTITY, dtype, spans=[ParamSpan(0, 4 * shard_numel, True)]
        )
        assert state.error.num_bytes == 0
        # Multiples of 4 up to 252: every sum has at most 8 bits, as bf16 has, and every mean is a whole number.
        given = 8 * gradient(group.rank(), 0, 4 * shard_numel, dtype).clamp(-7, 7)
        given = (given / 4).round() * 4
        output, stock = empty_output(state, dtype), empty_output(state, dtype)
        reduce_scatter(output, given.clone(), state, op=op, group=group, node_groups=groups)
        dist.reduce_scatter_tensor(stock, given, op=op, group=group)
        assert torch.equal(output, stock)


def test_identity_codec_is_the_stock_reduction(ranks: RankPool) -> None:
    ranks.run(_identity, 4)


def _nonfinite(group: dist.ProcessGroup) -> None:
    rank, shard_numel = group.rank(), 200
    groups = node_groups(group)
    # Each shard: 150 quantised elements (blocks at 0, 32, 64, 96, 128), 10 exact ones, 10 of padding, 30 quantised.
    spans = [
        ParamSpan(start + a, start + b, exact)
        for start in range(0, 4 * shard_numel, shard_numel)
        for a, b, exact in ((0, 150, False), (150, 160, True), (170, 200, False))
    ]
    for dtype, value in ((torch.float32, math.nan), (torch.float32, -math.inf), (torch.bfloat16, math.inf)):
        state = new_state(4 * shard_numel, rank, dtype=dtype, spans=spans)
        model = Model(state, group, dtype)
        for step, (bad_rank, owner, position) in enumerate(
            [(0, 0, 0), (1, 3, 149), (2, 1, 155), (3, 3, 31), (3, 0, 199), (0, 2, 165)]
        ):
            grads = [gradient(r, step, 4 * shard_numel, dtype) for r in range(4)]
            grads[bad_rank][owner * shard_numel + position] = value
            output = empty_output(state, dtype)
            reduce_scatter(output, grads[rank], state, op=AVG, group=group, node_groups=groups)
            # The model loses the block, keeps its error, and has everything else right.
            assert same(output, model.shard(grads, AVG))
            lost = ~torch.isfinite(output)
            if rank != owner or 160 <= position < 170:
                assert not lost.any()
            else:
                exact = 150 <= position < 160
                assert lost[position]
                assert 1 <= lost.sum() <= (1 if exact else 32)
            assert torch.isfinite(state.error.scales).all()
            # It is quantised by the rank of the owner's position on the node where it arose.
            quantised = position < 150 or position >= 170
            encoder = bad_rank - bad_rank % 2 + owner % 2
            assert state.statistics[3] == int(quantised and rank == encoder)


@pytest.mark.kind(3)
def test_nonfinite_value_reaches_its_owner_and_nobody_else(ranks: RankPool) -> None:
    ranks.run(_nonfinite, 4)


# ------------------------------------------------------------------------------- warm-up, steps, handle


def _warmup(group: dist.ProcessGroup) -> None:
    rank, numel = group.rank(), 4 * 381
    groups = node_groups(group)
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=2, reset_interval=0)
    state = new_state(numel, rank, config=config)
    model = Model(state, group)
    exact = mock.Mock(wraps=dist.reduce_scatter_tensor)
    for step in range(4):
        grads = [gradient(r, step, numel) for r in range(4)]
        output, stock = empty_output(state), empty_output(state)
        work = reduce_scatter(
            output, grads[rank], state, op=SUM, group=group, async_op=True, exact=exact, node_groups=groups
        )
        assert isinstance(work, Work) == (step >= 2)
        work.wait()
        if step < 2:
            assert exact.call_args.kwargs["group"] is group  # over the whole group, in one level
            dist.reduce_scatter_tensor(stock, grads[rank], group=group)
            assert torch.equal(output, stock)
            assert not state.error.codes.any()
        else:
            assert torch.equal(output, model.shard(grads))
    assert exact.call_count == 2
    assert (state.traffic.exact_steps, state.traffic.compressed_steps) == (2, 2)


def test_warmup_is_the_stock_reduction_over_the_whole_group(ranks: RankPool) -> None:
    ranks.run(_warmup, 4)


def _handle(group: dist.ProcessGroup) -> None:
    rank, numel = group.rank(), 4 * 1021
    groups = node_groups(group)
    scratch = ScratchPool(CPU)
    states = [new_state(numel, rank, scratch=scratch), new_state(4 * 96, rank, scratch=scratch)]
    models = [Model(state, group) for state in states]
    allocations = []
    for step in range(8):
        outputs, works, everything = [], [], []
        for number, state in enumerate(states):
            grads = [gradient(r, 10 * step + number, state.exchange.numel) for r in range(4)]
            given = grads[rank].clone()
            outputs.append(empty_output(state))
            works.append(
                reduce_scatter(outputs[-1], given, state, op=AVG, group=group, async_op=True, node_groups=groups)
            )
            given.fill_(math.nan)  # is encoded
            assert outputs[-1].isnan().all()  # nothing is there before wait()
            everything.append(grads)
        for number in (0, 1) if step % 2 else (1, 0):
            works[number].wait()
            assert torch.equal(outputs[number], models[number].shard(everything[number], AVG))
            outputs[number].fill_(math.nan)
            works[number].wait()  # does nothing a second time
            assert outputs[number].isnan().all()
        allocations.append(scratch.num_allocations)
    # Two pairs in flight and the partial sums of one bucket; nothing new once they have their sizes.
    assert allocations[3:] == [allocations[3]] * 5
    largest = max(states[0].layout.send_bytes, states[0].layout.recv_bytes(rank // 2))
    assert scratch.allocated_bytes <= 4 * largest + 4 * numel // 2


@pytest.mark.kind(15)
def test_several_in_flight_with_the_input_overwritten(ranks: RankPool) -> None:
    ranks.run(_handle, 4)


def _shard_of_the_input(group: dist.ProcessGroup) -> None:
    # As Megatron calls it: the output is this rank's shard of the input, inside a coalescing block of the whole group.
    rank = group.rank()
    groups = node_groups(group)
    state = new_state(4 * 300, rank)
    model = Model(state, group)
    shard = slice(300 * rank, 300 * (rank + 1))
    for step, async_op in enumerate((False, True, False)):
        grads = [gradient(r, step, 4 * 300) for r in range(4)]
        given, other, reduced = grads[rank].clone(), torch.ones(8), torch.empty(2)
        with _coalescing_manager(group=group, async_ops=async_op) as manager:
            dist.reduce_scatter_tensor(reduced, other, group=group)  # collected, and done at the end of the block
            work = reduce_scatter(
                given[shard], given, state, op=SUM, group=group, async_op=async_op, node_groups=groups
            )
            if not async_op:
                assert torch.equal(given[shard], model.shard(grads))
        if async_op:
            manager.wait()
            work.wait()
            assert torch.equal(given[shard], model.shard(grads))
        assert reduced.tolist() == [4.0, 4.0]
        given[shard] = grads[rank][shard]
        assert torch.equal(given, grads[rank])  # nothing else was written


@pytest.mark.kind(15)
def test_output_in_the_input_inside_a_coalescing_block(ranks: RankPool) -> None:
    ranks.run(_shard_of_the_input, 4)


def _discard(group: dist.ProcessGroup) -> None:
    rank, numel = group.rank(), 4 * 381
    groups = node_groups(group)
    for rollback in ("restore", "zero"):
        config = LoCoConfig(bits=4, block_size=32, warmup_steps=0, reset_interval=0, rollback=rollback)
        state, undisturbed = new_state(numel, rank, config=config), new_state(numel, rank, config=config)
        for step, is_discarded in enumerate((False, True, True, False)):
            given = gradient(rank, step, numel)
            output, expected = empty_output(state), empty_output(state)
            reduce_scatter(output, given, state, op=SUM, group=group, node_groups=groups)
            if is_discarded:
                state.discard()
                if rollback == "zero":
                    undisturbed.error.codes.zero_()
                    undisturbed.error.scales.zero_()
            else:
                reduce_scatter(expected, given, undisturbed, op=SUM, group=group, node_groups=groups)
                assert torch.equal(output, expected)
            assert torch.equal(state.error.codes, undisturbed.error.codes)
            assert torch.equal(state.error.scales, undisturbed.error.scales)
            assert state.step == undisturbed.step
        assert state.traffic.compressed_steps == 4  # bytes were sent, and stay counted


@pytest.mark.kind(1, 4)
def test_a_discarded_step_never_happened(ranks: RankPool) -> None:
    ranks.run(_discard, 4)


# ---------------------------------------------------------------------------------- memory and traffic


def test_error_and_scratch_are_a_part_of_those_of_flat() -> None:
    # Two matrices of 4096 and 2048 elements, on 2 nodes of 4 ranks: shards of 768, of whole blocks.
    spans = [ParamSpan(0, 4096, False), ParamSpan(4096, 6144, False)]
    flat = new_state(6144, 5, 8, 4, spans=spans, two_level=False)
    two_levels = new_state(6144, 5, 8, 4, spans=spans)
    assert flat.error.num_bytes == 6144 + 4 * 6144 // 32
    assert two_levels.error.num_bytes == flat.error.num_bytes // 4 == 1728
    assert flat.layout.send_bytes == 4 * two_levels.layout.send_bytes == 6144 // 2 + 4 * 6144 // 32
    assert flat.layout.recv_bytes(5) == 4 * two_levels.layout.recv_bytes(1)


def _traffic(group: dist.ProcessGroup) -> list[tuple[float, ...]]:
    rank, numel, itemsize = group.rank(), 4 * 1000, 2
    groups = node_groups(group)
    # An exact parameter in the first shard only and padding at the end: payloads of very different sizes.
    spans = [ParamSpan(0, 500, True), ParamSpan(500, numel - 900, False)]
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=1)
    results = []
    stock = dist.all_to_all_single
    for is_two_level in (False, True):
        state = new_state(numel, rank, config=config, dtype=torch.bfloat16, spans=spans, two_level=is_two_level)
        sent = to_other_nodes = 0

        def counting(output: Tensor, input: Tensor, **kwargs: Any) -> Any:
            nonlocal sent, to_other_nodes
            members = dist.get_process_group_ranks(kwargs["group"])
            for peer, num_bytes in zip(members, kwargs["input_split_sizes"], strict=True):
                sent += num_bytes if peer != rank else 0
                to_other_nodes += num_bytes if peer // 2 != rank // 2 else 0
            assert sum(kwargs["input_split_sizes"]) == input.numel()
            return stock(output, input, **kwargs)

        with mock.patch.object(dist, "all_to_all_single", counting):
            for step in range(3):
                given, output = gradient(rank, step, numel, torch.bfloat16), empty_output(state, torch.bfloat16)
                reduce_scatter(output, given, state, op=SUM, group=group, node_groups=groups)
        totals = torch.tensor([sent, to_other_nodes], dtype=torch.float64)
        dist.all_reduce(totals, group=group)
        mean_sent, mean_internode = (totals / 4).tolist()
        # One exact step: a ring in bf16 sends 3/4 of the bucket, and half of its four links join nodes.
        ring = numel * itemsize * 3 / 4
        # Two steps whose first hop sends half the bucket.
        inner = 2 * numel * itemsize / 2 if is_two_level else 0
        traffic = state.traffic
        assert traffic.inner_bytes == inner
        assert traffic.sent_bytes == pytest.approx(ring + inner + mean_sent, rel=1e-14)
        assert traffic.internode_bytes == pytest.approx(ring / 2 + mean_internode, rel=1e-14)
        assert traffic.bf16_bytes == pytest.approx(3 * ring, rel=1e-14)
        assert traffic.bf16_internode_bytes == pytest.approx(3 * ring / 2, rel=1e-14)
        results.append((traffic.sent_bytes, traffic.internode_bytes, mean_internode))
    return results


@pytest.mark.kind(40)
def test_traffic_is_what_was_given_to_the_all_to_all(ranks: RankPool) -> None:
    counted = ranks.run(_traffic, 4)
    assert counted == [counted[0]] * 4  # equal on all ranks
    (_, _, flat), (_, _, two_levels) = counted[0]
    assert flat == 2 * two_levels > 0


# -------------------------------------------------------------------------------------- groups, refusals


def _refusals(group: dist.ProcessGroup) -> None:
    rank, numel = group.rank(), 4 * 64
    groups = node_groups(group)
    scratch = ScratchPool(CPU)
    state = new_state(numel, rank, scratch=scratch)
    model = Model(state, group)

    def refused(match: str, exception: type[Exception] = ValueError, **changes: Any) -> None:
        call: dict[str, Any] = {
            "output": empty_output(state),
            "input": torch.ones(numel),
            "state": state,
            "op": SUM,
            "group": group,
            "node_groups": groups,
        }
        with pytest.raises(exception, match=match):
            reduce_scatter(**{**call, **changes})
        assert state.step == 0
        assert not state.error.codes.any()
        assert state.traffic.sent_bytes == 0

    refused("bucket 3: needs node_groups of 2 ranks inside a node and 2 between nodes, got None", node_groups=None)
    alone = NodeGroups(groups.inside_node, group)
    refused(r"needs node_groups of 2 .* and 2 between nodes, got \(2, 4\)", node_groups=alone)
    refused("made for 4 ranks, called on a group of 2", group=groups.inside_node)
    refused("SUM or ReduceOp.AVG", op=dist.ReduceOp.MAX)
    refused("grad must have shape", input=torch.ones(numel // 2))  # that of the partial sums
    refused("grad must have shape", input=torch.ones(2 * numel))
    refused("grad must be contiguous", input=torch.ones(2 * numel)[::2])
    refused("grad must be torch.float32", input=torch.ones(numel, dtype=torch.int32))
    refused("grad has 2-byte elements", input=torch.ones(numel, dtype=torch.bfloat16))
    refused("output must have shape", output=torch.ones(numel // 2))
    assert scratch.num_allocations == 0  # what is refused takes no memory
    with mock.patch.object(dist, "reduce_scatter_tensor", side_effect=RuntimeError("the link inside the node")):
        refused("the link inside the node", RuntimeError)
    allocations = scratch.num_allocations
    with (
        mock.patch.object(dist, "all_to_all_single", side_effect=RuntimeError("the network")),
        pytest.raises(RuntimeError, match="the network"),
    ):
        reduce_scatter(empty_output(state), torch.ones(numel), state, op=SUM, group=group, node_groups=groups)
    state = new_state(numel, rank, scratch=scratch)
    # What failed has given its scratch memory back, and the next call is right.
    grads = [gradient(r, 0, numel) for r in range(4)]
    output = empty_output(state)
    reduce_scatter(output, grads[rank], state, op=SUM, group=group, node_groups=groups)
    assert torch.equal(output, model.shard(grads))
    assert scratch.num_allocations == allocations


def test_what_fails_gives_back_its_scratch_memory(ranks: RankPool) -> None:
    ranks.run(_refusals, 4)


def _groups(group: dist.ProcessGroup) -> None:
    rank, node, position = group.rank(), *divmod(group.rank(), 2)
    first, second = node_groups(group), node_groups(group)
    for groups in (first, second):
        assert dist.get_process_group_ranks(groups.inside_node) == [2 * node, 2 * node + 1]
        assert dist.get_process_group_ranks(groups.between_nodes) == [position, position + 2]
        assert groups.sizes == (2, 2)
        for part in (groups.inside_node, groups.between_nodes):
            assert dist.get_backend(part) == dist.get_backend(group) == "gloo"
            # As the group of the ranks, which tests/_ranks.py makes with another timeout than torch's default.
            assert two_level._timeout(part) == two_level._timeout(group) is not None
    # Two of the same ranks, as of dense and of expert gradients: their messages do not mix.
    assert first.inside_node is not second.inside_node
    values = [torch.full((1,), float(10**k * (rank + 1))) for k in range(4)]
    parts = (first.inside_node, second.between_nodes, second.inside_node, first.between_nodes)
    works = [dist.all_reduce(v, group=part, async_op=True) for v, part in zip(values, parts, strict=True)]
    for work in reversed(works):
        work.wait()
    inside, between = 4 * node + 3, 2 * position + 4
    assert [v.item() for v in values] == [inside, 10 * between, 100 * inside, 1000 * between]


def test_groups_are_parts_of_the_group_and_may_be_made_twice(ranks: RankPool) -> None:
    ranks.run(_groups, 4)


def _six(world: dist.ProcessGroup) -> None:
    # Ranks 0 to 3 are two nodes of two; 4 and 5 have no group of their own.
    of_four = dist.new_group([0, 1, 2, 3])
    store = _get_default_store()
    assert store is not None
    if world.rank() < 4:
        assert isinstance(of_four, dist.ProcessGroup)
        node_groups(of_four)
    else:
        keep_in_step()
    # A group that all make together: without keep_in_step(), ranks 4 and 5 would wait under another name.
    everyone = dist.new_group(list(range(6)))
    value = torch.ones(1)
    dist.all_reduce(value, group=everyone)
    assert value.item() == 6
    # Two nodes of three. Sums only: a mean over three ranks is not exact.
    variants = [(1, 32, 4, torch.float32, SUM), (127, 32, 4, torch.bfloat16, SUM), (340, 64, 8, torch.float16, SUM)]
    _against_model(world, 3, variants)
    # Three nodes of two.
    _against_model(world, 2, variants)


def test_six_ranks() -> None:
    with RankPool(6) as pool:
        pool.run(_six, 6)
