"""LoCo under Megatron's real DistributedDataParallel, compared with the unpatched one and with a one-process oracle."""

from __future__ import annotations

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

IDENTITY = LoCoConfig(bits=32, warmup_steps=0)
LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=0, reset_interval=0)


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


def _identity_differs(rank: int, world_size: int, cases: list[Case]) -> list[Case]:
    differing = []
    for expert_parallel, group in itertools.groupby(cases, key=lambda case: case.expert_parallel):
        with ExitStack() as stack:
            parallel_megatron(stack, expert_parallel)
            differing += [c for c in group if not _equal(reduce_case(c, rank, IDENTITY), reduce_case(c, rank, None))]
    return differing


def test_identity_codec_is_bitwise_stock_on_two_ranks() -> None:
    # The sum of two numbers does not depend on their order: any gradients, fp32 and bf16 buffers.
    assert run_ranks(_identity_differs, 2, _cases(multiple_of=0)) == [[], []]


@pytest.mark.parametrize("world_size", [1, 3])
def test_identity_codec_is_bitwise_stock_on_odd_groups(world_size: int) -> None:
    # Gloo's order of summation differs from rank order; integer values make every order exact. An average over three
    # ranks is rounded in different places by the two, so sums only there.
    cases = [case for case in _cases(multiple_of=world_size) if world_size == 1 or not case.average]
    assert run_ranks(_identity_differs, world_size, cases) == [[]] * world_size


def test_identity_codec_is_bitwise_stock_with_experts() -> None:
    # Expert buckets: other group (2 of 4 ranks), other scaling factor.
    cases = [
        Case(overlap=overlap, average=average, multiple_of=4, expert_parallel=ep)
        for ep, overlap, average in itertools.product((2, 4), (False, True), (False, True))
    ]
    assert run_ranks(_identity_differs, 4, cases) == [[]] * 4


def _against_oracle(rank: int, world_size: int, case: Case) -> list[tuple[str, bool]]:
    """Shards of a LoCo run against the sum in rank order of what an oracle of each rank sends."""
    outcomes = []
    with ExitStack() as stack:
        parallel_megatron(stack, case.expert_parallel)
        from megatron_loco.integrations.megatron import patch

        stack.enter_context(patch(LOCO))
        ddp = wrap(case)
        oracles = {
            id(bucket): [Oracle(state.layout, LOCO.beta) for _ in range(state.layout.world_size)]
            for group, _ in buckets(ddp)
            for bucket, state in getattr(group, "loco_states", [])
        }
        for step in range(3):
            train_step(ddp, case, rank, step)
            for (group, bucket), shard in zip(buckets(ddp), shards(ddp), strict=True):
                members = dist.get_process_group_ranks(group.intra_distributed_optimizer_instance_group)
                total = torch.zeros(bucket.grad_data.numel())
                for oracle, member in zip(oracles[id(bucket)], members, strict=True):
                    total += oracle.send(_scaled_gradient(bucket, ddp, case, member, step))
                if case.average:
                    total /= len(members)
                start = group.intra_distributed_optimizer_instance_rank * shard.numel()
                expected = total[start : start + shard.numel()].to(shard.dtype)
                outcomes.append((f"step {step} bucket {bucket.bucket_id}", torch.equal(shard, expected)))
    return outcomes


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
        stack.enter_context(patch(LoCoConfig(bits=4, block_size=32, warmup_steps=1)))
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


def test_warm_up_all_reduce_neighbours_and_nan() -> None:
    results = run_ranks(_bypasses, 2)
    for result in results:
        assert result.pop("compressed") == (1, 1)
        result.pop("NaN seen")
        assert all(result.values()), result
    # The NaN sits in the first parameter, hence in the shard of whichever rank owns its block: at least one of them.
    assert any(r["NaN seen"] for r in run_ranks(_bypasses, 2))


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


def test_ranks_that_differ_are_stopped_at_the_start() -> None:
    for messages in run_ranks(_disagreement, 3):
        settings, buckets_differ, equal = messages
        assert "--loco-beta: 0.8 on rank 0, 0.5 on rank 2" in settings
        assert "warmup" not in settings
        assert "number of buckets: 1 on rank 0" in buckets_differ
        assert equal == ""


def _ddp_config_refused(rank: int, world_size: int) -> list[str]:
    messages = []
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron.core.distributed import DistributedDataParallelConfig

        from megatron_loco.integrations.megatron.grad_sync import GradSync

        for setting in (
            {"use_distributed_optimizer": False},
            {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
            {"use_distributed_optimizer": True, "reduce_scatter_with_fp32_accumulation": True},
        ):
            ddp = mock.Mock(ddp_config=DistributedDataParallelConfig(**setting))
            with pytest.raises(ValueError) as caught:
                GradSync().attach(ddp, LOCO)
            messages.append(str(caught.value))
    return messages


def test_library_users_are_told_what_is_not_handled() -> None:
    (messages,) = run_ranks(_ddp_config_refused, 1)
    for message, name in zip(
        messages,
        ("use_distributed_optimizer", "num_distributed_optimizer_instances", "reduce_scatter_with_fp32_accumulation"),
        strict=True,
    ):
        assert name in message
