"""LoCo under Megatron's real DistributedDataParallel, compared with the unpatched one and with a one-process oracle."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.config import LoCoConfig
from tests._buckets import Oracle
from tests._ranks import run_ranks
from tests.integrations.megatron._ddp import (
    SHAPES,
    Case,
    buckets,
    parallel_megatron,
    reduce_case,
    shards,
    train_step,
    wrap,
)

IDENTITY = LoCoConfig(bits=32, warmup_steps=0, min_bucket_numel=0)
LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=0, reset_interval=0, min_bucket_numel=0)


def _equal(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True))


def _cases(multiple_of: int) -> list[Case]:
    cases = [
        Case(overlap=overlap, average=average, grad_dtype=dtype, num_micro_batches=micro, bucket_size=size)
        for overlap, average, (dtype, micro, size) in itertools.product(
            (False, True),
            (False, True),
            ((torch.float32, 1, None), (torch.float32, 3, 700), (torch.bfloat16, 1, 700)),
        )
    ]
    return [Case(**{**vars(case), "multiple_of": multiple_of}) for case in cases]


def _enter(stack: ExitStack, case: Case) -> None:
    parallel_megatron(
        stack, case.expert_parallel, context_parallel=case.context_parallel, num_instances=case.num_instances
    )


def _identity_differs(rank: int, world_size: int, cases: list[Case]) -> list[Case]:
    differing = []
    for _, group in itertools.groupby(cases, key=lambda c: (c.expert_parallel, c.context_parallel, c.num_instances)):
        with ExitStack() as stack:
            group = list(group)
            _enter(stack, group[0])
            differing += [c for c in group if not _equal(reduce_case(c, rank, IDENTITY), reduce_case(c, rank, None))]
    return differing


@pytest.mark.kind(22, 35)
def test_identity_codec_is_bitwise_stock_on_two_ranks() -> None:
    # The sum of two numbers does not depend on their order: any gradients, fp32 and bf16 buffers.
    assert run_ranks(_identity_differs, 2, _cases(multiple_of=0)) == [[], []]


@pytest.mark.parametrize("world_size", [1, 3])
def test_identity_codec_is_bitwise_stock_on_odd_groups(world_size: int) -> None:
    # Gloo's order of summation differs from rank order; integer values make every order exact. An average over three
    # ranks is rounded in different places by the two, so sums only there.
    cases = [case for case in _cases(multiple_of=world_size) if world_size == 1 or not case.average]
    assert run_ranks(_identity_differs, world_size, cases) == [[]] * world_size


@pytest.mark.kind(20)
def test_identity_codec_is_bitwise_stock_with_experts() -> None:
    # Expert buckets: other group (2 of 4 ranks), other scaling factor.
    cases = [
        Case(overlap=overlap, average=average, multiple_of=4, expert_parallel=ep)
        for ep, overlap, average in itertools.product((2, 4), (False, True), (False, True))
    ]
    assert run_ranks(_identity_differs, 4, cases) == [[]] * 4


def test_identity_codec_is_bitwise_stock_with_context_parallelism_and_several_instances() -> None:
    # Context parallelism: buckets are reduced over all four ranks. Two instances: over two, then stock all-reduces the
    # shards of the two instances, with overlap on a stream of its own.
    cases = [
        Case(overlap=overlap, average=average, multiple_of=4, bucket_size=700, **topology)
        for topology, overlap, average in itertools.product(
            ({"context_parallel": 2}, {"num_instances": 2}, {"num_instances": 2, "expert_parallel": 2}),
            (False, True),
            (False, True),
        )
    ]
    assert run_ranks(_identity_differs, 4, cases) == [[]] * 4


def _against_oracle(rank: int, world_size: int, case: Case) -> list[tuple[str, bool]]:
    """Shards of a LoCo run against the sum in rank order of what an oracle of each rank sends."""
    outcomes = []
    with ExitStack() as stack:
        _enter(stack, case)
        from megatron_loco.integrations.megatron import patch

        stack.enter_context(patch(LOCO))
        ddp = wrap(case)
        oracles = {
            id(bucket): {member: Oracle(state.layout, LOCO.beta) for member in range(world_size)}
            for group, _ in buckets(ddp)
            for bucket, state in getattr(group, "loco_states", [])
        }
        for step in range(3):
            train_step(ddp, case, rank, step)
            for (group, bucket), shard in zip(buckets(ddp), shards(ddp), strict=True):
                members = dist.get_process_group_ranks(group.intra_distributed_optimizer_instance_group)
                total = torch.zeros(bucket.grad_data.numel())
                for instance in _instances(group, members):
                    of_instance = torch.zeros(bucket.grad_data.numel())
                    for member in instance:
                        gradient = _scaled_gradient(bucket, ddp, case, member, step)
                        of_instance += oracles[id(bucket)][member].send(gradient)
                    total += of_instance / len(instance) if case.average else of_instance
                if case.average:
                    total /= case.num_instances
                start = group.intra_distributed_optimizer_instance_rank * shard.numel()
                expected = total[start : start + shard.numel()].to(shard.dtype)
                outcomes.append((f"step {step} bucket {bucket.bucket_id}", torch.equal(shard, expected)))
    return outcomes


def _instances(group: Any, members: list[int]) -> list[list[int]]:
    # The ranks of each optimizer instance: those of this one, moved by as much as their counterparts of this rank.
    others = getattr(group, "inter_distributed_optimizer_instance_group", None)
    counterparts = dist.get_process_group_ranks(others) if others else [dist.get_rank()]
    return [[member + counterpart - dist.get_rank() for member in members] for counterpart in counterparts]


def _scaled_gradient(bucket: Any, ddp: Any, case: Case, member: int, step: int) -> Tensor:
    grad = torch.zeros(bucket.grad_data.numel(), dtype=case.grad_dtype)
    for index, weight in enumerate(ddp.module.weights):
        if weight in bucket.param_to_index:
            start, stop = bucket.param_to_index[weight]
            for micro_batch in range(case.num_micro_batches):
                part = case.gradient(SHAPES[index], member, step, micro_batch, index)
                grad[start:stop] += part.view(-1).to(case.grad_dtype)
    return grad * bucket.gradient_scaling_factor


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, Case(overlap=True, num_micro_batches=3, bucket_size=700)),
        (3, Case(average=True, grad_dtype=torch.bfloat16)),
        (4, Case(overlap=True, expert_parallel=2)),
        (4, Case(overlap=True, context_parallel=2)),
        (4, Case(overlap=True, num_instances=2, bucket_size=700)),
        (4, Case(average=True, num_instances=2)),
    ],
)
def test_four_bits_equal_the_oracle(world_size: int, case: Case) -> None:
    for outcomes in run_ranks(_against_oracle, world_size, case):
        assert outcomes
        assert all(equal for _, equal in outcomes), outcomes


def _bypasses(rank: int, world_size: int) -> dict[str, Any]:
    """Warm-up, all-reduce, a stock model beside ours, and a NaN: what happens to data, error and counters."""
    result: dict[str, Any] = {}
    case = Case(overlap=True)
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron.core.distributed import param_and_grad_buffer as buffer_module

        from megatron_loco.integrations.megatron import patch

        neighbour = wrap(case)
        stack.enter_context(patch(LoCoConfig(bits=4, block_size=32, warmup_steps=1, min_bucket_numel=0)))
        ddp = wrap(case)
        ((group, _),) = buckets(ddp)
        ((_, state),) = group.loco_states

        train_step(neighbour, case, rank, 0)
        train_step(ddp, case, rank, 0)
        result["warm-up is stock"] = torch.equal(shards(ddp)[0], shards(neighbour)[0])
        result["warm-up leaves no error"] = not state.error.codes.any()

        with mock.patch.object(buffer_module.torch.distributed, "reduce_scatter_tensor", side_effect=AssertionError):
            train_step(ddp, case, rank, 1)
        result["compressed"] = (state.traffic.exact_steps, state.traffic.compressed_steps)
        error = state.error.codes.clone()
        result["error is kept"] = bool(error.any())

        ddp.force_all_reduce = True
        ddp.zero_grad_buffer()
        ddp([case.gradient(shape, rank, 2, 0, i) for i, shape in enumerate(SHAPES)]).backward()
        ddp.finish_grad_sync(force_all_reduce=True)
        ddp.force_all_reduce = False
        result["all-reduce leaves the error"] = torch.equal(error, state.error.codes) and state.step == 2
        train_step(neighbour, case, rank, 2)
        result["all-reduce is exact"] = torch.equal(shards(ddp)[0], shards(neighbour)[0])

        def poison(coefficients: list[Tensor]) -> None:
            if rank == 1:
                coefficients[0][0, 0] = torch.nan

        train_step(ddp, case, rank, 3, poison=poison)
        result["NaN seen"] = bool(shards(ddp)[0].isnan().any())
        result["error finite"] = bool(state.error.scales.isfinite().all())
        train_step(ddp, case, rank, 4)
        result["finite again"] = bool(shards(ddp)[0].isfinite().all())
    return result


@pytest.mark.kind(3, 9, 13)
def test_warm_up_all_reduce_neighbours_and_nan() -> None:
    results = run_ranks(_bypasses, 2)
    for result in results:
        assert result.pop("compressed") == (1, 1)
        result.pop("NaN seen")
        assert all(result.values()), result
    # The NaN sits in the first parameter, hence in the shard of whichever rank owns its block: at least one of them.
    assert any(r["NaN seen"] for r in run_ranks(_bypasses, 2))


def _exact_parameters(rank: int, world_size: int) -> dict[str, Any]:
    """Per pattern list: how many elements are quantised, and how far the result is from stock."""
    case = Case(overlap=True)
    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron_loco.integrations.megatron import patch

        stock = reduce_case(case, rank, None, 2)
        for patterns in ("1d", "none", "1d,weights.2", "weights.[04]", "*"):
            with patch(dataclasses.replace(LOCO, exact_params=patterns)):
                ddp = wrap(case)
                ((_, state),) = [pair for group in ddp.bucket_groups for pair in group.loco_states]
                for step in range(2):
                    train_step(ddp, case, rank, step)
            quantised = sum(run.stop - run.start for shard in state.layout.shards for run in shard.runs)
            exact = sum(shard.num_exact for shard in state.layout.shards)
            result[patterns] = (quantised, exact, torch.equal(shards(ddp)[0], stock[1][0]), state.traffic.sent_bytes)
    return result


def test_exact_parameters_are_chosen_by_name() -> None:
    numel = [33 * 20, 20, 7 * 65, 1, 128 * 3, 5]
    for result in run_ranks(_exact_parameters, 2):
        for patterns, exact in {
            "1d": (1, 3, 5),
            "none": (),
            "1d,weights.2": (1, 2, 3, 5),
            "weights.[04]": (0, 4),
        }.items():
            num_exact = sum(numel[i] for i in exact)
            assert result[patterns][:3] == (sum(numel) - num_exact, num_exact, False)
        # Nothing left to quantise: two ranks, hence bitwise the stock sum, at its price plus alignment.
        assert result["*"][:3] == (0, sum(numel), True)
        assert sum(numel) * 4 <= result["*"][3] <= sum(numel) * 4 + 2 * 16


def _small_buckets(rank: int, world_size: int) -> dict[str, Any]:
    """Several buckets, of which a limit leaves some to the stock function."""
    case = Case(overlap=True, bucket_size=700, multiple_of=world_size)
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron_loco.integrations.megatron import patch

        stock = reduce_case(case, rank, None, 2)
        with patch(dataclasses.replace(LOCO, min_bucket_numel=700)):
            ddp = wrap(case)
            for step in range(2):
                train_step(ddp, case, rank, step)
        return {
            "numel": [sum(b - a for a, b in bucket.param_to_index.values()) for _, bucket in buckets(ddp)],
            "states": [[state.name for _, state in group.loco_states] for group, _ in buckets(ddp)],
            "stock": [torch.equal(mine, theirs) for mine, theirs in zip(shards(ddp), stock[1], strict=True)],
        }


@pytest.mark.kind(17)
def test_small_buckets_are_left_to_the_stock_function() -> None:
    for result in run_ranks(_small_buckets, 3):
        small = [numel < 700 for numel in result["numel"]]
        assert True in small
        assert False in small
        assert [not states for states in result["states"]] == small
        assert result["stock"] == small


def _disagreement(rank: int, world_size: int) -> list[str]:
    messages = []
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron_loco.integrations.megatron.grad_sync import GradSync

        last = rank == world_size - 1
        for config, case in (
            (LoCoConfig(bits=4, beta=0.5 if last else 0.8, warmup_steps=3), Case()),
            (LOCO, Case(overlap=True, bucket_size=700 if last else None)),
            (LOCO, Case()),
        ):
            ddp = wrap(case)
            try:
                GradSync().attach(ddp, config)
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
    return messages


@pytest.mark.kind(21)
def test_ranks_that_differ_are_stopped_at_the_start() -> None:
    for messages in run_ranks(_disagreement, 3):
        settings, buckets_differ, equal = messages
        assert "--loco-beta: 0.8 on rank 0, 0.5 on rank 2" in settings
        assert "warmup" not in settings
        assert "number of buckets: 1 on rank 0" in buckets_differ
        assert equal == ""
